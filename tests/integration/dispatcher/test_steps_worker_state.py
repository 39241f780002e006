"""What an attempt tells while it runs, what it leaves for the next one, and which files it is given to read."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.support.conversation import Conversation, Lease, dag, reactive, source, taken_back
from tracelake.contracts.dispatcher_api import (
    EventIn,
    HeartbeatRequest,
    OutputIn,
    TaskInputsQuery,
    TaskInputsResponse,
    TaskStateRequest,
)
from tracelake.dispatcher.steps import running_attempt
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.running_attempt import fetch_task, heartbeat, list_inputs, save_state
from tracelake.domain.errors import Conflict, Invalid, NotFound
from tracelake.store import datasets, reads


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


async def running(talk: Conversation, **fields: Any) -> Lease:
    await talk.deploy(dag(source(), reactive("work", "src", retry={"base": 0, "max": 1}, **fields)))
    await talk.trigger(0, 9)
    return await talk.lease("work")


async def tell(talk: Conversation, lease: Lease, **progress: Any) -> None:
    await heartbeat(talk.ctx, HeartbeatRequest(lease.task_id, lease.attempt, lease.token, progress))


async def save(talk: Conversation, lease: Lease, state: Any) -> None:
    await save_state(talk.ctx, TaskStateRequest(lease.task_id, lease.attempt, lease.token, state))


async def progress(talk: Conversation, task_id: UUID) -> Any:
    return (await talk.ctx.db.run(lambda tx: reads.task(tx, task_id))).progress


async def test_progress_stays_until_it_is_told_anew(talk: Conversation) -> None:
    lease = await running(talk)
    assert await progress(talk, lease.task_id) is None
    await tell(talk, lease, rows=10, stage="read")
    await talk.beat(lease)
    assert await progress(talk, lease.task_id) == {"rows": 10, "stage": "read"}
    await tell(talk, lease, rows=20)
    assert await progress(talk, lease.task_id) == {"rows": 20}


async def test_the_last_progress_of_a_completed_task_is_kept(talk: Conversation) -> None:
    lease = await running(talk)
    await tell(talk, lease, rows=20)
    await talk.complete_scope(lease)
    assert await progress(talk, lease.task_id) == {"rows": 20}


async def test_a_new_claim_begins_without_progress_and_the_old_attempt_keeps_its_own(
    talk: Conversation,
) -> None:
    lease = await running(talk)
    await tell(talk, lease, rows=20)
    await talk.complete(lease, status="Released")
    assert await progress(talk, lease.task_id) == {"rows": 20}, "a retry that merely waits is the old attempt"
    await talk.lease(lease.task_id)
    shown = await talk.ctx.db.run(lambda tx: reads.task(tx, lease.task_id))
    assert shown.progress is None
    assert [each.progress for each in shown.attempts] == [None, {"rows": 20}]


async def test_a_stale_or_canceled_attempt_tells_nothing(talk: Conversation) -> None:
    lease = await running(talk)
    await talk.complete(lease, status="Released")
    newer = await talk.lease(lease.task_id)
    await tell(talk, newer, rows=1)
    before = await talk.everything()
    with pytest.raises(Conflict) as refused:
        await tell(talk, lease, rows=99)
    assert refused.value.reason == "StaleAttempt"
    assert await talk.everything() == before
    await talk.cancel(newer.task_id)
    before = await talk.everything()
    await tell(talk, newer, rows=99)
    assert await talk.everything() == before


async def test_the_next_attempt_finds_what_the_last_one_saved(talk: Conversation) -> None:
    lease = await running(talk)
    assert lease.payload.state is None
    await save(talk, lease, {"block": 4})
    await save(talk, lease, {"block": 5, "seen": ["a", None]})
    assert (await fetch_task(talk.ctx, lease.task_id)).task.state == {"block": 5, "seen": ["a", None]}
    await talk.fail(lease)
    again = await talk.lease(lease.task_id, key="k")
    assert again.payload.state == {"block": 5, "seen": ["a", None]}
    assert (await talk.lease(lease.task_id, key="k")).payload == again.payload, "the answer was lost"
    await talk.fail(again)
    assert (await talk.lease(lease.task_id)).payload.state == {"block": 5, "seen": ["a", None]}


@pytest.mark.parametrize("state", [0, False, "", "text", [], {}, [None], 2**70])
async def test_any_json_is_a_state_and_null_forgets_it(talk: Conversation, state: Any) -> None:
    lease = await running(talk)
    await save(talk, lease, state)
    await talk.complete(lease, status="Released")
    lease = await talk.lease(lease.task_id)
    assert (lease.payload.state, type(lease.payload.state)) == (state, type(state))
    await save(talk, lease, None)
    await save(talk, lease, None)
    await talk.complete(lease, status="Released")
    assert (await talk.lease(lease.task_id)).payload.state is None


async def test_a_source_resumes_for_the_life_of_its_generation(talk: Conversation) -> None:
    follower = source("head", kind="always_on", retry={"base": 0, "max": 1})
    await talk.deploy(dag(follower))
    lease = await talk.lease("head")
    await save(talk, lease, {"hash": "0xabc"})
    await talk.complete(lease)
    await talk.pass_time(2)
    lease = await talk.lease("head")
    assert lease.payload.state == {"hash": "0xabc"}
    await talk.deploy(dag({**follower, "config": {"start": 7}}))
    assert (await talk.lease("head")).payload.state is None, "another generation makes other data"


async def test_tasks_of_one_job_do_not_see_each_others_state(talk: Conversation) -> None:
    first = await running(talk)
    await talk.trigger(10, 19)
    other = await talk.lease("work")
    await save(talk, first, 1)
    await talk.complete(other, status="Released")
    assert (await talk.lease(other.task_id)).payload.state is None


async def test_only_the_current_attempt_saves(talk: Conversation) -> None:
    lease = await running(talk)
    await talk.complete(lease, status="Released")
    newer = await talk.lease(lease.task_id)
    await save(talk, newer, "newer")
    before = await talk.everything()
    forged = TaskStateRequest(newer.task_id, newer.attempt, uuid4(), "forged")
    old = TaskStateRequest(lease.task_id, lease.attempt, lease.token, "old")
    for request, reason in ((forged, "StaleLease"), (old, "StaleAttempt")):
        with pytest.raises(Conflict) as refused:
            await save_state(talk.ctx, request)
        assert refused.value.reason == reason
    with pytest.raises(NotFound):
        await save_state(talk.ctx, TaskStateRequest(uuid4(), 1, lease.token, 1))
    assert await talk.everything() == before
    await talk.cancel(newer.task_id)
    with pytest.raises(Conflict):
        await save(talk, newer, "too late")


async def test_an_attempt_given_up_by_the_reaper_saves_until_a_newer_one_is_claimed(
    talk: Conversation,
) -> None:
    lease = await running(talk)
    assert await talk.reap() == 1
    await save(talk, lease, "late")
    newer = await talk.lease(lease.task_id)
    assert newer.payload.state == "late"
    with pytest.raises(Conflict):
        await save(talk, lease, "later")


async def test_what_was_derived_from_an_input_that_was_taken_back_is_not_resumed_from(
    talk: Conversation,
) -> None:
    head = source("head", kind="always_on", storage="postgres")
    await talk.deploy(dag(head, reactive("up", "head", strategy="PerUpdate", retry={"base": 0, "max": 1})))
    chain, uuid = await talk.lease("head"), await talk.dataset("head")
    await talk.emit(chain, EventIn(uuid, cursor=99, revision=0))
    lease = await talk.lease("up")
    await save(talk, lease, {"sum": 7})
    await talk.complete(lease, status="Released")
    lease = await talk.lease("up")
    assert lease.payload.state == {"sum": 7}
    await talk.emit(chain, taken_back(uuid, 50, 99))
    await talk.complete(lease, status="Released")
    assert (await talk.lease(lease.task_id)).payload.state is None


async def test_the_payload_tells_the_jobs_idle_timeout(talk: Conversation) -> None:
    assert (await running(talk, idle_timeout="90s")).payload.idle_timeout_seconds == 90


FILES = "UPDATE partition SET manifest = $3 WHERE stored AND current AND range_start = $1 AND range_end = $2"


async def commit(talk: Conversation, start: int, end: int, *files: str, job: str = "cold") -> None:
    """A partition of a Parquet output with these files. They needn't be there: nobody reads them."""
    await talk.trigger(start, end)
    lease = await talk.lease(job)
    await talk.complete(lease, OutputIn(0, start=start, end=end, row_count=0))
    listed = [
        {"location": name, "rows": 1, "bytes": 9, "min_block": start, "max_block": end} for name in files
    ]
    await talk.query(FILES, start, end, {"files": listed})


