"""``tracelake trigger`` sends what was asked for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from typer.testing import CliRunner

from tracelake.cli import jobs
from tracelake.cli.main import app
from tracelake.contracts.dispatcher_api import TriggerResponse


@pytest.mark.parametrize(("options", "priority"), [((), "normal"), (("--priority", "bulk"), "bulk")])
def test_a_trigger_is_bulk_work_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], priority: str
) -> None:
    sent: list[dict[str, Any]] = []

    class Stub:
        def trigger(self, dag: str, job: str, **fields: Any) -> TriggerResponse:
            sent.append({"job": f"{dag}/{job}", **fields})
            return TriggerResponse(7, 1)

    monkeypatch.setattr(jobs, "connect", lambda *_: nullcontext(Stub()))
    done = CliRunner().invoke(app, ["trigger", "chain/src", "--cursor", "9", *options])
    assert done.output == "event 7: 1 task created\n"
    assert sent == [{"job": "chain/src", "cursor": 9, "start": None, "end": None, "priority": priority}]
