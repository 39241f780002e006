"""Warnings of ``plan`` and ``deploy``: beside the answer, in the form of compilers."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from typer.testing import CliRunner

from tracelake.cli import dags
from tracelake.cli.main import app
from tracelake.client import Client
from tracelake.contracts.user_api import DagWarning, DeployResponse, PlanResponse

WARNINGS = [DagWarning(8, 5, "jobs[1].operator", "nooop is no built-in operator; did you mean noop?")]


class Stack:
    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None: ...

    def plan(self, *_: object, **__: object) -> PlanResponse:
        return PlanResponse("chain", False, [], [], "the plan", warnings=WARNINGS)

    def deploy(self, *_: object, **__: object) -> tuple[DeployResponse, bool]:
        return DeployResponse("chain", 1, [], warnings=WARNINGS), True


@pytest.mark.parametrize(
    ("command", "answer"), [("plan", "the plan"), ("deploy", "chain version 1: deployed, 0 jobs active")]
)
def test_a_warning_names_its_place_and_the_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, answer: str
) -> None:
    monkeypatch.setattr(dags, "connect", lambda *_: cast(Client, Stack()))
    file = tmp_path / "chain.yaml"
    file.write_text("name: chain")
    shown = CliRunner().invoke(app, [command, str(file)], catch_exceptions=False)
    assert shown.exit_code == 0
    assert shown.stdout.strip() == answer
    warning = "warning: jobs[1].operator: nooop is no built-in operator; did you mean noop?"
    assert shown.stderr.strip() == f"{file}:8:5: {warning}"
