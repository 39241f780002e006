"""Lists stay cheap however much there is: a page reads about a page of rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.deploy_dag import deploy_dag
from tracelake.domain.block_range import MAX_BLOCK
from tracelake.store.db import Transaction
from tracelake.store.reads import SQL

DAG = """
name: big
jobs:
  - { name: src, activation: source, runtime: dispatcher, source: { kind: manual }, outputs: 1 }
  - name: one
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{ from: { job: src, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
  - name: two
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{ from: { job: src, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
"""
FILL = """
INSERT INTO task (task_id, org_id, job_id, kind, status, range_start, range_end, scope_key)
SELECT gen_random_uuid(), j.org_id, j.job_id, 'partition',
       CASE WHEN n % 1000 = 1 THEN 'Queued' WHEN n % 1000 = 2 THEN 'Failed' WHEN n % 1000 = 3 THEN 'Canceled'
            ELSE 'Completed' END, n, n, ''
FROM generate_series(1, 20000) n CROSS JOIN job j WHERE j.name IN ('one', 'two')
ORDER BY n
"""
PARTITIONS = """
INSERT INTO partition (dataset_version, version_no, range_start, range_end, stored, current, revision)
SELECT dataset_version, version_no, n, n, false, true, 0
FROM dataset_version, generate_series(1, 5000) n
"""
LIMIT = 101
NEWEST = 2**63 - 1
NAMED = ["big", "one", NEWEST, LIMIT]


@pytest.mark.parametrize(
    ("query", "args"),
    [
        ("recent_tasks", [NEWEST, LIMIT]),
        ("recent_tasks", [20000, LIMIT]),
        ("recent_tasks_of_jobs", NAMED),
        ("recent_tasks_of_jobs", ["big", None, 20000, LIMIT]),
        ("queued_tasks", NAMED),
        ("queued_tasks", [None, None, NEWEST, LIMIT]),
        ("running_tasks", NAMED),
        ("running_tasks", [None, None, NEWEST, LIMIT]),
        ("completed_tasks", ["big", "src", NEWEST, LIMIT]),
        ("completed_tasks", [None, None, 20000, LIMIT]),
        ("failed_tasks", NAMED),
        ("canceled_tasks", NAMED),
        ("completed_tasks", NAMED),
    ],
)
async def test_a_page_of_tasks_reads_about_a_page(ctx: StepContext, query: str, args: list[Any]) -> None:
    await deploy_dag(ctx, DAG, "tester")
    plan = await explained(ctx, FILL, "task", getattr(SQL, query), args)
    assert rows_read(plan, "task") <= 4 * LIMIT, plan


async def test_a_page_of_partitions_reads_a_page(ctx: StepContext) -> None:
    await deploy_dag(ctx, DAG, "tester")
    version = (await ctx.db.run(lambda tx: tx.fetch("SELECT dataset_version FROM dataset_version")))[0][0]
    args = [version, 2500, 2500, LIMIT, False, 0, MAX_BLOCK]
    plan = await explained(ctx, PARTITIONS, "partition", SQL.list_partitions, args)
    assert rows_read(plan, "partition") <= LIMIT, plan


async def explained(ctx: StepContext, fill: str, table: str, query: str, args: list[Any]) -> dict[str, Any]:
    async def work(tx: Transaction) -> Any:
        await tx.execute(fill)
        await tx.execute(f"ANALYZE {table}")
        row = await tx.fetchrow(f"EXPLAIN (ANALYZE, FORMAT JSON) {query}", *args)
        assert row is not None
        return row[0]

    found = await ctx.db.run(work)
    return json.loads(found)[0]["Plan"]


def rows_read(node: dict[str, Any], table: str) -> float:
    """Rows that scans of a table looked at, those that a filter threw away included."""
    own = 0.0
    if node.get("Relation Name") == table:
        each = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
        own = each * node["Actual Loops"]
    return own + sum(rows_read(child, table) for child in node.get("Plans", []))
