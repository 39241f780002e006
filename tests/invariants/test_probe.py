from __future__ import annotations
import asyncpg, pytest
from tracelake.contracts.dispatcher_api import EventIn, OutputIn
from tracelake.dispatcher.steps.complete_task import complete_tasks
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.pause_job import set_job_paused
from tracelake.dispatcher.steps.retry_task import retry_task
from tracelake.domain.errors import *
from tracelake.store import tasks
from tracelake.testing.conversation import *
from tracelake.testing.interleave import Interleaver


@pytest.fixture
def talk(ctx): return Conversation(ctx)
@pytest.fixture
def inter(talk, pool): return Interleaver(talk, pool)

async def test_retry_of_unclaimed_canceled_update(talk):
    await talk.deploy(dag(source(), reactive("up", "src", strategy="PerUpdate")))
    await talk.trigger(cursor=5)
    old = await talk.only_queued("up")
    await talk.cancel(old)
    await talk.trigger(cursor=6)
    with pytest.raises(Conflict):
        await retry_task(talk.ctx, old)

async def test_late_release_after_newer_update_task(talk):
    await talk.deploy(dag(source(), reactive("up", "src", strategy="PerUpdate", max_attempts=1)))
    await talk.trigger(cursor=5)
    t1 = await talk.lease("up")
    await talk.trigger(cursor=6)
    await talk.reap()
    assert await talk.status(t1.task_id) == "Failed"
    t2 = await talk.lease("up")
    try:
        r = await talk.complete(t1, status="Released")
        print(r)
    except TracelakeError as e:
        print("ERR", e.reason)

async def test_late_failed_counts_once(talk):
    await talk.deploy(dag(source(), reactive("a", "src", max_attempts=2)))
    await talk.trigger(0, 9)
    t = await talk.lease("a")
    await talk.reap()
    await talk.fail(t)
    assert (await talk.task(t.task_id))["failures"] == 1

async def test_forbidden_in_batch(talk):
    await talk.deploy(dag(source(), reactive("a", "src")))
    await talk.trigger(0, 9)
    t = await talk.lease("a")
    await talk.trigger(10, 19)
    u = await talk.lease("a")
    bad = OutputIn(0, dataset_uuid=t.task_id, start=0, end=9)
    answers = await complete_tasks(talk.ctx, [t.completion(bad), u.completion(OutputIn(0, start=10, end=19))])
    assert isinstance(answers[0], Forbidden)
    assert answers[1].task_status == "Completed"

@pytest.mark.parametrize("other", [(0, 9), (5, 14), (0, 19)])
async def test_overlap_at_once(talk, inter, other):
    await talk.deploy(dag(source(), reactive("a", "src", storage="parquet")))
    await talk.trigger(0, 9)
    t = await talk.lease("a")
    if other == (0, 9):
        await talk.query("INSERT INTO task (task_id, org_id, job_id, kind, status, range_start, range_end, scope_key) SELECT gen_random_uuid(), org_id, job_id, kind, 'Queued', range_start, range_end, 'x' FROM task")
    else:
        await talk.trigger(*other)
    u = await talk.lease("a")
    out = await inter.run(lambda c: c.complete_scope(t), lambda c: c.complete_scope(u))
    print(out)
    assert isinstance(out.second, CompleteResponse if other != (5, 14) else Conflict)

async def test_overlap_in_batch(talk):
    await talk.deploy(dag(source(), reactive("a", "src", storage="parquet")))
    await talk.trigger(0, 9)
    t = await talk.lease("a")
    await talk.trigger(5, 14)
    u = await talk.lease("a")
    answers = await complete_tasks(talk.ctx, [t.completion(OutputIn(0, start=0, end=9, row_count=0)), u.completion(OutputIn(0, start=5, end=14, row_count=0))])
    print(answers)
    assert answers[0].task_status == "Completed"
    assert isinstance(answers[1], Conflict)

async def test_overlap_with_itself(talk):
    await talk.deploy(dag(source(), reactive("a", "src", storage="parquet")))
    await talk.trigger(0, 9)
    t = await talk.lease("a")
    with pytest.raises((Conflict, Invalid)):
        await talk.complete(t, OutputIn(0, start=0, end=5, row_count=0), OutputIn(0, start=3, end=9, row_count=0))

async def test_rollback_continues(talk):
    one = dag(source(), reactive("a", "src"), reactive("up", "src", strategy="PerUpdate"))
    await talk.deploy(one)
    await talk.trigger(0, 9)
    await talk.deploy(dag(source(), reactive("a", "src", config={"x": 1}), reactive("up", "src", strategy="PerUpdate", config={"x": 1})))
    await talk.deploy(one)
    assert len(await talk.queued("a")) == 1
    assert len(await talk.queued("up")) == 1

async def test_stale_queued_after_invalidation(talk):
    await talk.deploy(dag(source(), reactive("v", "src"), reactive("j", "v"), reactive("k", "j")))
    await talk.trigger(0, 9)
    v = await talk.run("v")
    [jt] = await talk.queued("j")
    await talk.trigger(100, 109)
    w = await talk.lease("v")
    await talk.emit(w, taken_back(await talk.dataset("v"), 0, 9))
    assert await talk.scopes("v") == []
    a = await talk.claim(jt)
    print(a.status, a.reason)
    assert a.status == "NotClaimed"

async def test_per_update_with_cold_output_rewinds_to_partition(talk):
    await talk.deploy(dag(source(kind="always_on", storage="postgres"), reactive("up", "src", strategy="PerUpdate", storage="parquet")))
    s = await talk.lease("src")
    ds = await talk.dataset("src")
    await talk.emit(s, EventIn(dataset_uuid=ds, cursor=99))
    u = await talk.lease("up")
    await talk.complete(u, OutputIn(0, start=0, end=99, row_count=0))
    await talk.emit(s, taken_back(ds, 90, 99))
    print(await talk.scopes("up"), dict(await talk.consumed("up")))
    u = await talk.lease("up")
    print(u.read)
    assert u.read.after == -1

async def test_resume_vs_claim(talk, inter, caplog):
    await talk.deploy(dag(source(), reactive("a", "src", scaling={"max_concurrency": 1})))
    await talk.trigger(0, 9)
    [t] = await talk.queued("a")
    await set_job_paused(talk.ctx, "chain", "a", True)
    out = await inter.run(lambda c: c.claim(t), lambda c: set_job_paused(c.ctx, "chain", "a", False), hold=tasks.SQL.lock_gates)
    print(out, caplog.text)
    assert "rolled back" not in caplog.text

async def test_two_slots(talk):
    await talk.deploy(dag(source(), reactive("a", "src", scaling={"max_concurrency": 2})))
    for i in range(4):
        await talk.trigger(i*10, i*10+9)
    q = await talk.queued("a")
    a, b = await talk.lease(q[0]), await talk.lease(q[1])
    for t in q[2:]:
        assert (await talk.claim(t)).reason == "NotReady"
    await talk.forget_wakes()
    await talk.complete_scope(a); await talk.complete_scope(b)
    assert set(await talk.due_wakes()) == set(q[2:])
