"""Events: whose they are, when they count, and which tasks they make."""

from __future__ import annotations

from uuid import uuid4

import pytest

from tests.support.conversation import Conversation, Lease, dag, reactive, source, taken_back
from tracelake.contracts.dispatcher_api import EventIn, InvalidateRange, OutputIn, TriggerRequest
from tracelake.dispatcher.steps.accept_events import trigger_source
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import Conflict, Forbidden, Invalid, NotFound


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


PUBLISH = {"work_rows": {"from": {"job": "work", "output": 0}}}


async def running(talk: Conversation, storage: str = "none", **fields: object) -> Lease:
    """A claimed task of ``work``, whose output is published as ``work_rows`` and read by ``next``."""
    jobs = (source(), reactive("work", "src", storage=storage, **fields), reactive("next", "work"))
    await talk.deploy(dag(*jobs, publish=PUBLISH))
    await talk.trigger(0, 9)
    return await talk.lease("work")


async def following(talk: Conversation) -> Lease:
    await talk.deploy(
        dag(source(kind="always_on", storage="postgres"), reactive("up", "src", strategy="PerUpdate"))
    )
    return await talk.lease("src")


async def test_a_single_event_and_a_batch_count_alike(talk: Conversation) -> None:
    lease = await running(talk)
    uuid = await talk.dataset("work")
    single = await talk.emit(lease, EventIn(uuid, start=0, end=1))
    assert (single.events[0].state, single.tasks_created) == ("counted", 1)
    batch = await talk.emit(lease, *(EventIn(uuid, partition_key=f"{n}-{n}") for n in (5, 3, 4)))
    assert batch.tasks_created == 3
    assert await talk.scopes("work") == [(0, 1), (3, 3), (4, 4), (5, 5)]
    ids = [event.event_id for event in batch.events]
    bounds = {row["event_id"]: row["range_start"] for row in await talk.events()}
    assert [bounds[event_id] for event_id in ids] == [5, 3, 4], "answers come in the order of the events"


async def test_an_event_by_published_name_means_the_tasks_own_version(talk: Conversation) -> None:
    lease = await running(talk)
    answer = await talk.emit(lease, EventIn(dataset="work_rows", start=0, end=9))
    assert answer.tasks_created == 1
    assert await talk.scopes("work") == [(0, 9)]


async def test_events_need_no_lease_token_for_the_current_attempt_only(talk: Conversation) -> None:
    lease = await running(talk)
    event = EventIn(await talk.dataset("work"), start=0, end=9)
    await talk.emit(lease, event, fenced=False)
    await talk.complete(lease, status="Released")
    with pytest.raises(Conflict):
        await talk.emit(lease, event, fenced=False)
    await talk.lease(lease.task_id)
    with pytest.raises(Conflict) as refused:
        await talk.emit(lease, event, fenced=False)
    assert refused.value.reason == "StaleAttempt"


async def test_nobody_speaks_of_anothers_dataset(talk: Conversation) -> None:
    lease = await running(talk)
    before = await talk.everything()
    for event in (
        EventIn(await talk.dataset("src"), start=0, end=9),
        EventIn(await talk.dataset("next"), start=0, end=9),
        EventIn(uuid4(), start=0, end=9),
        EventIn(dataset="nobody_knows", start=0, end=9),
        taken_back(await talk.dataset("src"), 0, 9),
    ):
        with pytest.raises(Forbidden) as refused:
            await talk.emit(lease, event)
        assert refused.value.reason == "NotYourDataset"
    assert await talk.everything() == before


async def test_one_wrong_event_of_a_batch_refuses_the_whole_batch(talk: Conversation) -> None:
    lease = await running(talk)
    good = EventIn(await talk.dataset("work"), start=0, end=9)
    before = await talk.everything()
    with pytest.raises(Forbidden):
        await talk.emit(lease, good, EventIn(uuid4(), start=0, end=9))
    assert await talk.everything() == before


async def test_a_version_that_never_existed_is_refused(talk: Conversation) -> None:
    lease = await running(talk)
    other = (await talk.output("src"))["dataset_version"]
    for version in (uuid4(), other):
        with pytest.raises(Invalid) as refused:
            await talk.emit(lease, EventIn(await talk.dataset("work"), version, start=0, end=9))
        assert refused.value.reason == "UnknownVersion"


async def test_events_of_an_older_version_are_kept_and_not_routed(talk: Conversation) -> None:
    await running(talk)
    old = await talk.output("work")
    lease = await running(talk, config={"v": 2})
    answer = await talk.emit(lease, EventIn(old["dataset_uuid"], old["dataset_version"], start=0, end=9))
    assert (answer.events[0].state, answer.tasks_created) == ("old_version", 0)
    assert await talk.scopes("work") == []
    assert (await talk.events())[-1]["dataset_version"] == old["dataset_version"]


