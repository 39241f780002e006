"""The thinnest path: a deployed DAG, a trigger, a claim, a completion, and the downstream task."""

from tracelake.contracts.dispatcher_api import ClaimRequest, CompleteRequest, OutputIn, TriggerRequest
from tracelake.dispatcher.steps.accept_events import trigger_source
from tracelake.dispatcher.steps.claim_task import claim_tasks
from tracelake.dispatcher.steps.complete_task import complete_tasks
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.deploy_dag import deploy_dag

CHAIN = """
name: chain
jobs:
  - { name: src, activation: source, runtime: dispatcher, source: { kind: manual }, outputs: 1 }
  - name: first
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{ from: { job: src, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
  - name: second
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{ from: { job: first, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
"""


async def test_a_trigger_runs_through_to_the_downstream_task(ctx: StepContext) -> None:
    deployed = await deploy_dag(ctx, CHAIN, "tester")
    assert deployed.created
    triggered = await trigger_source(ctx, "chain", "src", TriggerRequest(start=0, end=99))
    assert triggered.tasks_created == 1
    first = await _only_queued(ctx, "first")
    [claimed] = await claim_tasks(ctx, [ClaimRequest(first, "w1")])
    assert claimed.status == "Claimed"
    assert claimed.task is not None
    assert claimed.task.inputs[0].partition_key == "0-99"
    output = OutputIn(0, start=0, end=99, row_count=0)
    [answer] = await complete_tasks(
        ctx, [CompleteRequest(first, "Completed", claimed.attempt, claimed.lease_token, [output])]
    )
    assert not isinstance(answer, Exception), answer
    assert answer.task_status == "Completed"
    second = await _only_queued(ctx, "second")
    [claimed] = await claim_tasks(ctx, [ClaimRequest(second, "w1")])
    assert claimed.status == "Claimed"


async def _only_queued(ctx: StepContext, job: str):
    rows = await ctx.db.run(
        lambda tx: tx.fetch(
            "SELECT task_id FROM task JOIN job USING (job_id) WHERE name = $1 AND status = 'Queued'", job
        )
    )
    [row] = rows
    return row["task_id"]
