"""Invalidations: what was taken back, and everything that came of it, goes back and is made again."""

from __future__ import annotations

from uuid import UUID

import pytest

from tests.support.conversation import Conversation, Lease, dag, reactive, source, taken_back
from tracelake.contracts.dispatcher_api import EventIn, OutputIn
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.interventions import retry_task
from tracelake.dispatcher.steps.upkeep import reconcile_partitions
from tracelake.domain.errors import Conflict


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


async def following(talk: Conversation, *jobs: dict[str, object], cursor: int = 99) -> tuple[Lease, UUID]:
    """An always-on source at ``cursor``, with ``jobs`` behind it."""
    await talk.deploy(dag(source(kind="always_on", storage="postgres"), *jobs))
    head, uuid = await talk.lease("src"), await talk.dataset("src")
    await talk.emit(head, EventIn(uuid, cursor=cursor))
    return head, uuid


def up(name: str = "up", source_job: str = "src", **fields: object) -> dict[str, object]:
    return reactive(name, source_job, strategy="PerUpdate", **{"storage": "postgres", **fields})


async def read_all(talk: Conversation, job: str = "up") -> Lease:
    """Run the job's waiting update; it says that its own output reaches as far."""
    lease = await talk.lease(job)
    assert isinstance(lease.read.upto, int)
    events = [EventIn(await talk.dataset(job), cursor=lease.read.upto)] if lease.read.upto >= 0 else []
    await talk.complete(lease, events=events)
    return lease


async def test_it_raises_the_revision_and_rewinds_producer_and_consumer(talk: Conversation) -> None:
    head, uuid = await following(talk, up())
    await read_all(talk)
    answer = await talk.emit(head, taken_back(uuid, 90, 95, reason="reorg"))
    assert answer.events[0].revision == 1
    assert answer.tasks_created == 1
    output = await talk.output("src")
    assert (output["revision"], output["cursor"]) == (1, 89)
    consumed = await talk.consumed("up")
    assert (consumed["cursor"], consumed["inv_start"], consumed["inv_end"]) == (89, 90, 95)
    lease = await talk.lease("up")
    assert (lease.read.after, lease.read.upto, lease.read.revision) == (89, 89, 1)
    assert lease.read.invalidation is not None
    assert lease.read.invalidation.reason == "reorg"


async def test_a_chain_that_got_shorter_and_did_not_grow_again_is_undone(talk: Conversation) -> None:
    head, uuid = await following(talk, up())
    await read_all(talk)
    await talk.emit(head, taken_back(uuid, 90, 99))
    undo = await read_all(talk)
    assert (undo.read.after, undo.read.upto) == (89, 89)
    assert undo.read.invalidation is not None
    consumed = await talk.consumed("up")
    assert (consumed["cursor"], consumed["inv_revision"]) == (89, None)
    assert await talk.queued("up") == [], "undone once is undone"


async def test_a_chain_that_grows_again_is_processed_again(talk: Conversation) -> None:
    head, uuid = await following(talk, up())
    await read_all(talk)
    await talk.emit(head, taken_back(uuid, 90, 99), EventIn(uuid, cursor=104, revision=1))
    lease = await read_all(talk)
    assert (lease.read.after, lease.read.upto) == (89, 104)
    assert lease.read.invalidation is not None
    await talk.emit(head, EventIn(uuid, cursor=105))
    assert (await talk.lease("up")).read.invalidation is None


async def test_a_chain_that_grows_between_undo_and_redo_is_read_from_the_fork(talk: Conversation) -> None:
    head, uuid = await following(talk, up())
    await read_all(talk)
    await talk.emit(head, taken_back(uuid, 90, 99))
    await read_all(talk)
    await talk.emit(head, EventIn(uuid, cursor=99))
    lease = await talk.lease("up")
    assert (lease.read.after, lease.read.upto, lease.read.invalidation) == (89, 99, None)


async def test_a_consumer_that_never_read_the_range_has_nothing_to_undo(talk: Conversation) -> None:
    head, uuid = await following(talk, up(), cursor=50)
    await read_all(talk)
    await talk.emit(head, EventIn(uuid, cursor=99))
    await talk.emit(head, taken_back(uuid, 90, 99))
    lease = await talk.lease("up")
    assert (lease.read.after, lease.read.upto, lease.read.invalidation) == (50, 89, None)


