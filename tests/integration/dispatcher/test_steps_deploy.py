"""Deploys: what stays, what is replaced, what goes on, and what a rollback brings back."""

from __future__ import annotations

from uuid import UUID

import pytest

from tests.support.conversation import Conversation, dag, reactive, source
from tracelake.contracts.dispatcher_api import EventIn
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.deploy_dag import Deployed, plan_dag
from tracelake.dispatcher.steps.interventions import retry_task
from tracelake.dispatcher.steps.upkeep import reconcile_partitions
from tracelake.domain.dag.plan import ChangeKind
from tracelake.domain.errors import Conflict


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


def two(config: int = 1, **fields: object) -> str:
    """src → work → next; ``config`` is what ``work`` computes, ``fields`` how it is run."""
    return dag(source(), reactive("work", "src", config={"v": config}, **fields), reactive("next", "work"))


def versions(deployed: Deployed) -> dict[str, UUID]:
    return {job: outputs[0].dataset_version for job, outputs in deployed.jobs.items()}


def datasets(deployed: Deployed) -> dict[str, UUID]:
    return {job: outputs[0].dataset_uuid for job, outputs in deployed.jobs.items()}


async def test_the_same_file_twice_is_one_version_and_changes_nothing(talk: Conversation) -> None:
    first = await talk.deploy(two())
    await talk.trigger(0, 9)
    before = await talk.everything()
    again = await talk.deploy(two())
    assert (first.created, again.created) == (True, False)
    assert (first.dag_version, again.dag_version) == (1, 1)
    assert first.jobs == again.jobs
    assert await talk.everything() == before


async def test_a_changed_job_and_all_downstream_of_it_get_new_versions_of_their_datasets(
    talk: Conversation,
) -> None:
    old = await talk.deploy(two(1))
    new = await talk.deploy(two(2))
    assert new.dag_version == 2
    assert datasets(old) == datasets(new)
    changed = {job for job in versions(old) if versions(old)[job] != versions(new)[job]}
    assert changed == {"work", "next"}


async def test_a_change_reaches_the_readers_in_other_dags(talk: Conversation) -> None:
    def producer(config: int) -> str:
        publish = {"rows": {"from": {"job": "work", "output": 0}}}
        return dag(source(), reactive("work", "src", config={"v": config}), publish=publish)

    reader = dag(reactive("reader", {"from": {"dataset": "rows"}}), name="elsewhere")
    await talk.deploy(producer(1))
    await talk.deploy(reader)
    await talk.trigger(0, 9)
    await talk.run("work")
    waiting = await talk.only_queued("reader")
    before = (await talk.output("reader"))["dataset_version"]
    plan = await plan_dag(talk.ctx, producer(2))
    assert {(c.dag, c.job): c.kind for c in plan.jobs}["elsewhere", "reader"] is ChangeKind.REPLACED
    await talk.deploy(producer(2))
    assert (await talk.output("reader"))["dataset_version"] != before
    assert await talk.status(waiting) == "Canceled"
    await reconcile_partitions(talk.ctx)
    await talk.run("work")
    assert (await talk.lease("reader")).read.dataset_version == (await talk.output("work"))["dataset_version"]


@pytest.mark.parametrize(
    "tuning",
    [
        {"timeout_seconds": 7},
        {"heartbeat_timeout_seconds": 9},
        {"priority": "bulk"},
        {"scaling": {"max_concurrency": 2}},
        {"max_attempts": 9},
        {"retry": {"base": 1, "max": 2}},
    ],
)
async def test_how_a_job_is_run_may_change_without_new_versions(
    talk: Conversation, tuning: dict[str, object]
) -> None:
    old = await talk.deploy(two())
    await talk.trigger(0, 9)
    task = await talk.only_queued("work")
    new = await talk.deploy(two(**tuning))
    assert (new.dag_version, versions(new)) == (2, versions(old))
    assert await talk.only_queued("work") == task


async def test_a_retuned_job_runs_its_waiting_tasks_the_new_way(talk: Conversation) -> None:
    await talk.deploy(two())
    await talk.trigger(0, 9)
    await talk.forget_wakes()
    await talk.deploy(two(timeout_seconds=7, priority="bulk", runtime="ecs_spark"))
    [wake] = await talk.all_wakes()
    assert wake["runtime"] == "ecs_spark", "it is woken where it now runs"
    lease = await talk.lease("work")
    assert (lease.payload.timeout_seconds, lease.payload.runtime) == (7, "ecs_spark")
    [row] = await talk.query("SELECT priority FROM job WHERE name = 'work' AND active")
    assert row["priority"] == "bulk"


