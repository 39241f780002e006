"""Routing against routing and against deploys: exactly one task for what counts, never none, never two."""

from __future__ import annotations

from uuid import UUID

import asyncpg
import pytest

from tests.support.conversation import Conversation, dag, reactive, source
from tests.support.interleave import COMMIT, Interleaver
from tracelake.contracts.dispatcher_api import EventsResponse, TriggerResponse
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.deploy_dag import Deployed
from tracelake.dispatcher.steps.upkeep import reconcile_partitions, watch_sources
from tracelake.store import datasets, tasks


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


@pytest.fixture
def both(talk: Conversation, pool: asyncpg.Pool) -> Interleaver:
    return Interleaver(talk, pool)


HOLDS = [COMMIT, tasks.SQL.lock_gates, datasets.SQL.announce_scopes, tasks.SQL.create_partition_tasks]


@pytest.mark.parametrize("hold", HOLDS)
async def test_two_halves_of_a_join_committed_at_once_make_exactly_one_task(
    talk: Conversation, both: Interleaver, hold: str
) -> None:
    await talk.deploy(dag(source("left"), source("right"), reactive("join", "left", "right")))
    seen = await both.run(
        lambda c: c.trigger(0, 9, job="left"), lambda c: c.trigger(0, 9, job="right"), hold=hold
    )
    assert isinstance(seen.first, TriggerResponse)
    assert isinstance(seen.second, TriggerResponse)
    assert seen.first.tasks_created + seen.second.tasks_created == 1
    await talk.only_queued("join")


@pytest.mark.parametrize("hold", HOLDS[:2])
@pytest.mark.parametrize("cursor_first", [True, False])
async def test_a_cursor_and_a_scope_that_meet_in_a_join_make_exactly_one_task(
    talk: Conversation, both: Interleaver, hold: str, cursor_first: bool
) -> None:
    await talk.deploy(dag(source("ranges"), source("head"), reactive("join", "ranges", "head")))

    async def scope(c: Conversation) -> object:
        return await c.trigger(0, 9, job="ranges")

    async def cursor(c: Conversation) -> object:
        return await c.trigger(cursor=9, job="head")

    one, two = (cursor, scope) if cursor_first else (scope, cursor)
    await both.run(one, two, hold=hold)
    await talk.only_queued("join")


async def test_one_scope_announced_twice_at_once_makes_one_task(
    talk: Conversation, both: Interleaver
) -> None:
    await talk.deploy(dag(source(), reactive("work", "src"), reactive("up", "src", strategy="PerUpdate")))
    await both.run(lambda c: c.trigger(0, 9), lambda c: c.trigger(0, 9))
    await talk.only_queued("work")
    await talk.only_queued("up")


async def test_two_updates_at_once_share_the_one_waiting_task(talk: Conversation, both: Interleaver) -> None:
    await talk.deploy(dag(source(), reactive("up", "src", strategy="PerUpdate")))
    seen = await both.run(lambda c: c.trigger(cursor=5), lambda c: c.trigger(cursor=7))
    assert seen.second_waited
    assert (await talk.lease("up")).read.upto == 7


@pytest.mark.parametrize("event_first", [True, False])
async def test_an_event_against_the_end_of_the_update_that_runs_is_never_lost(
    talk: Conversation, both: Interleaver, event_first: bool
) -> None:
    await talk.deploy(dag(source(), reactive("up", "src", strategy="PerUpdate")))
    await talk.trigger(cursor=5)
    lease = await talk.lease("up")

    async def event(c: Conversation) -> object:
        return await c.trigger(cursor=8)

    async def end(c: Conversation) -> object:
        return await c.complete(lease)

    await both.run(*((event, end) if event_first else (end, event)))
    following = await talk.lease("up")
    assert (following.read.after, following.read.upto) == (5, 8)


async def test_the_reconciler_against_routing_makes_no_second_task(
    talk: Conversation, both: Interleaver
) -> None:
    await talk.deploy(dag(source()))
    await talk.trigger(0, 9)
    await talk.deploy(dag(source(), reactive("work", "src"), reactive("up", "src", strategy="PerUpdate")))
    await both.run(
        lambda c: reconcile_partitions(c.ctx),
        lambda c: c.trigger(0, 9),
        hold=tasks.SQL.create_partition_tasks,
    )
    await talk.only_queued("work")
    await talk.only_queued("up")