async def test_a_replaced_generation_fills_its_own_version_unrouted(talk: Conversation) -> None:
    old = await running(talk)
    version = (await talk.output("work"))["dataset_version"]
    uuid = await talk.dataset("work")
    newer = reactive("work", "src", config={"v": 2}), reactive("next", "work")
    await talk.deploy(dag(source(), *newer, publish=PUBLISH))
    answer = await talk.emit(old, EventIn(uuid, start=0, end=9))
    assert (answer.events[0].state, answer.tasks_created) == ("old_version", 0)
    [partition] = await talk.query("SELECT dataset_version, current FROM partition WHERE task_id IS NOT NULL")
    assert (partition["dataset_version"], partition["current"]) == (version, True)


async def test_parquet_events_wait_for_the_completion_that_commits_them(talk: Conversation) -> None:
    lease = await running(talk, storage="parquet")
    uuid = await talk.dataset("work")
    answer = await talk.emit(lease, EventIn(uuid, start=0, end=9))
    assert (answer.events[0].state, answer.tasks_created) == ("pending", 0)
    assert await talk.scopes("work") == []
    await talk.complete(lease, OutputIn(0, start=0, end=9, row_count=0))
    assert await talk.scopes("work") == [(0, 9)]
    await talk.only_queued("next")
    said = [(row["event_id"], row["state"]) for row in await talk.events() if row["task_id"]]
    assert said == [(answer.events[0].event_id, "counted")], "the completion adds none of its own"


async def test_a_completion_records_an_event_for_each_output_that_the_worker_did_not_name(
    talk: Conversation,
) -> None:
    lease = await running(talk, outputs=[{"name": "a"}, {"name": "b"}])
    await talk.complete(
        lease,
        OutputIn(0, start=0, end=9),
        OutputIn(1, start=0, end=9),
        events=[EventIn(await talk.dataset("work", 1), start=0, end=9)],
    )
    said = [row for row in await talk.events() if row["task_id"]]
    assert len(said) == 2
    assert {row["dataset_version"] for row in said} == {
        (await talk.output("work", index))["dataset_version"] for index in (0, 1)
    }


async def test_a_postgres_cursor_counts_at_once_and_only_rises(talk: Conversation) -> None:
    lease = await following(talk)
    uuid = await talk.dataset("src")
    assert (await talk.emit(lease, EventIn(uuid, cursor=7, finalized=5))).events[0].state == "counted"
    await talk.emit(lease, EventIn(uuid, cursor=3, finalized=2))
    output = await talk.output("src")
    assert (output["cursor"], output["finalized"]) == (7, 5)
    await talk.emit(lease, EventIn(uuid, cursor=4, finalized=6))
    assert (await talk.output("src"))["finalized"] == 6
    assert (await talk.lease("up")).read.finalized == 6


async def test_a_cursor_is_no_scope_of_a_parquet_output(talk: Conversation) -> None:
    lease = await running(talk, storage="parquet")
    with pytest.raises(Invalid):
        await talk.emit(lease, EventIn(await talk.dataset("work"), cursor=9))
    with pytest.raises(Invalid):
        await talk.complete(lease, OutputIn(0, cursor=9))


async def test_invariant_3_an_event_said_again_is_the_same_event(talk: Conversation) -> None:
    lease = await running(talk)
    event = EventIn(await talk.dataset("work"), start=0, end=9)
    first = await talk.emit(lease, event, event)
    assert first.events[0] == first.events[1]
    before = await talk.everything()
    again = await talk.emit(lease, event)
    assert again.events == first.events[:1]
    assert again.tasks_created == 0
    assert await talk.everything() == before


async def test_invariant_3_events_in_any_order_give_the_same_state(talk: Conversation) -> None:
    lease = await following(talk)
    uuid = await talk.dataset("src")
    for cursor in (5, 9, 2, 9, 7):
        await talk.emit(lease, EventIn(uuid, cursor=cursor))
    assert (await talk.output("src"))["cursor"] == 9
    assert (await talk.lease("up")).read.upto == 9


async def test_an_event_of_an_older_revision_is_kept_and_does_not_count(talk: Conversation) -> None:
    lease = await following(talk)
    uuid = await talk.dataset("src")
    await talk.emit(lease, EventIn(uuid, cursor=9, revision=0))
    await talk.emit(lease, taken_back(uuid, 5, 9))
    late = await talk.emit(lease, EventIn(uuid, cursor=10, revision=0))
    assert (late.events[0].state, late.events[0].revision) == ("old_revision", 1)
    assert (await talk.output("src"))["cursor"] == 4
    untouched = await talk.emit(lease, EventIn(uuid, cursor=4, revision=0))
    assert untouched.events[0].state == "counted", "nothing up to 4 was taken back"
    current = await talk.emit(lease, EventIn(uuid, cursor=10, revision=1))
    assert current.events[0].state == "counted"