COLD = (source(), reactive("cold", "src", storage="parquet"))


async def given(
    talk: Conversation, lease: Lease, index: int = 0, after: str | None = None
) -> TaskInputsResponse:
    more = {} if after is None else {"after": after}
    return await list_inputs(talk.ctx, TaskInputsQuery(lease.task_id, lease.attempt, index, **more))


async def names(talk: Conversation, lease: Lease, index: int = 0) -> list[str]:
    page = await given(talk, lease, index)
    assert page.next is None
    return [file.location for file in page.files]


async def test_a_scope_is_given_the_files_of_the_partitions_that_it_touches(talk: Conversation) -> None:
    other = {"from": {"job": "cold", "output": 0}, "trigger": False}
    await talk.deploy(dag(*COLD, source("when"), reactive("read", "when", other)))
    for start in (0, 10, 20, 30):
        await commit(talk, start, start + 9, f"{start}-a", f"{start}-b")
    await talk.trigger(15, 25, job="when")
    lease = await talk.lease("read")
    assert await names(talk, lease, 1) == ["10-a", "10-b", "20-a", "20-b"]
    [first, *_] = (await given(talk, lease, 1)).files
    assert (first.rows, first.bytes, first.start, first.end) == (1, 9, 10, 19)
    assert (first.min_block, first.max_block) == (10, 19)
    storage = await given(talk, lease, 0)
    assert (storage.storage, storage.files, storage.next) == ("none", [], None)


