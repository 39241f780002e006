"""What people see of a follower, over HTTP and in the metrics, as its reports, pauses and workers come and go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.support.surfaces import Surfaces, open_surfaces
from tracelake.dispatcher import metrics
from tracelake.dispatcher.metrics import ChainGauges
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.upkeep import watch_sources
from tracelake.store.chains import chains

DAG = """
name: chain
jobs:
  - name: tip
    activation: source
    source: { kind: always_on }
    runtime: ecs_python
    operator: block_follower
    outputs: [{ name: blocks }]
    config: { rpc_pool: main, chain_id: 1, start_block: 0 }
"""


@pytest.fixture
async def api(ctx: StepContext) -> AsyncIterator[Surfaces]:
    async with open_surfaces(ctx) as surfaces:
        yield surfaces


async def shown(api: Surfaces) -> dict[str, Any]:
    answer = await api.person.get("/v1/chains")
    assert answer.status_code == 200, answer.text
    [chain] = answer.json()["chains"]
    return chain


async def running(api: Surfaces, ctx: StepContext) -> dict[str, Any]:
    assert (await api.person.post("/v1/dags", content=DAG)).status_code == 201
    await watch_sources(ctx)
    task_id = (await shown(api))["task_id"]
    claim = (
        await api.worker.post("/internal/task-claim", json={"task_id": task_id, "worker_id": "w"})
    ).json()
    return {name: claim[name] for name in ("task_id", "attempt", "lease_token")}


async def report(api: Surfaces, fence: Mapping[str, Any], **progress: Any) -> None:
    now = int(time.time())
    fields = {"message": "following the tip", "head": 120, "tip": 118, "lag": 2, "head_at": now, **progress}
    beat = await api.worker.post("/internal/heartbeat", json={**fence, "progress": fields})
    assert beat.status_code == 200, beat.text


async def test_no_condition_outlives_what_it_was_made_of(api: Surfaces, ctx: StepContext) -> None:
    fence = await running(api, ctx)
    assert (await shown(api))["condition"] == "starting"
    now = int(time.time())
    await report(api, fence, lag_seconds=24.0, head_time=now - 5)
    found = await shown(api)
    assert (found["condition"], found["lag"], found["lag_seconds"]) == ("following", 2, 24.0)
    assert 5 <= found["head_age_seconds"] < 60
    await report(
        api, fence, message="waiting", problem="a: refused", problem_since=now - 60, problem_of="chain"
    )
    found = await shown(api)
    assert (found["condition"], found["last_error"]) == ("unreachable", "a: refused")
    assert found["state"].startswith("endpoint unreachable since ")
    await report(api, fence, head_at=now - 1000)
    found = await shown(api)
    assert (found["condition"], found["state"][:33]) == ("silent", "nothing read from the chain since")
    await report(api, fence)
    assert (await api.person.post("/v1/jobs/chain/tip/pause")).status_code == 200
    found = await shown(api)
    assert (found["condition"], found["running"]) == ("paused", True)
    assert found["state"].startswith("paused by ")
    assert (await api.person.post("/v1/jobs/chain/tip/resume")).status_code == 200
    await ctx.db.run(lambda tx: tx.execute("UPDATE task SET lease_expires_at = tl_now() - interval '1 s'"))
    found = await shown(api)
    assert (found["condition"], found["running"]) == ("gone", True)


async def test_the_error_of_an_attempt_is_shown_with_its_time_until_the_next_one_has_read_the_head(
    api: Surfaces, ctx: StepContext
) -> None:
    fence = await running(api, ctx)
    await report(api, fence)
    done = await api.worker.post(
        "/internal/task-complete", json={**fence, "status": "Failed", "error_message": "boom"}
    )
    assert done.status_code == 200, done.text
    found = await shown(api)
    assert (found["condition"], found["last_error"]) == ("queued", "boom")
    failed_at = found["last_error_since"]
    assert failed_at is not None
    await ctx.db.run(lambda tx: tx.execute("UPDATE task SET ready_at = tl_now()"))
    claim = (
        await api.worker.post("/internal/task-claim", json={"task_id": fence["task_id"], "worker_id": "w"})
    ).json()
    found = await shown(api)
    assert (found["condition"], found["last_error"], found["last_error_since"]) == (
        "starting",
        "boom",
        failed_at,
    )
    await report(api, {name: claim[name] for name in ("task_id", "attempt", "lease_token")})
    found = await shown(api)
    assert (found["condition"], found["last_error"], found["last_error_since"]) == ("following", None, None)


def ages(registry: CollectorRegistry, name: str) -> list[float]:
    return [sample.value for family in registry.collect() if family.name == name for sample in family.samples]


async def test_the_metrics_say_the_same_and_take_no_label_from_a_report(
    api: Surfaces, ctx: StepContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    gauges = ChainGauges(registry)
    fence = await running(api, ctx)
    states = 'a ok, b suspect, c"} 1\n ok, ' + ", ".join(f"n{n} ok" for n in range(100))
    sent = {"lag_seconds": 24.0, "reorgs": 3, "endpoint_states": states, "endpoints": "SECRET"}
    await report(api, fence, head_time=int(time.time()), **sent)
    gauges.show((await ctx.db.run(chains)).chains)
    page = generate_latest(registry).decode()
    labels = 'dag="chain",job="tip"'
    assert f"tracelake_chain_lag_blocks{{{labels}}} 2.0" in page
    assert f"tracelake_chain_lag_seconds{{{labels}}} 24.0" in page
    assert f"tracelake_chain_reorgs{{{labels}}} 3.0" in page
    assert f'tracelake_chain_condition{{condition="following",{labels}}} 1.0' in page
    assert f'tracelake_chain_condition{{condition="paused",{labels}}} 0.0' in page
    assert 'tracelake_rpc_endpoint_ok{dag="chain",endpoint="a",job="tip"} 1.0' in page
    assert 'tracelake_rpc_endpoint_ok{dag="chain",endpoint="b",job="tip"} 0.0' in page
    assert page.count("tracelake_rpc_endpoint_ok{") == 16
    assert "SECRET" not in page
    monkeypatch.setattr(metrics, "_OVERDUE_SECONDS", 0.0)
    [known], [head] = (ages(registry, f"tracelake_chain_{what}_age_seconds") for what in ("known", "head"))
    await asyncio.sleep(0.2)
    assert ages(registry, "tracelake_chain_known_age_seconds")[0] >= known + 0.2, "it isn't read again"
    assert ages(registry, "tracelake_chain_head_age_seconds")[0] >= head + 0.2
    gauges.show([])
    assert 'dag="chain"' not in generate_latest(registry).decode()