async def given_up(talk: Conversation, how: str, job: str = "up") -> Lease:
    """An attempt that may have told others of what it read, and won't be completed."""
    lease = await talk.lease(job)
    if how == "failed":
        await talk.fail(lease, retryable=False)
    else:
        await talk.cancel(lease.task_id)
    return lease


@pytest.mark.parametrize("how", ["failed", "canceled"])
@pytest.mark.parametrize("first", [90, 85])
async def test_what_an_attempt_read_that_was_given_up_is_undone(
    talk: Conversation, how: str, first: int
) -> None:
    head, uuid = await following(talk, up(), cursor=89)
    await read_all(talk)
    await talk.emit(head, EventIn(uuid, cursor=99))
    lost = await given_up(talk, how)
    assert (lost.read.after, lost.read.upto) == (89, 99)
    await talk.emit(head, taken_back(uuid, first, 99), EventIn(uuid, cursor=104, revision=1))
    again = await read_all(talk)
    assert (again.read.after, again.read.upto) == (first - 1, 104)
    assert again.read.invalidation is not None
    assert (again.read.invalidation.start, again.read.invalidation.end) == (first, 99)
    await talk.emit(head, EventIn(uuid, cursor=105))
    assert (await talk.lease("up")).read.invalidation is None, "undone once is undone"


async def test_an_attempt_that_is_retried_by_hand_undoes_what_it_had_read(talk: Conversation) -> None:
    head, uuid = await following(talk, up())
    lost = await given_up(talk, "failed")
    await talk.emit(head, taken_back(uuid, 90, 99))
    await talk.cancel(await talk.only_queued("up"))
    await retry_task(talk.ctx, lost.task_id)
    again = await talk.lease(lost.task_id)
    assert again.read.invalidation is not None
    assert (again.read.after, again.read.upto, again.read.invalidation.start) == (-1, 89, 90)


async def test_an_attempt_that_was_given_up_and_done_again_since_has_nothing_to_undo(
    talk: Conversation,
) -> None:
    head, uuid = await following(talk, up())
    await given_up(talk, "failed")
    await talk.emit(head, taken_back(uuid, 51, 99), EventIn(uuid, cursor=60, revision=1))
    await read_all(talk)
    await talk.emit(head, EventIn(uuid, cursor=80))
    await talk.emit(head, taken_back(uuid, 70, 80, "r2"))
    lease = await talk.lease("up")
    assert (lease.read.after, lease.read.upto, lease.read.invalidation) == (60, 69, None)


async def test_a_partition_task_that_was_given_up_hears_what_was_taken_back(talk: Conversation) -> None:
    head, uuid = await following(talk, up("cold", storage="parquet"), reactive("part", "cold"))
    made = await talk.lease("cold")
    await talk.complete(made, OutputIn(0, start=0, end=99, row_count=0))
    lost = await given_up(talk, "failed", "part")
    await talk.emit(head, taken_back(uuid, 90, 99), EventIn(uuid, cursor=99, revision=1))
    again = await talk.lease("cold")
    assert isinstance(again.read.upto, int)
    await talk.complete(again, OutputIn(0, start=0, end=99, row_count=0))
    rerun = await talk.lease("part")
    assert (rerun.read.start, rerun.read.end) == (lost.read.start, lost.read.end) == (0, 99)
    assert rerun.read.invalidation is not None


async def test_finality_is_not_made_up_by_a_rewind(talk: Conversation) -> None:
    head, uuid = await following(talk)
    await talk.emit(head, taken_back(uuid, 90, 99))
    assert (await talk.output("src"))["finalized"] is None
    await talk.emit(head, EventIn(uuid, cursor=95, finalized=85))
    await talk.emit(head, taken_back(uuid, 90, 95, "r2"))
    assert (await talk.output("src"))["finalized"] == 85
    await talk.emit(head, taken_back(uuid, 80, 95, "r3"))
    assert (await talk.output("src"))["finalized"] == 79