async def test_queued_tasks_of_what_was_replaced_are_canceled(talk: Conversation) -> None:
    await talk.deploy(two(1))
    await talk.trigger(0, 9)
    task = await talk.only_queued("work")
    await talk.deploy(two(2))
    row = await talk.task(task)
    assert (row["status"], row["error_message"]) == ("Canceled", "replaced by a deploy")
    with pytest.raises(Conflict) as refused:
        await retry_task(talk.ctx, task)
    assert refused.value.reason == "JobRetired"


async def test_running_tasks_finish_into_their_old_version_and_are_not_routed(talk: Conversation) -> None:
    old = await talk.deploy(two(1))
    await talk.trigger(0, 9)
    lease = await talk.lease("work")
    await talk.deploy(two(2))
    assert not (await talk.beat(lease)).cancel
    assert (await talk.complete_scope(lease)).task_status == "Completed"
    assert await talk.queued("next") == []
    assert await talk.scopes("work") == []
    [row] = await talk.query("SELECT dataset_version FROM partition WHERE task_id IS NOT NULL AND current")
    assert row["dataset_version"] == versions(old)["work"]


@pytest.mark.parametrize(
    ("status", "ended"), [("Released", "Canceled"), ("Failed", "Failed"), ("Canceled", "Canceled")]
)
async def test_nothing_of_a_retired_job_is_queued_again(talk: Conversation, status: str, ended: str) -> None:
    await talk.deploy(two(1))
    await talk.trigger(0, 9)
    lease = await talk.lease("work")
    await talk.deploy(two(2))
    assert (await talk.complete(lease, status=status)).task_status == ended
    await talk.pass_time(10_000)
    assert (await talk.claim(lease.task_id)).status == "NotClaimed"


async def test_a_rollback_revives_the_data_and_goes_on_where_it_was(talk: Conversation) -> None:
    first = await talk.deploy(two(1))
    await talk.trigger(0, 9)
    await talk.run("work")
    await talk.deploy(two(2))
    await talk.trigger(10, 19)
    await reconcile_partitions(talk.ctx)
    back = await talk.deploy(two(1))
    assert (back.created, back.dag_version, versions(back)) == (False, 1, versions(first))
    assert await talk.scopes("work") == [(0, 9)]
    await reconcile_partitions(talk.ctx)
    assert len(await talk.queued("work")) == 1, "10-19 came while it was away; 0-9 is done"
    assert (await talk.lease("work")).read.partition_key == "10-19"


async def test_a_rollback_takes_up_the_tasks_that_the_deploy_had_stopped(talk: Conversation) -> None:
    await talk.deploy(two(1))
    for start in (0, 10, 20, 30):
        await talk.trigger(start, start + 9)
    waiting, released, failed, canceled = await talk.queued("work")
    running = [await talk.lease(task) for task in (released, failed)]
    await talk.cancel(canceled)
    await talk.deploy(two(2))
    await talk.complete(running[0], status="Released")
    await talk.fail(running[1])
    await talk.forget_wakes()
    await talk.deploy(two(1))
    assert await talk.queued("work") == [waiting, released, failed]
    assert sorted(await talk.due_wakes()) == sorted([waiting, released, failed])
    assert await talk.status(canceled) == "Canceled", "what a person canceled stays so"
    assert (await talk.lease(waiting)).attempt == 1
    assert (await talk.lease(released)).attempt == 2


@pytest.mark.parametrize("stopped_by", ["a person", "a deploy"])
async def test_an_attempt_that_was_answered_canceled_never_acts_again(
    talk: Conversation, stopped_by: str
) -> None:
    """Its events were refused in between: if it could still complete its task, they would be lost."""
    await talk.deploy(two(1))
    await talk.trigger(0, 9)
    lease = await talk.lease("work")
    await talk.pass_time(10_000)
    await talk.reap()
    if stopped_by == "a person":
        await talk.cancel(lease.task_id)
    else:
        await talk.deploy(two(2))
    with pytest.raises(Conflict) as refused:
        await talk.complete_scope(lease)
    assert refused.value.reason == "Canceled"
    if stopped_by == "a person":
        await retry_task(talk.ctx, lease.task_id)
    else:
        await talk.deploy(two(1))
    assert await talk.status(lease.task_id) == "Queued"
    with pytest.raises(Conflict) as refused:
        await talk.complete(lease)
    assert refused.value.reason == "StaleLease"
    again = await talk.lease(lease.task_id)
    assert again.attempt == 2
    assert (await talk.complete_scope(again)).task_status == "Completed"
    assert await talk.scopes("work") == [(0, 9)]


