"""The ``dispatcher`` runtime: what becomes of a task whose config its operator refuses when it runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.conversation import Conversation, dag, reactive, source
from tests.support.surfaces import DirectDispatch
from tracelake.dispatcher.loops.run_in_process import InProcessRuntime
from tracelake.dispatcher.steps.context import StepContext


@pytest.mark.parametrize(
    ("operator", "deployed", "stored", "why"),
    [
        ("range_splitter", {"chunk_size": 10}, {}, "config: chunk_size: is required"),
        (
            "range_splitter",
            {"chunk_size": 10},
            {"chunk_size": 0},
            "config: chunk_size: must be a whole number from 1 to 1000000000",
        ),
        ("range_aggregator", {"range_size": 10}, {}, "config: range_size: is required"),
        (
            "range_aggregator",
            {"range_size": 10},
            {"range_size": 10, "finality": "soon", "start": 3},
            "config: start: range_aggregator has no such setting; "
            "config: finality: must be finalized, latest or a number of blocks (0 to 1000000000)",
        ),
    ],
)
async def test_a_config_that_an_older_version_accepted_fails_the_task_and_says_why(
    ctx: StepContext, operator: str, deployed: dict[str, Any], stored: dict[str, Any], why: str
) -> None:
    talk = Conversation(ctx)
    cuts = operator == "range_splitter"
    strategy = "PerPartition" if cuts else "PerUpdate"
    job = reactive("job", "src", strategy=strategy, operator=operator, config=deployed, max_attempts=5)
    await talk.deploy(dag(source("src"), job))
    await talk.query("UPDATE job SET config = $1 WHERE name = 'job' RETURNING name", stored)
    await (talk.trigger(0, 99) if cuts else talk.trigger(cursor=99))
    task_id = await talk.only_queued("job")
    runtime = InProcessRuntime(DirectDispatch(ctx), "here")
    runtime.submit(task_id)
    await asyncio.gather(*runtime._running)
    task = await talk.task(task_id)
    assert (task["status"], task["attempt"], task["error_message"]) == ("Failed", 1, why)
    assert await talk.scopes("job") == []


@pytest.mark.parametrize(
    ("requests", "chunks"),
    [
        (
            [(0, 299), (0, 10), (50, 250), (120, 130)],
            [(0, 99), (100, 199), (200, 299)],
        ),
        ([(0, 10), (5, 20), (0, 20), (40, 50)], [(0, 20), (40, 50)]),
        ([(0, 10), (30, 40), (5, 35), (0, 199)], [(0, 99), (100, 199)]),
        ([(90, 99), (95, 130), (0, 250)], [(0, 99), (100, 199), (200, 250)]),
        ([(0, 49), (50, 99)], [(0, 49), (50, 99)]),
    ],
)
async def test_requests_that_overlap_make_partitions_that_do_not(
    ctx: StepContext, requests: list[tuple[int, int]], chunks: list[tuple[int, int]]
) -> None:
    talk = Conversation(ctx)
    split = reactive("split", "src", operator="range_splitter", config={"chunk_size": 100})
    await talk.deploy(dag(source("src"), split, reactive("ingest", "split", storage="parquet")))
    runtime = InProcessRuntime(DirectDispatch(ctx), "here")
    for start, end in requests:
        await talk.trigger(start, end)
        for task_id in await talk.queued("split"):
            runtime.submit(task_id)
            await asyncio.gather(*runtime._running)
        for task_id in await talk.queued("ingest"):
            await talk.complete_scope(await talk.lease(task_id))
    assert await talk.scopes("ingest") == chunks
    assert {row["status"] for row in await talk.query("SELECT status FROM task")} == {"Completed"}