async def test_events_and_invalidations_of_one_call_count_in_their_order(talk: Conversation) -> None:
    lease = await following(talk)
    uuid = await talk.dataset("src")
    await talk.emit(
        lease,
        EventIn(uuid, cursor=9),
        taken_back(uuid, 5, 9),
        EventIn(uuid, cursor=6),
        EventIn(uuid, cursor=5),
    )
    assert (await talk.output("src"))["cursor"] == 6


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"start": 1},
        {"start": 5, "end": 4},
        {"cursor": 1, "start": 1, "end": 1},
        {"partition_key": "0-9", "start": 0, "end": 8},
        {"partition_key": "9-0"},
        {"partition_key": "0:9"},
        {"partition_key": "٠-٩"},
        {"cursor": 1, "id": "x"},
        {"cursor": 1, "reason": "x"},
        {"start": 1, "end": 1, "finalized": 1},
        {"invalidate": InvalidateRange(0, 1)},
        {"invalidate": InvalidateRange(0, 1), "id": "x", "cursor": 1},
        {"invalidate": InvalidateRange(2, 1), "id": "x"},
    ],
)
async def test_an_event_that_contradicts_itself_is_refused(
    talk: Conversation, event: dict[str, object]
) -> None:
    lease = await running(talk)
    before = await talk.everything()
    with pytest.raises(Invalid):
        await talk.emit(lease, EventIn(await talk.dataset("work"), **event))
    assert await talk.everything() == before


async def test_an_event_names_its_dataset_in_one_way(talk: Conversation) -> None:
    lease = await running(talk)
    for dataset in ({}, {"dataset_uuid": await talk.dataset("work"), "dataset": "work_rows"}):
        with pytest.raises(Invalid):
            await talk.emit(lease, EventIn(**dataset, start=0, end=9))


async def test_only_a_manual_source_is_triggered_by_hand(talk: Conversation) -> None:
    await talk.deploy(dag(source(), source("auto", kind="always_on"), reactive("work", "src")))
    with pytest.raises(Conflict):
        await talk.trigger(0, 9, job="auto")
    with pytest.raises(Conflict):
        await talk.trigger(0, 9, job="work")
    with pytest.raises(NotFound):
        await talk.trigger(0, 9, job="nobody")
    with pytest.raises(Invalid):
        await trigger_source(talk.ctx, "chain", "src", TriggerRequest())


async def test_a_scope_makes_one_task_however_often_it_is_announced(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("work", "src")))
    created = [(await talk.trigger(0, 9)).tasks_created for _ in range(3)]
    await talk.run("work")
    created.append((await talk.trigger(0, 9)).tasks_created)
    assert created == [1, 0, 0, 0]
    assert (await talk.trigger(0, 19)).tasks_created == 1, "an overlapping scope is another one"


async def test_a_join_waits_until_every_triggering_input_has_the_scope(talk: Conversation) -> None:
    await talk.deploy(dag(source("a"), source("b"), source("c"), reactive("join", "a", "b", "c")))
    assert (await talk.trigger(0, 9, job="a")).tasks_created == 0
    assert (await talk.trigger(0, 9, job="b")).tasks_created == 0
    assert (await talk.trigger(0, 8, job="c")).tasks_created == 0
    assert (await talk.trigger(0, 9, job="c")).tasks_created == 1
    lease = await talk.lease("join")
    assert [i.partition_key for i in lease.payload.inputs] == ["0-9"] * 3


async def test_a_cursor_that_covers_a_scope_completes_the_join(talk: Conversation) -> None:
    await talk.deploy(dag(source("ranges"), source("head"), reactive("join", "ranges", "head")))
    for start in (0, 10, 20):
        await talk.trigger(start, start + 9, job="ranges")
    assert (await talk.trigger(cursor=18, job="head")).tasks_created == 1
    assert (await talk.trigger(cursor=29, job="head")).tasks_created == 2
    assert (await talk.trigger(cursor=40, job="head")).tasks_created == 0
    assert (await talk.trigger(30, 39, job="ranges")).tasks_created == 1


async def test_an_input_that_does_not_trigger_is_read_and_waited_for_by_nobody(talk: Conversation) -> None:
    quiet = {"from": {"job": "b", "output": 0}, "trigger": False}
    await talk.deploy(dag(source("a"), source("b"), reactive("work", "a", quiet)))
    assert (await talk.trigger(0, 9, job="b")).tasks_created == 0
    assert (await talk.trigger(0, 9, job="a")).tasks_created == 1
    lease = await talk.lease("work")
    assert [i.trigger for i in lease.payload.inputs] == [True, False]


async def test_a_read_time_predicate_travels_in_the_payload(talk: Conversation) -> None:
    picky = {"from": {"job": "src", "output": 0}, "where": "severity = 'critical'"}
    await talk.deploy(dag(source(), reactive("work", picky)))
    await talk.trigger(0, 9)
    lease = await talk.lease("work")
    assert lease.read.where is not None
    assert "critical" in lease.read.where
    assert lease.read.where_tree


async def test_every_new_task_gets_a_wake_up_on_its_runtime(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("work", "src"), reactive("here", "src", runtime="dispatcher")))
    await talk.trigger(0, 9)
    wakes = {row["task_id"]: row["runtime"] for row in await talk.all_wakes()}
    assert wakes == {
        await talk.only_queued("work"): "ecs_python",
        await talk.only_queued("here"): "dispatcher",
    }