def version(config: int) -> str:
    return dag(source(), reactive("work", "src", config={"v": config}))


async def generations(talk: Conversation, task_ids: list[UUID]) -> list[bool]:
    return [(await talk.task(task))["active"] for task in task_ids]


async def test_an_event_routed_before_a_deploy_is_canceled_with_the_generation_it_was_for(
    talk: Conversation, both: Interleaver
) -> None:
    await talk.deploy(version(1))
    seen = await both.run(lambda c: c.trigger(0, 9), lambda c: c.deploy(version(2)))
    assert seen.second_waited
    assert [await talk.status(task) for task in await talk.tasks("work")] == ["Canceled"]
    assert await reconcile_partitions(talk.ctx) == 1
    assert await generations(talk, await talk.queued("work")) == [True]


async def test_an_event_routed_after_a_deploy_goes_to_the_new_generation_alone(
    talk: Conversation, both: Interleaver
) -> None:
    await talk.deploy(version(1))
    seen = await both.run(lambda c: c.deploy(version(2)), lambda c: c.trigger(0, 9))
    assert seen.second_waited
    assert await generations(talk, await talk.tasks("work")) == [True]


async def test_a_completion_held_up_by_a_deploy_of_its_job_is_kept_and_not_routed(
    talk: Conversation, both: Interleaver
) -> None:
    await talk.deploy(dag(source(), reactive("work", "src"), reactive("next", "work")))
    await talk.trigger(0, 9)
    lease = await talk.lease("work")
    newer = dag(source(), reactive("work", "src", config={"v": 2}), reactive("next", "work"))
    seen = await both.run(lambda c: c.deploy(newer), lambda c: c.complete_scope(lease))
    assert seen.second_waited
    assert await talk.status(lease.task_id) == "Completed"
    assert await talk.tasks("next") == []
    assert [e["state"] for e in await talk.events() if e["task_id"]] == ["old_version"]


async def test_two_deploys_of_one_file_at_once_are_one_version(talk: Conversation, both: Interleaver) -> None:
    seen = await both.run(lambda c: c.deploy(version(1)), lambda c: c.deploy(version(1)))
    assert seen.second_waited
    assert isinstance(seen.first, Deployed)
    assert isinstance(seen.second, Deployed)
    assert (seen.first.created, seen.second.created) == (True, False)
    assert seen.first.jobs == seen.second.jobs
    assert seen.first.dag_version == seen.second.dag_version == 1


async def test_of_two_deploys_at_once_the_later_one_stands_whole(
    talk: Conversation, both: Interleaver
) -> None:
    await talk.deploy(version(1))
    seen = await both.run(lambda c: c.deploy(version(2)), lambda c: c.deploy(version(3)))
    assert seen.second_waited
    assert isinstance(seen.second, Deployed)
    [active] = await talk.query("SELECT config FROM job WHERE name = 'work' AND active")
    assert active["config"] == {"v": 3}
    [current] = await talk.query(
        "SELECT dv.dataset_version FROM dataset_version dv JOIN job j USING (job_id) "
        "WHERE j.name = 'work' AND dv.is_current"
    )
    assert current["dataset_version"] == seen.second.jobs["work"][0].dataset_version


async def test_two_monitors_at_once_give_a_source_one_task(talk: Conversation, both: Interleaver) -> None:
    await talk.deploy(dag(source(kind="always_on")))
    await talk.query("DELETE FROM task")
    await both.run(lambda c: watch_sources(c.ctx), lambda c: watch_sources(c.ctx))
    await talk.only_queued("src")


async def test_events_of_two_producers_at_once_do_not_wait_for_each_other(
    talk: Conversation, both: Interleaver
) -> None:
    """Only joins and merged updates meet; plain scopes of one consumer are routed side by side."""
    await talk.deploy(dag(source(), reactive("made", "src"), reactive("read", "made")))
    await talk.trigger(0, 9)
    one = await talk.lease("made")
    await talk.trigger(10, 19)
    two = await talk.lease("made")
    seen = await both.run(lambda c: c.complete_scope(one), lambda c: c.complete_scope(two))
    assert not seen.second_waited
    assert not isinstance(seen.second, EventsResponse)
    assert len(await talk.queued("read")) == 2
