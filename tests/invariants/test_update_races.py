"""A PerUpdate job against partitions that come out of order: whoever is first, everything gets read."""

from __future__ import annotations

import asyncpg
import pytest

from tests.support.conversation import Conversation, Lease, dag, reactive, source
from tests.support.interleave import COMMIT, Interleaver
from tracelake.contracts.dispatcher_api import CompleteResponse, OutputIn
from tracelake.dispatcher.steps.complete_task import complete_tasks
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import Conflict
from tracelake.store import datasets, tasks


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


@pytest.fixture
def both(talk: Conversation, pool: asyncpg.Pool) -> Interleaver:
    return Interleaver(talk, pool)


async def out_of_order(talk: Conversation) -> Lease:
    """``up`` may read 10-19, which came first; the attempt at 0-9 still runs."""
    await talk.deploy(
        dag(
            source(), reactive("work", "src", storage="parquet"), reactive("up", "work", strategy="PerUpdate")
        )
    )
    await talk.trigger(0, 9)
    late = await talk.lease("work")
    await talk.trigger(10, 19)
    await talk.run("work")
    return late


async def reads_everything(talk: Conversation, lease: Lease) -> None:
    """The next attempt has 0-9 in its range, and ends well."""
    assert (lease.read.after, lease.read.upto) == (-1, 19)
    await talk.complete(lease)
    assert (await talk.consumed("up"))["cursor"] == 19


@pytest.mark.parametrize("hold", [COMMIT, datasets.SQL.commit_partitions, tasks.SQL.create_cursor_tasks])
async def test_invariant_2_a_partition_committed_just_before_the_update_that_missed_it_refuses_it(
    talk: Conversation, both: Interleaver, hold: str
) -> None:
    late = await out_of_order(talk)
    update = await talk.lease("up")
    seen = await both.run(lambda c: c.complete_scope(late), lambda c: c.complete(update), hold=hold)
    assert seen.second_waited
    assert isinstance(seen.second, Conflict)
    assert seen.second.reason == "InputChanged"
    assert (await talk.consumed("up"))["cursor"] == -1
    await reads_everything(talk, await talk.lease(update.task_id))


@pytest.mark.parametrize("hold", [COMMIT, datasets.SQL.filled_in_since, datasets.SQL.advance_consumers])
async def test_invariant_2_a_partition_committed_just_after_the_update_that_missed_it_sends_it_back(
    talk: Conversation, both: Interleaver, hold: str
) -> None:
    late = await out_of_order(talk)
    update = await talk.lease("up")
    seen = await both.run(lambda c: c.complete(update), lambda c: c.complete_scope(late), hold=hold)
    assert seen.second_waited
    assert isinstance(seen.first, CompleteResponse)
    assert isinstance(seen.second, CompleteResponse)
    await reads_everything(talk, await talk.lease("up"))


@pytest.mark.parametrize("late_first", [True, False])
async def test_invariant_2_neither_of_the_two_before_its_gate_loses_anything(
    talk: Conversation, both: Interleaver, late_first: bool
) -> None:
    """The one that is held has decided nothing yet: the other one goes through and is found."""
    late = await out_of_order(talk)
    update = await talk.lease("up")

    async def commit(c: Conversation) -> object:
        return await c.complete_scope(late)

    async def end(c: Conversation) -> object:
        return await c.complete(update)

    one, two = (commit, end) if late_first else (end, commit)
    seen = await both.run(one, two, hold=tasks.SQL.lock_gates)
    assert not seen.second_waited
    assert isinstance(seen.first, CompleteResponse if late_first else Conflict)
    assert isinstance(seen.second, CompleteResponse)
    await reads_everything(talk, await talk.lease("up" if late_first else update.task_id))


@pytest.mark.parametrize("hold", [COMMIT, datasets.SQL.commit_partitions])
async def test_a_claim_just_after_the_partition_has_it_and_is_not_refused(
    talk: Conversation, both: Interleaver, hold: str
) -> None:
    late = await out_of_order(talk)
    waiting = await talk.only_queued("up")
    seen = await both.run(lambda c: c.complete_scope(late), lambda c: c.lease(waiting), hold=hold)
    assert seen.second_waited
    assert isinstance(seen.second, Lease)
    await reads_everything(talk, seen.second)


@pytest.mark.parametrize("hold", [COMMIT, tasks.SQL.start_attempts])
async def test_a_claim_just_before_the_partition_is_refused_in_the_end(
    talk: Conversation, both: Interleaver, hold: str
) -> None:
    late = await out_of_order(talk)
    waiting = await talk.only_queued("up")
    seen = await both.run(lambda c: c.lease(waiting), lambda c: c.complete_scope(late), hold=hold)
    assert seen.second_waited
    assert isinstance(seen.first, Lease)
    with pytest.raises(Conflict) as refused:
        await talk.complete(seen.first)
    assert refused.value.reason == "InputChanged"
    await reads_everything(talk, await talk.lease(waiting))


@pytest.mark.parametrize("late_first", [True, False])
async def test_a_partition_and_the_update_that_missed_it_in_one_call_lose_nothing(
    talk: Conversation, late_first: bool
) -> None:
    late = await out_of_order(talk)
    update = await talk.lease("up")
    requests = [late.completion(OutputIn(0, start=0, end=9, row_count=0)), update.completion()]
    answers = await complete_tasks(talk.ctx, requests if late_first else requests[::-1])
    assert all(isinstance(answer, CompleteResponse) for answer in answers)
    await reads_everything(talk, await talk.lease("up"))


async def test_the_late_reply_of_an_update_that_was_given_up_is_refused_too(talk: Conversation) -> None:
    late = await out_of_order(talk)
    update = await talk.lease("up")
    await talk.reap()
    await talk.complete_scope(late)
    with pytest.raises(Conflict) as refused:
        await talk.complete(update)
    assert refused.value.reason == "InputChanged"
    await reads_everything(talk, await talk.lease(update.task_id))
