"""The test of an operator of a source: what each kind of source gives it, without a stack."""

from typing import Any

import pytest

from examples.operators.announce_blocks import announce_blocks
from tracelake.testing import run_operator


@pytest.mark.parametrize(
    ("source", "announced"),
    [
        ({"kind": "cron", "tick": 1795034400}, [(1795034400, None, None)]),
        ({"kind": "webhook", "delivery": {"body": '{"start": 5, "end": 9}'}}, [(None, 5, 9)]),
        ({"kind": "manual", "request": {"start": 5, "end": 9}}, [(None, 5, 9)]),
        ({"kind": "manual", "request": {}}, []),
    ],
)
def test_what_the_task_is_for_is_announced(
    source: dict[str, Any], announced: list[tuple[int | None, ...]]
) -> None:
    run = run_operator(announce_blocks, source=source, outputs={"result": "none"})
    assert [(event.cursor, event.start, event.end) for event in run.events] == announced