async def test_a_rollback_takes_up_an_update_where_it_had_read_to(talk: Conversation) -> None:
    def update(config: int) -> str:
        return dag(source(), reactive("up", "src", strategy="PerUpdate", config={"v": config}))

    await talk.deploy(update(1))
    await talk.trigger(cursor=5)
    await talk.complete(await talk.lease("up"))
    await talk.trigger(cursor=8)
    stopped = await talk.only_queued("up")
    await talk.deploy(update(2))
    assert await talk.status(stopped) == "Canceled"
    await talk.deploy(update(1))
    lease = await talk.lease("up")
    assert (lease.read.after, lease.read.upto) == (5, 8)


async def test_a_removed_job_is_retired_and_comes_back_with_its_data(talk: Conversation) -> None:
    first = await talk.deploy(two())
    await talk.trigger(0, 9)
    await talk.run("work")
    task = await talk.only_queued("next")
    await talk.deploy(dag(source(), reactive("work", "src", config={"v": 1})))
    assert await talk.status(task) == "Canceled"
    assert versions(await talk.deploy(two())) == versions(first)
    assert await talk.only_queued("next") == task


async def test_a_replaced_source_is_told_to_stop_and_its_successor_gets_a_task(talk: Conversation) -> None:
    def chain(config: int) -> str:
        return dag(source(kind="always_on", config={"v": config}))

    await talk.deploy(chain(1))
    old = await talk.lease("src")
    await talk.forget_wakes()
    await talk.deploy(chain(2))
    assert (await talk.beat(old)).cancel
    said = await talk.emit(old, EventIn(await talk.dataset("src"), cursor=9))
    assert said.events[0].state == "old_version", "what it still says belongs to its own generation"
    new = await talk.only_queued("src")
    assert new != old.task_id
    assert await talk.due_wakes() == [new]
    await talk.deploy(chain(1))
    assert await talk.status(new) == "Canceled"
    revived = await talk.lease("src")
    assert (revived.task_id, revived.attempt) == (old.task_id, 2), "a generation keeps its one task"
    with pytest.raises(Conflict):
        await talk.beat(old)


async def test_an_unchanged_source_runs_on_through_a_deploy(talk: Conversation) -> None:
    def chain(config: int) -> str:
        return dag(source(kind="always_on"), reactive("work", "src", config={"v": config}))

    await talk.deploy(chain(1))
    lease = await talk.lease("src")
    await talk.deploy(chain(2))
    assert not (await talk.beat(lease)).cancel
    answer = await talk.emit(lease, EventIn(await talk.dataset("src"), start=0, end=9))
    assert answer.tasks_created == 1


async def test_a_plan_says_what_a_deploy_then_does(talk: Conversation) -> None:
    await talk.deploy(two(1))
    before = await talk.everything()
    planned = await plan_dag(talk.ctx, two(2))
    assert await talk.everything() == before
    deployed = await talk.deploy(two(2))
    assert deployed.plan == planned
    assert {change.job: change.kind.value for change in planned.jobs} == {
        "src": "unchanged",
        "work": "replaced",
        "next": "replaced",
    }


async def test_every_deploy_leaves_an_audit_row(talk: Conversation) -> None:
    await talk.deploy(two(1))
    await talk.deploy(two(1))
    await talk.deploy(two(2))
    rows = await talk.query("SELECT actor, action, subject FROM audit ORDER BY audit_id")
    assert [(row["actor"], row["subject"]["version"]) for row in rows] == [("tester", 1), ("tester", 2)]


async def test_a_source_that_a_deploy_stopped_is_heard_to_the_end_of_its_generation(
    talk: Conversation,
) -> None:
    await talk.deploy(dag(source(kind="always_on", storage="postgres", config={"v": 1})))
    lease = await talk.lease("src")
    await talk.deploy(dag(source(kind="always_on", storage="postgres", config={"v": 2})))
    assert (await talk.beat(lease)).cancel
    version = lease.payload.outputs[0]
    said = await talk.emit(lease, EventIn(version.dataset_uuid, version.dataset_version, cursor=7))
    assert (said.events[0].state, said.tasks_created) == ("old_version", 0)
