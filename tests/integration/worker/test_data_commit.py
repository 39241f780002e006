"""The wrapper's commits: what an attempt left unsaid is the next one's to say, if it still holds."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID, uuid4

import pytest

from tests.support.hot_scene import SOURCE, VERSION, output_of, writer
from tracelake.contracts.dispatcher_api import EventIn, JobRef, PayloadInput, PayloadOutput, TaskPayload
from tracelake.domain.block_range import BlockRange
from tracelake.hot.commit import HotStore
from tracelake.worker.data_commit import DataCommitter

EVERYTHING = BlockRange(0, 2**63 - 2)


def attempt(task_id: UUID, epoch: int, revision: int) -> TaskPayload:
    """Of a job that follows a cursor into a hot table."""
    read = PayloadInput(0, SOURCE, SOURCE, revision, None, "postgres", after=3, upto=9)
    written = PayloadOutput(0, "rows", VERSION, VERSION, "postgres", 0, None, None)
    return TaskPayload(
        task_id=task_id,
        attempt=epoch,
        epoch=epoch,
        job=JobRef("dag", "job"),
        operator="own",
        config={},
        inputs=[read],
        outputs=[written],
        runtime="ecs_python",
        timeout_seconds=60,
        heartbeat_timeout_seconds=60,
        update_strategy="replace",
        unique_key=[],
        secrets=[],
    )


@pytest.mark.parametrize(("revision", "is_said"), [(0, True), (1, False)], ids=["as it was", "taken back"])
async def test_what_was_left_unsaid_is_said_only_if_its_inputs_are_what_they_were(
    hot: HotStore, revision: int, is_said: bool
) -> None:
    task_id, said = uuid4(), list[EventIn]()
    killed = writer(1, task_id, revision=0)
    await hot.begin(killed, VERSION, EVERYTHING)
    event = EventIn(VERSION, VERSION, cursor=9)
    await hot.commit(killed, [output_of()], BlockRange(4, 9), [event])

    async def say(events: Sequence[EventIn]) -> None:
        said.extend(events)

    await DataCommitter(hot).begin(attempt(task_id, 2, revision), say)
    assert said == ([event] if is_said else [])
    assert await hot.pending_events(task_id) == []