async def test_an_update_is_given_what_it_has_not_read_up_to_where_it_was_claimed(talk: Conversation) -> None:
    await talk.deploy(dag(*COLD, reactive("up", "cold", strategy="PerUpdate")))
    await commit(talk, 0, 9, "0")
    await talk.complete(await talk.lease("up"))
    await commit(talk, 10, 19, "10")
    await commit(talk, 20, 29, "20")
    lease = await talk.lease("up")
    await commit(talk, 30, 39, "30")
    assert await names(talk, lease) == ["10", "20"]


async def test_an_updates_input_that_does_not_trigger_is_given_whole(talk: Conversation) -> None:
    other = {"from": {"job": "cold", "output": 0}, "trigger": False}
    await talk.deploy(dag(*COLD, source("tick"), reactive("up", "tick", other, strategy="PerUpdate")))
    await commit(talk, 10, 19, "10")
    await commit(talk, 90, 99, "90")
    await talk.trigger(cursor=5, job="tick")
    assert await names(talk, await talk.lease("up"), 1) == ["10", "90"]


async def test_files_without_a_manifest_have_what_is_known_of_them(talk: Conversation) -> None:
    await talk.deploy(dag(*COLD, reactive("read", "cold")))
    await commit(talk, 0, 9)
    lease = await talk.lease("read")
    assert await names(talk, lease) == []
    await talk.query(FILES, 0, 9, {"files": [{"location": "x", "bytes": 7}]})
    [file] = (await given(talk, lease)).files
    assert (file.location, file.rows, file.bytes, file.min_block) == ("x", None, 7, None)


async def paged(talk: Conversation) -> Lease:
    """An attempt that reads 5 files in two partitions, with one that is empty between them."""
    span = {"from": {"job": "cold", "output": 0}, "trigger": False}
    await talk.deploy(dag(*COLD, source("when"), reactive("read", "when", span)))
    await commit(talk, 0, 9, "a", "b", "c")
    await commit(talk, 10, 19)
    await commit(talk, 20, 29, "d", "e")
    await talk.trigger(0, 29, job="when")
    return await talk.lease("read")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