async def test_several_invalidations_before_the_next_claim_are_undone_together(talk: Conversation) -> None:
    head, uuid = await following(talk, up())
    await read_all(talk)
    await talk.emit(head, taken_back(uuid, 95, 99, "r1"))
    await talk.emit(head, EventIn(uuid, cursor=97))
    await talk.emit(head, taken_back(uuid, 80, 97, "r2"))
    lease = await talk.lease("up")
    assert (lease.read.after, lease.read.upto) == (79, 79)
    assert lease.read.invalidation is not None
    assert (lease.read.invalidation.start, lease.read.invalidation.end) == (80, 99)
    assert lease.read.invalidation.revision == 2


async def test_invariant_3_the_same_id_again_changes_nothing(talk: Conversation) -> None:
    head, uuid = await following(talk, up())
    await read_all(talk)
    first = await talk.emit(head, taken_back(uuid, 90, 99))
    await talk.emit(head, EventIn(uuid, cursor=120))
    before = await talk.everything()
    again = await talk.emit(head, taken_back(uuid, 90, 99))
    assert (again.events, again.tasks_created) == (first.events, 0)
    assert await talk.everything() == before


async def test_the_same_id_with_another_range_is_a_conflict(talk: Conversation) -> None:
    head, uuid = await following(talk, up())
    await talk.emit(head, taken_back(uuid, 90, 99))
    before = await talk.everything()
    with pytest.raises(Conflict) as refused:
        await talk.emit(head, EventIn(uuid, cursor=100), taken_back(uuid, 91, 99))
    assert refused.value.reason == "InvalidationReused"
    assert await talk.everything() == before


async def test_an_old_generation_takes_back_nothing_but_its_own(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("work", "src")))
    await talk.trigger(0, 9)
    old = await talk.lease("work")
    uuid = await talk.dataset("work")
    await talk.emit(old, EventIn(uuid, start=0, end=9))
    await talk.deploy(dag(source(), reactive("work", "src", config={"v": 2})))
    answer = await talk.emit(old, taken_back(uuid, 0, 9))
    assert answer.events[0].state == "old_version"
    versions = await talk.query(
        "SELECT revision, is_current FROM dataset_version WHERE dataset_uuid = $1 ORDER BY version_no", uuid
    )
    assert [(each["revision"], each["is_current"]) for each in versions] == [(1, False), (0, True)]
    assert answer.tasks_created == 0


async def pipeline(talk: Conversation) -> Lease:
    """made → read → end, with 0-9 and 10-19 through to the end; returns a task of ``made`` that may speak."""
    jobs = (
        reactive("made", "src", storage="parquet"),
        reactive("read", "made", storage="parquet"),
        reactive("end", "read", storage="parquet"),
    )
    await talk.deploy(dag(source(), *jobs))
    for start in (0, 10):
        await talk.trigger(start, start + 9)
        for job in ("made", "read", "end"):
            await talk.run(job)
    await talk.trigger(100, 109)
    return await talk.lease("made")


async def test_it_uncommits_overlapping_partitions_all_the_way_down(talk: Conversation) -> None:
    speaker = await pipeline(talk)
    await talk.emit(speaker, taken_back(await talk.dataset("made"), 5, 7))
    for job in ("made", "read", "end"):
        assert await talk.scopes(job) == [(10, 19)], job
        assert (await talk.output(job))["revision"] == 1, job
    [row] = await talk.query("SELECT count(*) AS n FROM partition WHERE uncommitted_at IS NOT NULL")
    assert row["n"] == 3, "what was committed is kept, only not current"


async def test_it_creates_the_task_that_makes_the_scope_again_and_the_rest_follows(
    talk: Conversation,
) -> None:
    speaker = await pipeline(talk)
    answer = await talk.emit(speaker, taken_back(await talk.dataset("made"), 5, 7))
    assert answer.tasks_created == 1
    for job in ("made", "read", "end"):
        again = await talk.run(job)
        assert again.read.partition_key == "0-9"
    assert again.read.invalidation is not None
    for job in ("made", "read", "end"):
        assert await talk.scopes(job) == [(0, 9), (10, 19)]
        assert await talk.queued(job) == []
    assert await reconcile_partitions(talk.ctx) == 0


