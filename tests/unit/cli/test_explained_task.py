"""``tracelake explain`` names what a source's task is for as ``tracelake task show`` does."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from tracelake.cli.explain import print_explanation
from tracelake.contracts.explain import ExplainedTask, TaskExplanation

TASK = UUID(int=1)


@pytest.mark.parametrize(
    ("requested", "shown"),
    [
        ({"kind": "webhook", "number": 9}, "for a delivery to its webhook: delivery 9"),
        ({"kind": "cron", "number": 60}, "for a tick of its schedule: tick 60, 1970-01-01 00:01:00Z"),
        (
            {"kind": "manual", "number": 2, "cursor": 7},
            "for a trigger by a person or a program: trigger 2, cursor 7",
        ),
    ],
)
def test_the_request_is_named_with_its_number(
    requested: dict[str, Any], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task = ExplainedTask(
        task_id=TASK,
        dag_name="dag",
        job="hook",
        operator="own",
        runtime="ecs_python",
        kind="request",
        status="Completed",
        attempt=1,
        worker_id=None,
        outcome=None,
        error_message=None,
        start=None,
        end=None,
        because=requested["kind"],
        depth=0,
        handovers=[],
        causes=[],
        requested=requested,
    )
    print_explanation(
        TaskExplanation(task_id=TASK, depth=1, tasks=[task], unexplored=[], waiting_for=None, seconds=None)
    )
    assert shown in capsys.readouterr().out.splitlines()
