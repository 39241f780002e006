"""What a task is about: the blocks that its rows are of, and those that it did again."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import pytest

from tracelake.contracts.dispatcher_api import PayloadInput, PayloadInvalidation
from tracelake.dispatcher.steps import render_payload
from tracelake.dispatcher.steps.publish_buffer import remade, scope_of
from tracelake.domain.block_range import BlockRange
from tracelake.domain.task import RetryPolicy, TaskKind, TaskState, TaskStatus
from tracelake.store.tasks import TaskRow

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SOME = UUID(int=1)
Span = tuple[int, int]


def read(
    after: int,
    upto: int,
    taken_back: Span | None = None,
    *,
    trigger: bool = True,
    cursor_column: str | None = None,
) -> PayloadInput:
    undo = PayloadInvalidation(*taken_back, 1) if taken_back else None
    return PayloadInput(
        0,
        SOME,
        SOME,
        0,
        None,
        "postgres",
        trigger=trigger,
        after=after,
        upto=upto,
        invalidation=undo,
        cursor_column=cursor_column,
    )


def task(*reads: PayloadInput, scope: Span | None = None) -> TaskRow:
    kind = TaskKind.CURSOR if scope is None else TaskKind.PARTITION
    state = TaskState(
        SOME, kind, TaskStatus.RUNNING, 1, 0, None, "w", None, SOME, NOW, RetryPolicy(3, 1, 2), True, False
    )
    return TaskRow(
        state=state,
        seq=1,
        job_id=SOME,
        scope=BlockRange(*scope) if scope else None,
        inputs=render_payload.to_json(reads),
        output_revisions={},
        lease_expires_at=NOW,
        epoch=1,
        runtime="lambda",
        timeout_seconds=1,
        heartbeat_timeout_seconds=1,
        idle_timeout_seconds=None,
        max_concurrency=None,
        now=NOW,
        operator="noop",
        bulk=False,
        is_bulk=False,
        held=False,
        operator_cap=None,
    )


CASES = {
    "one input": ([read(99, 105)], (100, 105), None),
    "one that was taken back and grew": ([read(99, 110, (100, 105))], (100, 110), (100, 110)),
    "one that was taken back and didn't": ([read(99, 99, (100, 105))], (100, 105), (100, 105)),
    "from the very first block": ([read(-1, 5)], (0, 5), None),
    "nothing to read": ([read(99, 99)], None, None),
    "two inputs": ([read(99, 105), read(90, 100)], (91, 105), None),
    "the second was taken back": ([read(110, 110), read(99, 110, (100, 105))], (100, 110), (100, 110)),
    "the second, and nothing new": ([read(110, 110), read(99, 99, (100, 105))], (100, 105), (100, 105)),
    "the second, while the first goes on": (
        [read(110, 120), read(99, 99, (100, 105))],
        (111, 120),
        (100, 105),
    ),
    "both": ([read(89, 95, (90, 92)), read(99, 99, (100, 105))], (90, 95), (90, 105)),
    "a buffer's positions are no blocks": (
        [read(5, 9, cursor_column="position"), read(99, 110, (100, 105))],
        (100, 110),
        (100, 110),
    ),
    "only a buffer": ([read(5, 9, cursor_column="position")], None, None),
    "what doesn't trigger": ([read(99, 105), read(0, 500, (1, 2), trigger=False)], (100, 105), None),
}


@pytest.mark.parametrize(("reads", "scope", "again"), CASES.values(), ids=CASES.keys())
def test_an_update_is_about_what_it_reads_and_did_again_what_was_taken_back_of_any_input(
    reads: list[PayloadInput], scope: Span | None, again: Span | None
) -> None:
    row = task(*reads)
    assert scope_of(row) == (BlockRange(*scope) if scope else None)
    assert remade(row) == (BlockRange(*again) if again else None)


def test_a_partition_is_done_again_as_a_whole() -> None:
    undone = read(0, 0, (105, 105))
    assert remade(task(read(0, 0), undone, scope=(100, 109))) == BlockRange(100, 109)
    assert remade(task(read(0, 0), scope=(100, 109))) is None
    assert scope_of(task(read(0, 0), scope=(100, 109))) == BlockRange(100, 109)