async def test_scopes_that_it_does_not_touch_are_not_made_again(talk: Conversation) -> None:
    speaker = await pipeline(talk)
    await talk.emit(speaker, taken_back(await talk.dataset("made"), 5, 7))
    await talk.trigger(10, 19)
    assert len(await talk.queued("made")) == 1


async def test_an_announced_scope_counts_again_at_its_new_revision(talk: Conversation) -> None:
    await talk.deploy(dag(source(kind="always_on"), reactive("work", "src")))
    head, uuid = await talk.lease("src"), await talk.dataset("src")
    scope = EventIn(uuid, start=0, end=9)
    await talk.emit(head, scope)
    await talk.run("work")
    await talk.emit(head, taken_back(uuid, 0, 9))
    assert await talk.queued("work") == []
    assert (await talk.emit(head, scope)).tasks_created == 1
    lease = await talk.run("work")
    assert lease.read.invalidation is not None


async def test_a_running_task_of_a_derived_scope_commits_nothing(talk: Conversation) -> None:
    speaker = await pipeline(talk)
    await talk.emit(speaker, EventIn(await talk.dataset("made"), start=100, end=109))
    await talk.complete(speaker, OutputIn(0, start=100, end=109, row_count=0))
    reading = await talk.lease("read")
    await talk.trigger(200, 209)
    other = await talk.lease("made")
    await talk.emit(other, taken_back(await talk.dataset("made"), 100, 100))
    with pytest.raises(Conflict) as refused:
        await talk.complete_scope(reading)
    assert refused.value.reason == "InputChanged"
    assert (100, 109) not in await talk.scopes("read")


async def test_the_speaker_itself_is_not_refused_for_what_it_takes_back(talk: Conversation) -> None:
    speaker = await pipeline(talk)
    uuid = await talk.dataset("made")
    answer = await talk.complete(
        speaker, OutputIn(0, start=100, end=109, row_count=0), events=[taken_back(uuid, 0, 9)]
    )
    assert answer.task_status == "Completed"
    assert (100, 109) in await talk.scopes("made")


async def test_an_update_goes_back_through_every_job_behind_it(talk: Conversation) -> None:
    head, uuid = await following(talk, up("one"), up("two", "one"), up("three", "two"))
    for job in ("one", "two", "three"):
        await read_all(talk, job)
    await talk.emit(head, taken_back(uuid, 90, 99))
    for job in ("one", "two", "three"):
        assert (await talk.output(job))["cursor"] == 89
        lease = await read_all(talk, job)
        assert (lease.read.after, lease.read.upto) == (89, 89)
        assert lease.read.invalidation is not None


async def test_outputs_that_only_append_are_not_taken_back(talk: Conversation) -> None:
    log = up("log", update_strategy="append", unique_key=["id"])
    head, uuid = await following(talk, log, up("after", "log"))
    await read_all(talk, "log")
    await read_all(talk, "after")
    await talk.emit(head, taken_back(uuid, 90, 99))
    assert (await talk.output("log"))["revision"] == 0
    assert (await talk.output("log"))["cursor"] == 99
    assert await talk.queued("after") == []
    assert (await talk.lease("log")).read.invalidation is not None


async def test_ranges_made_of_a_cursor_are_taken_back_and_announced_again(talk: Conversation) -> None:
    head, uuid = await following(talk, up("ranges", storage="none"), reactive("pack", "ranges"))
    lease = await talk.lease("ranges")
    await talk.complete(lease, OutputIn(0, start=0, end=49), OutputIn(0, start=50, end=99))
    for task in await talk.queued("pack"):
        await talk.complete_scope(await talk.lease(task))
    await talk.emit(head, taken_back(uuid, 90, 99), EventIn(uuid, cursor=99))
    assert await talk.scopes("ranges") == [(0, 49)]
    assert await talk.scopes("pack") == [(0, 49)]
    again = await talk.lease("ranges")
    assert isinstance(again.read.after, int)
    assert again.read.after < 99
    await talk.complete(again, OutputIn(0, start=50, end=99))
    await talk.run("pack")
    assert await talk.scopes("pack") == [(0, 49), (50, 99)]


