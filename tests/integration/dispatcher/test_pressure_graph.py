"""The graph of ``bench.pressure``: it is made however long that takes, and a look at it finds what it must."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import bench.pressure.__main__ as pressure_bench
from tracelake.dispatcher.steps.context import StepContext
from tracelake.postgres import sqlfiles
from tracelake.postgres.sessions import end_transactions_after
from tracelake.store import db

JOBS = 20
SLOW = """-- name: make_tasks
-- As on a busy machine.
SELECT pg_sleep(1.5);
"""


async def test_the_graph_may_take_longer_to_make_than_a_transaction_of_a_pool_may_last(
    ctx: StepContext, state_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pressure_bench.SQL
    others = ("make_jobs", "make_edges", "make_kept", "set_thresholds")
    queries = [f"-- name: {name}\n{getattr(made, name)}" for name in others]
    slow = sqlfiles.parse("slow", "\n".join([*queries, SLOW + made.make_tasks]))
    monkeypatch.setattr(pressure_bench, "SQL", slow)
    monkeypatch.setattr(db, "_limit_transactions", end_transactions_after(1))
    stack: Any = SimpleNamespace(state_dsn=state_dsn)
    found = await pressure_bench.graph(stack, JOBS, 400)
    assert (found["calm"]["trips"], found["calm"]["holds"]) == (0, 0)
    tripped = found["a tenth tripped"]
    assert (tripped["trips"], tripped["holds"]) == (JOBS // 10, 9 * JOBS // 10)
    assert (found["and kept"]["trips"], found["and kept"]["holds"]) == (JOBS // 10, 9 * JOBS // 10)
