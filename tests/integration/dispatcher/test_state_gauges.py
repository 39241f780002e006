"""What the Dispatcher's gauges show while they are refreshed, and while the state database is away."""

from __future__ import annotations

import asyncio
import time

import asyncpg
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.support.conversation import SQL, Conversation, dag, reactive, source
from tracelake.contracts.dispatcher_api import TriggerRequest
from tracelake.dispatcher import metrics
from tracelake.dispatcher.metrics import ChainGauges, StateGauges, observe_state
from tracelake.dispatcher.steps.accept_events import trigger_source
from tracelake.dispatcher.steps.apply_backpressure import balance
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.interventions import pause_job, resume_job
from tracelake.dispatcher.steps.source_requests import route_waiting
from tracelake.domain.errors import Unavailable
from tracelake.queue.base import QueueDepth
from tracelake.store.db import Database, open_pool

WAITING = 'tracelake_tasks_queued{dag="chain",job="down",runtime="ecs_python"}'
OLDEST = 'tracelake_tasks_queued_oldest_seconds{dag="chain",job="down",runtime="ecs_python"}'
OBSERVED = 'tracelake_observed_timestamp_seconds{store="%s"}'
BUFFER = 'tracelake_queue_oldest_seconds{queue="buffer-a"}'


class Scraped:
    """The gauges as Prometheus finds them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.state = StateGauges(self.registry)
        self.chains = ChainGauges(self.registry)

    def page(self) -> dict[str, float]:
        lines = generate_latest(self.registry).decode().splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
        }


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


async def deploy_one_that_waits(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("down", "src", max_queue_depth=10)))
    await talk.trigger(0, 0)
    await talk.pass_time(60)


@pytest.mark.parametrize("table", ["queue_count", "dead_letter", "worker", "delivery", "outbox"])
async def test_a_scrape_during_a_refresh_finds_every_series(
    talk: Conversation, state_dsn: str, table: str
) -> None:
    await deploy_one_that_waits(talk)
    scraped = Scraped()
    await observe_state(talk.ctx.db, scraped.state, scraped.chains)
    before = scraped.page()
    assert before[WAITING] == 1
    await talk.trigger(1, 1)
    other = await asyncpg.connect(state_dsn)
    try:
        async with other.transaction():
            await other.execute(f"LOCK TABLE {table}")
            refresh = asyncio.create_task(observe_state(talk.ctx.db, scraped.state, scraped.chains))
            async with asyncio.timeout(5):
                while not await other.fetchval(SQL.waiting_sessions):
                    await asyncio.sleep(0.01)
            assert scraped.page() == before
        await refresh
    finally:
        await other.close()
    assert scraped.page()[WAITING] == 2


async def test_a_database_that_is_away_shows_in_the_time_and_in_the_ages(
    talk: Conversation, state_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await deploy_one_that_waits(talk)
    scraped = Scraped()
    assert [scraped.page()[OBSERVED % store] for store in ("state", "queue")] == [0, 0], "never"
    pool = await open_pool(state_dsn, min_size=1, max_size=1)
    started = time.time()
    await observe_state(Database(pool), scraped.state, scraped.chains)
    scraped.state.show_queues({"buffer-a": QueueDepth(1, 0, 0, 0, 7.0)}, ["runtime-a"])
    await pool.close()
    seen = scraped.page()
    assert min(seen[OBSERVED % store] for store in ("state", "queue")) >= started - 0.001
    assert (60 <= seen[OLDEST] < 120, seen[BUFFER]) == (True, 7)
    with pytest.raises(Unavailable):
        await observe_state(Database(pool), scraped.state, scraped.chains)
    assert scraped.page() == seen, "a refresh isn't overdue yet"
    monkeypatch.setattr(metrics, "_OVERDUE_SECONDS", 0.1)
    await asyncio.sleep(0.2)
    later = scraped.page()
    ages = {OLDEST, BUFFER, "tracelake_outbox_oldest_seconds"}
    assert min(later[name] - seen[name] for name in ages) >= 0.2
    assert {name: value for name, value in later.items() if name not in ages} == {
        name: value for name, value in seen.items() if name not in ages
    }, "an empty queue has no age, and the time stands still"


@pytest.mark.parametrize("code", [False, True])
async def test_triggers_are_counted_by_answer_and_what_is_kept_shows(talk: Conversation, code: bool) -> None:
    own = {"operator": "own", "runtime": "ecs_python"} if code else {}
    await talk.deploy(dag(source(**own), reactive("down", "src")))
    scraped = Scraped()
    before = answers(talk)
    await talk.trigger(0, 0)
    await pause_job(talk.ctx, "chain", "src")
    await talk.trigger(1, 1)
    await talk.trigger(2, 2)
    after = answers(talk)
    assert {key: after[key] - before.get(key, 0) for key in after} == {
        ("manual", "routed"): 1,
        ("manual", "kept"): 2,
    }
    await observe_state(talk.ctx.db, scraped.state, scraped.chains)
    kept = 'tracelake_kept{dag="chain",job="src"}'
    assert scraped.page()[kept] == 2
    await resume_job(talk.ctx, "chain", "src")
    await balance(talk.ctx)
    await route_waiting(talk.ctx)
    await observe_state(talk.ctx.db, scraped.state, scraped.chains)
    assert kept not in scraped.page()


def answers(talk: Conversation) -> dict[tuple[str, str], float]:
    return {
        (sample.labels["kind"], sample.labels["answer"]): sample.value
        for metric in talk.ctx.metrics.source_requests.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


async def test_a_hold_of_bulk_work_alone_is_another_tier_than_a_hold(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("up", "src"), reactive("down", "up", max_queue_depth=1)))
    scraped = Scraped()
    await trigger_source(talk.ctx, "chain", "src", TriggerRequest(start=0, end=0, priority="bulk"))
    await talk.run("up")
    await trigger_source(talk.ctx, "chain", "src", TriggerRequest(start=1, end=1, priority="bulk"))
    assert (await balance(talk.ctx)).changed
    held = 'tracelake_jobs_held{cause="chain/down",dag="chain",job="up",tier="%s"}'
    await observe_state(talk.ctx.db, scraped.state, scraped.chains)
    page = scraped.page()
    assert (page.get(held % "bulk"), page.get(held % "normal")) == (1, None)
    await talk.pass_time(31)
    assert (await balance(talk.ctx)).changed
    await observe_state(talk.ctx.db, scraped.state, scraped.chains)
    page = scraped.page()
    assert (page.get(held % "bulk"), page.get(held % "normal")) == (None, 1)