async def test_an_update_with_cold_partitions_makes_again_all_that_they_held(talk: Conversation) -> None:
    """Only 90-99 was taken back, but the partition 50-99 is gone: 50-89 must be made again too."""
    head, uuid = await following(talk, up("cold", storage="parquet"), cursor=49)
    await talk.complete(await talk.lease("cold"), OutputIn(0, start=0, end=49, row_count=0))
    await talk.emit(head, EventIn(uuid, cursor=99))
    await talk.complete(await talk.lease("cold"), OutputIn(0, start=50, end=99, row_count=0))
    await talk.emit(head, taken_back(uuid, 90, 99))
    assert await talk.scopes("cold") == [(0, 49)]
    again = await talk.lease("cold")
    assert (again.read.after, again.read.upto) == (49, 89)
    await talk.complete(again, OutputIn(0, start=50, end=89, row_count=0))
    assert await talk.scopes("cold") == [(0, 49), (50, 89)]


async def test_an_update_sent_back_stands_at_the_beginning_of_an_input_partition(talk: Conversation) -> None:
    """Its own partitions may be cut otherwise than its input's; between two of those it could read none."""
    await talk.deploy(dag(source(kind="always_on"), up("cold", storage="parquet")))
    head, uuid = await talk.lease("src"), await talk.dataset("src")
    await talk.emit(head, *(EventIn(uuid, start=n, end=n + 9) for n in (0, 10, 20)))
    cut = [OutputIn(0, start=start, end=start + 14, row_count=0) for start in (0, 15)]
    await talk.complete(await talk.lease("cold"), *cut)
    await talk.emit(head, taken_back(uuid, 25, 29), EventIn(uuid, start=20, end=29))
    again = await talk.lease("cold")
    assert (again.read.after, again.read.upto) == (9, 29)


async def test_a_retired_generation_goes_back_too_for_a_rollback_brings_it_back(talk: Conversation) -> None:
    first = dag(source(kind="always_on", storage="postgres"), up())
    head, uuid = await following(talk, up())
    await talk.deploy(first)
    await read_all(talk)
    await talk.deploy(dag(source(kind="always_on", storage="postgres"), up(config={"v": 2})))
    await talk.emit(head, taken_back(uuid, 90, 99))
    await talk.deploy(first)
    assert (await talk.output("up"))["cursor"] == 89
    lease = await talk.lease("up")
    assert (lease.read.after, lease.read.invalidation is not None) == (89, True)


async def test_a_retired_source_takes_back_its_own_for_a_rollback_brings_it_back(talk: Conversation) -> None:
    """Its attempt has rewritten its table before it says so, and says so once."""
    first = dag(source(kind="always_on", storage="postgres"), up())
    head, uuid = await following(talk, up())
    await talk.deploy(first)
    await read_all(talk)
    await talk.deploy(dag(source(kind="always_on", storage="postgres", config={"v": 2}), up()))
    answer = await talk.emit(head, taken_back(uuid, 90, 99))
    assert [event.state for event in answer.events] == ["old_version"]
    await talk.deploy(first)
    assert (await talk.output("src"))["cursor"] == 89
    assert (await talk.output("up"))["cursor"] == 89
    lease = await talk.lease("up")
    assert (lease.read.after, lease.read.invalidation is not None) == (89, True)


async def test_every_rebuild_gets_its_wake_up(talk: Conversation) -> None:
    speaker = await pipeline(talk)
    await talk.forget_wakes()
    await talk.emit(speaker, taken_back(await talk.dataset("made"), 5, 7))
    assert await talk.due_wakes() == await talk.queued("made")


async def test_events_made_of_inputs_that_were_taken_back_set_nothing_in_motion(talk: Conversation) -> None:
    await talk.deploy(
        dag(
            source(kind="always_on"),
            reactive("ranges", "src", strategy="PerUpdate"),
            reactive("work", "ranges"),
        )
    )
    follower = await talk.lease("src")
    blocks = await talk.dataset("src")
    await talk.emit(follower, EventIn(blocks, cursor=9))
    ranges = await talk.lease("ranges")
    await talk.emit(follower, taken_back(blocks, 5, 9))
    with pytest.raises(Conflict) as refused:
        await talk.emit(ranges, EventIn(await talk.dataset("ranges"), start=0, end=9))
    assert refused.value.reason == "InputChanged"
    assert await talk.queued("work") == []