async def test_pages_are_the_whole_list_in_its_order(
    talk: Conversation, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_attempt, "MAX_INPUT_FILES", size)
    lease = await paged(talk)
    found: list[str] = []
    after: str | None = None
    while True:
        page = await given(talk, lease, 1, after)
        assert 0 < len(page.files) <= size
        found += [file.location for file in page.files]
        if (after := page.next) is None:
            break
    assert found == ["a", "b", "c", "d", "e"]


async def test_a_list_that_was_broken_off_in_a_replaced_partition_does_not_go_on(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_attempt, "MAX_INPUT_FILES", 2)
    lease = await paged(talk)
    page = await given(talk, lease, 1)
    await commit(talk, 0, 29, "all")
    with pytest.raises(Conflict) as refused:
        await given(talk, lease, 1, page.next)
    assert refused.value.reason == "InputChanged"
    assert await names(talk, lease, 1) == ["all"]
    with pytest.raises(Invalid) as invalid:
        await given(talk, lease, 1, "999999-1")
    assert invalid.value.reason == "InvalidCursor"


async def test_an_input_that_was_taken_back_since_the_claim_is_not_listed(talk: Conversation) -> None:
    head = source("head", kind="always_on", storage="none")
    await talk.deploy(dag(head, reactive("cold", "head", storage="parquet"), reactive("read", "cold")))
    chain, uuid = await talk.lease("head"), await talk.dataset("head")
    for start in (0, 10):
        await talk.emit(chain, EventIn(uuid, start=start, end=start + 9, revision=0))
        await talk.complete(await talk.lease("cold"), OutputIn(0, start=start, end=start + 9, row_count=0))
    first, second = [await talk.lease(task) for task in await talk.queued("read")]
    await talk.emit(chain, taken_back(uuid, 12, 13))
    assert await names(talk, first) == [], "what was taken back lies elsewhere"
    with pytest.raises(Conflict) as refused:
        await given(talk, second)
    assert refused.value.reason == "InputChanged"


async def test_an_input_that_is_taken_back_while_it_is_listed_is_not_listed_in_part(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files were looked up without what was taken back a moment before: such a list must not go out."""
    head = source("head", kind="always_on", storage="none")
    await talk.deploy(dag(head, reactive("cold", "head", storage="parquet"), reactive("read", "cold")))
    chain, uuid = await talk.lease("head"), await talk.dataset("head")
    await talk.emit(chain, EventIn(uuid, start=0, end=9, revision=0))
    await talk.complete(await talk.lease("cold"), OutputIn(0, start=0, end=9, row_count=0))
    lease = await talk.lease("read")
    look = datasets.committed_files

    async def taken_back_just_before(*args: Any) -> Any:
        await talk.emit(chain, taken_back(uuid, 3, 4))
        return await look(*args)

    monkeypatch.setattr(datasets, "committed_files", taken_back_just_before)
    with pytest.raises(Conflict) as refused:
        await given(talk, lease)
    assert refused.value.reason == "InputChanged"


async def test_nothing_is_listed_for_a_stranger_or_a_stale_attempt(talk: Conversation) -> None:
    await talk.deploy(dag(*COLD, reactive("read", "cold")))
    await commit(talk, 0, 9, "0")
    lease = await talk.lease("read")
    with pytest.raises(NotFound) as unknown:
        await given(talk, lease, 1)
    assert unknown.value.reason == "UnknownInput"
    with pytest.raises(NotFound):
        await list_inputs(talk.ctx, TaskInputsQuery(uuid4(), 1, 0))
    await talk.complete(lease, status="Released")
    with pytest.raises(Conflict) as over:
        await given(talk, lease)
    assert over.value.reason == "StaleLease"
    await talk.lease("read")
    with pytest.raises(Conflict) as stale:
        await given(talk, lease)
    assert stale.value.reason == "StaleAttempt"
