"""Tasks by the beginning of their id: one that is meant clearly is found, and anything else is told so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast
from uuid import UUID

import pytest
import typer.testing

from tracelake.cli import explain
from tracelake.cli.main import app
from tracelake.cli.tasks import find_task
from tracelake.client import Client
from tracelake.domain.errors import Invalid, NotFound

ONE = UUID("0190b6c1-7e7a-4d3c-9c0e-5a3b0f6f2f11")
OTHER = UUID("0190b6c1-0000-4d3c-9c0e-5a3b0f6f2f11")
THIRD = UUID("facade00-0000-4d3c-9c0e-5a3b0f6f2f11")


class Recent:
    """As much of a client as is asked for a list of tasks."""

    def tasks(self, *, limit: int) -> SimpleNamespace:
        return SimpleNamespace(tasks=[SimpleNamespace(task_id=each) for each in (ONE, OTHER, THIRD)][:limit])

    def explain_range(self, name: str, **_: object) -> str:
        if name != "facade":
            raise NotFound("UnknownDataset", f"there is no dataset {name}")
        return name

    def explain_task(self, task_id: UUID, *, depth: int) -> UUID:
        return task_id


RECENT = cast(Client, Recent())


@pytest.mark.parametrize("text", ["0190b6c1-7", "0190B6C1-7E7A", str(ONE), ONE.hex])
def test_a_beginning_that_means_one_task_is_enough(text: str) -> None:
    assert find_task(RECENT, text) == ONE


def test_a_beginning_that_means_several_or_none_is_told_so() -> None:
    with pytest.raises(Invalid, match=f"any of 2 tasks: {OTHER}, {ONE}"):
        find_task(RECENT, "0190b6")
    with pytest.raises(NotFound, match="ids are in `tracelake tasks`"):
        find_task(RECENT, "0190b7")


@pytest.mark.parametrize("command", [("task", "show"), ("cancel",), ("retry",)])
@pytest.mark.parametrize("text", ["0190b", "nobody", "0190b6c1-7e7a-4d3c-9c0e-5a3b0f6f2f11-2"])
def test_what_is_no_id_is_refused_before_anybody_is_asked(command: tuple[str, ...], text: str) -> None:
    refused = typer.testing.CliRunner().invoke(app, [*command, text], env={"COLUMNS": "300"})
    assert refused.exit_code == 2
    assert "ids are in `tracelake tasks`" in refused.stderr


def test_explain_takes_a_beginning_unless_it_is_the_name_of_a_dataset() -> None:
    def look(what: str) -> object:
        return explain._look(RECENT, what, None, None, 20, 100)

    assert look("facade") == "facade"
    assert look("facade0") == THIRD
    with pytest.raises(NotFound, match="there is no dataset nobody; ids of tasks are in `tracelake tasks`"):
        look("nobody")
