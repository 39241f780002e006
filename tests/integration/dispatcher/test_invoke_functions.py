"""The ``lambda`` runtime against a real HTTP invoker: an attempt is handed over at most once, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from uuid import UUID

import asyncpg
import pytest
from prometheus_client import CollectorRegistry

from tests.support.conversation import Conversation, dag, reactive, source
from tests.support.functions import ScriptedInvoker, scripted_invoker
from tracelake.contracts.bundles import FORGET_SECONDS, Invocation, InvokerRegistration
from tracelake.contracts.dispatcher_api import CompleteRequest, HeartbeatRequest, OutputIn
from tracelake.contracts.user_api import TaskDetail
from tracelake.dispatcher.dispatch import CoalescingDispatch
from tracelake.dispatcher.invoker_client import InvokerClient
from tracelake.dispatcher.loops.deliver_outbox import OutboxDelivery
from tracelake.dispatcher.loops.invoke_functions import (
    FunctionInvocations,
    InvocationSender,
    Invokers,
    refresh_invokers,
)
from tracelake.dispatcher.loops.periodic import every
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.running_attempt import heartbeat
from tracelake.dispatcher.steps.upkeep import register_invoker, rewake_queued
from tracelake.domain.errors import Conflict
from tracelake.store import reads
from tracelake.store.db import Database, DeployLock
from tracelake.store.jobs import JobDefinitions

TOKEN = "tlw_" + "t" * 40


@dataclass
class Replica:
    """One Dispatcher's part in this, without its ports."""

    talk: Conversation
    functions: FunctionInvocations
    delivery: OutboxDelivery

    async def register(self, url: str, concurrency: int = 4) -> None:
        await register_invoker(self.talk.ctx, InvokerRegistration(url, concurrency))


class NoQueue:
    """Nothing of a function goes to a queue."""


@asynccontextmanager
async def replica(
    ctx: StepContext, *, door: float = 5.0, answer: float = 5.0, tokens: tuple[str, ...] = (TOKEN,)
) -> AsyncIterator[Replica]:
    registry = CollectorRegistry()
    invokers = Invokers()
    client = InvokerClient(lambda: tokens, answer_seconds=answer)
    look = partial(refresh_invokers, ctx.db, invokers)
    sender = InvocationSender(CoalescingDispatch(ctx), client, invokers, look, registry, slot_seconds=door)
    functions = FunctionInvocations(ctx.db, invokers, look, sender, registry)
    delivery = OutboxDelivery(
        ctx.db, NoQueue(), ctx.runtimes, lambda task_id: None, functions.offer, registry
    )
    loops = [
        asyncio.create_task(loop)
        for loop in (functions.run(), delivery.deliver_fresh(), every(0.05, "outbox", delivery.sweep))
    ]
    try:
        yield Replica(Conversation(ctx), functions, delivery)
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.wait(loops)
        await functions.drain(2.0)


def function_dag(**fields: object) -> str:
    job = {"runtime": "lambda", "retry": {"base": 0, "max": 0}, "timeout_seconds": 100, **fields}
    return dag(source(), reactive("work", "src", **job))


async def one_task(talk: Conversation, **fields: object) -> UUID:
    await talk.deploy(function_dag(**fields))
    await talk.trigger(0, 9)
    [task_id] = await talk.tasks("work")
    return task_id


async def shown(ctx: StepContext, task_id: UUID) -> TaskDetail:
    return await ctx.db.run(lambda tx: reads.task(tx, task_id), lock=DeployLock.NONE)


async def until(condition: Callable[[], Awaitable[bool]], patience: float = 20.0) -> None:
    async with asyncio.timeout(patience):
        while not await condition():
            await asyncio.sleep(0.02)


def completion(of: Invocation, status: str = "Completed") -> CompleteRequest:
    outputs = [OutputIn(0, start=0, end=9, row_count=0)] if status == "Completed" else []
    return CompleteRequest(of.task_id, status, of.attempt, of.lease_token, outputs)


async def test_a_function_gets_the_whole_payload_and_a_lease_that_needs_no_heartbeat(
    ctx: StepContext,
) -> None:
    async with replica(ctx) as here, scripted_invoker() as invoker:
        await here.register(invoker.url)
        task_id = await one_task(here.talk)
        [got] = await invoker.until_taken(1)
        assert (got.task_id, got.attempt, got.operator, got.runtime) == (task_id, 1, "noop", "lambda")
        assert invoker.functions == ["noop"]
        assert (got.inputs[0].start, got.inputs[0].end) == (0, 9)
        assert got.capability_token.count(".") == 2
        row = await here.talk.task(task_id)
        assert (row["worker_id"], row["lease_token"]) == ("lambda", got.lease_token)
        assert row["lease_expires_at"] == got.lease_expires_at
        assert timedelta(seconds=150) < got.lease_expires_at - row["now"] <= timedelta(seconds=160)
        await until(lambda: nothing_waits(here.talk))
        beat = await heartbeat(ctx, HeartbeatRequest(task_id, 1, got.lease_token))
        assert beat.lease_expires_at is not None
        assert beat.lease_expires_at >= got.lease_expires_at, "a heartbeat never shortens a lease"
        await here.talk.say(completion(got))
        assert await here.talk.status(task_id) == "Completed"


async def nothing_waits(talk: Conversation) -> bool:
    return await talk.all_wakes() == []


async def test_a_heartbeat_near_the_end_extends_the_lease(ctx: StepContext) -> None:
    talk = Conversation(ctx)
    lease = await talk.lease(await one_task(talk, heartbeat_timeout_seconds=50), worker="lambda")
    await talk.pass_time(140)
    row = await talk.task(lease.task_id)
    beat = await talk.beat(lease)
    assert beat.lease_expires_at is not None
    assert timedelta(seconds=49) < beat.lease_expires_at - row["now"] < timedelta(seconds=60)


async def test_a_crash_between_the_claim_and_the_call_costs_a_lease_and_nothing_else(
    ctx: StepContext,
) -> None:
    talk = Conversation(ctx)
    task_id = await one_task(talk)
    await talk.lease(task_id, worker="lambda")
    assert await talk.reap(listened_for=150) == 0
    assert await talk.reap(listened_for=11) == 0, "it has not listened for long enough"
    assert await talk.reap() == 1
    async with replica(ctx) as here, scripted_invoker() as invoker:
        await here.register(invoker.url)
        [got] = await invoker.until_taken(1)
        assert (got.task_id, got.attempt) == (task_id, 2)


@pytest.mark.parametrize("lost", ["lose", "hang", 500])
async def test_an_attempt_whose_answer_got_lost_is_given_up_and_never_handed_over_again(
    ctx: StepContext, lost: str
) -> None:
    async with replica(ctx, answer=0.5) as here, scripted_invoker(lost) as invoker:
        await here.register(invoker.url)
        task_id = await one_task(here.talk)
        first, second = await invoker.until_taken(2)
        assert (first.attempt, second.attempt) == (1, 2)
        assert max(invoker.attempts_taken.values()) == 1
        attempt = (await here.talk.attempts(task_id))[0]
        assert attempt["outcome"] == "Failed"
        assert "outcome is unknown" in attempt["error_message"]
        with pytest.raises(Conflict):
            await here.talk.say(completion(first))
        await here.talk.say(completion(second))
        assert (await here.talk.task(task_id))["failures"] == 1


async def test_what_a_function_reports_before_its_answer_gets_lost_stands(ctx: StepContext) -> None:
    async with replica(ctx, answer=1.0) as here, scripted_invoker("hang") as invoker:
        await here.register(invoker.url)
        task_id = await one_task(here.talk)
        [got] = await invoker.until_taken(1)
        await here.talk.say(completion(got))
        await until(lambda: idle(here))
        assert await here.talk.status(task_id) == "Completed"
        assert len(invoker.asked) == 1


async def idle(here: Replica) -> bool:
    return not here.functions._in_hand


async def test_attempts_whose_outcome_is_unknown_are_counted(ctx: StepContext) -> None:
    async with replica(ctx) as here, scripted_invoker(then="lose") as invoker:
        await here.register(invoker.url)
        task_id = await one_task(here.talk, max_attempts=2)
        await until(lambda: has_status(here.talk, task_id, "Failed"))
        assert [each.attempt for each in invoker.taken] == [1, 2]


async def has_status(talk: Conversation, task_id: UUID, status: str) -> bool:
    return await talk.status(task_id) == status


async def test_without_a_slot_the_same_attempt_is_offered_again_until_there_is_one(ctx: StepContext) -> None:
    async with replica(ctx) as here, scripted_invoker(429, 429, 429) as invoker:
        await here.register(invoker.url)
        task_id = await one_task(here.talk)
        [got] = await invoker.until_taken(1)
        assert [each.attempt for each in invoker.asked] == [1, 1, 1, 1]
        assert {each.lease_token for each in invoker.asked} == {got.lease_token}
        assert len(await here.talk.attempts(task_id)) == 1


async def test_a_lease_that_finds_no_slot_in_time_is_released_and_costs_no_attempt(ctx: StepContext) -> None:
    async with replica(ctx, door=0.2) as here, scripted_invoker(then=429) as invoker:
        await here.register(invoker.url)
        task_id = await one_task(here.talk, max_attempts=1)
        await until(lambda: attempted(here.talk, task_id, 2))
        invoker.then = 202
        [got] = await invoker.until_taken(1)
        history = await here.talk.attempts(task_id)
        assert {row["outcome"] for row in history[:-1]} == {"Released"}
        assert (await here.talk.task(task_id))["failures"] == 0
        assert got.attempt == len(history)


async def attempted(talk: Conversation, task_id: UUID, times: int) -> bool:
    return len(await talk.attempts(task_id)) >= times


async def test_while_nobody_has_a_slot_others_wait_without_a_lease(ctx: StepContext) -> None:
    async with replica(ctx, door=60.0) as here, scripted_invoker(then=429) as invoker:
        await here.register(invoker.url, concurrency=2)
        await here.talk.deploy(function_dag())
        for start in range(0, 100, 10):
            await here.talk.trigger(start, start + 9)
        await invoker.until_asked(12)
        running = await here.talk.tasks("work", "Running")
        assert len(running) <= 2
        assert invoker.most_at_once <= 2
        invoker.then = 202
        await invoker.until_taken(10)
        assert max(invoker.attempts_taken.values()) == 1


async def test_without_an_invoker_tasks_wait_unclaimed_and_show_why(ctx: StepContext) -> None:
    async with replica(ctx) as here:
        task_id = await one_task(here.talk)
        await until(lambda: held(ctx, task_id))
        detail = await shown(ctx, task_id)
        assert detail.waiting_for is not None
        assert "no invoker is registered" in detail.waiting_for.message
        assert (detail.attempt, detail.failures) == (0, 0)
        assert await rewake_queued(ctx, 0.0) == 0, "its wake-up isn't lost, and more of them would pile up"
        async with scripted_invoker() as invoker:
            await here.register(invoker.url)
            [got] = await invoker.until_taken(1)
            assert got.attempt == 1


async def held(ctx: StepContext, task_id: UUID) -> bool:
    waiting = (await shown(ctx, task_id)).waiting_for
    return waiting is not None and waiting.reason == "Delivery"


async def test_an_invoker_that_comes_makes_what_waited_due_at_once(ctx: StepContext) -> None:
    async with replica(ctx) as here:
        task_id = await one_task(here.talk)
        await until(lambda: held(ctx, task_id))
    talk = Conversation(ctx)
    await talk.query("UPDATE outbox SET available_at = tl_now() + interval '1 hour'")
    await register_invoker(ctx, InvokerRegistration("http://127.0.0.1:9", 1))
    assert await talk.due_wakes() == [task_id]
    await talk.query("UPDATE outbox SET available_at = tl_now() + interval '1 hour'")
    await register_invoker(ctx, InvokerRegistration("http://127.0.0.1:9", 1))
    assert await talk.due_wakes() == [], "it was there already"
    await talk.pass_time(FORGET_SECONDS + 1)
    await register_invoker(ctx, InvokerRegistration("http://127.0.0.1:9", 1))
    assert await talk.due_wakes() == [task_id], "it came back"


async def test_an_invoker_that_left_or_fell_silent_is_not_asked(ctx: StepContext) -> None:
    async with replica(ctx) as here, scripted_invoker() as invoker:
        await here.register(invoker.url)
        await here.register(invoker.url, concurrency=0)
        task_id = await one_task(here.talk)
        await until(lambda: held(ctx, task_id))
        await here.register("http://127.0.0.1:9")
        await here.talk.pass_time(FORGET_SECONDS + 1)
        await here.register(invoker.url)
        await invoker.until_taken(1)
        assert len(await here.talk.attempts(task_id)) == 1, "nobody asked the silent one"


@pytest.mark.parametrize("away", ["nobody listens", "cut", 503])
async def test_an_invoker_that_takes_nothing_costs_no_attempt(ctx: StepContext, away: object) -> None:
    async with replica(ctx) as here, scripted_invoker(then="cut" if away == "cut" else 503) as invoker:
        await here.register(invoker.url)
        if away == "nobody listens":
            await invoker.stop()
        task_id = await one_task(here.talk, max_attempts=1)
        await until(lambda: held(ctx, task_id))
        waiting = (await shown(ctx, task_id)).waiting_for
        assert waiting is not None
        assert invoker.url in waiting.message
        if away == "nobody listens":
            await invoker.start()
        invoker.then = 202
        [got] = await invoker.until_taken(1)
        row = await here.talk.task(task_id)
        assert (row["status"], row["failures"], row["attempt"]) == ("Running", 0, got.attempt)
        history = await here.talk.attempts(task_id)
        assert {each["outcome"] for each in history[:-1]} == {"Released"}


async def test_the_successor_of_an_invoker_that_left_gets_the_same_attempt(ctx: StepContext) -> None:
    async with replica(ctx) as here, scripted_invoker() as former, scripted_invoker() as successor:
        await here.register(former.url)
        await one_task(here.talk)
        await former.until_taken(1)
        await former.stop()
        await here.register(former.url, concurrency=0)
        await here.register(successor.url)
        # Within a moment of the last look, so that only the one that left is known.
        await here.talk.trigger(10, 19)
        [got] = await successor.until_taken(1)
        assert [each["outcome"] for each in await here.talk.attempts(got.task_id)] == [None]
        assert got.attempt == 1
        await former.start()


async def test_what_an_invoker_rejects_fails_with_what_it_said(ctx: StepContext) -> None:
    async with replica(ctx) as here, scripted_invoker(then=400) as invoker:
        await here.register(invoker.url)
        task_id = await one_task(here.talk, max_attempts=2)
        await until(lambda: has_status(here.talk, task_id, "Failed"))
        assert "answered 400" in (await here.talk.task(task_id))["error_message"]


async def test_while_tokens_are_rotated_an_invoker_may_know_any_of_them(ctx: StepContext) -> None:
    other = "tlw_" + "o" * 40
    async with replica(ctx, tokens=(TOKEN, other)) as here, scripted_invoker(token=other) as invoker:
        await here.register(invoker.url)
        task_id = await one_task(here.talk)
        [got] = await invoker.until_taken(1)
        assert got.attempt == 1
        assert len(await here.talk.attempts(task_id)) == 1


async def test_a_lease_moves_on_to_an_invoker_that_has_a_slot(ctx: StepContext) -> None:
    async with (
        replica(ctx, door=60.0) as here,
        scripted_invoker(then=429) as full,
        scripted_invoker() as free,
        scripted_invoker() as gone,
    ):
        await gone.stop()
        await here.talk.deploy(function_dag())
        for invoker in (full, gone, free):
            await here.register(invoker.url, concurrency=1)
        for start in range(0, 60, 10):
            await here.talk.trigger(start, start + 9)
        tasks = {each.task_id for each in await free.until_taken(6)}
        assert tasks == set(await here.talk.tasks("work", "Running"))
        assert {(await here.talk.task(task_id))["failures"] for task_id in tasks} == {0}
        assert full.asked, "it was asked, and somebody else took what it couldn't"
        await gone.start()


async def test_work_is_spread_over_invokers(ctx: StepContext) -> None:
    async with replica(ctx) as here, scripted_invoker() as one, scripted_invoker() as two:
        await here.talk.deploy(function_dag())
        for invoker in (one, two):
            await here.register(invoker.url)
        for start in range(0, 100, 10):
            await here.talk.trigger(start, start + 9)
        await until(lambda: both_took(one, two, 10))
        assert min(len(one.taken), len(two.taken)) >= 3


async def both_took(one: ScriptedInvoker, two: ScriptedInvoker, count: int) -> bool:
    return len(one.taken) + len(two.taken) == count


async def test_two_replicas_hand_each_attempt_over_once(ctx: StepContext, pool: asyncpg.Pool) -> None:
    """They share the database and nothing else; answers get lost now and then, and slots run out."""
    other = replace(ctx, db=Database(pool), definitions=JobDefinitions())
    script = [202, 429, 202, "lose", 202, 503, 429, 202, "lose"]
    async with replica(ctx) as here, replica(other) as there, scripted_invoker(*script) as invoker:
        await here.talk.deploy(function_dag(max_attempts=20))
        await here.register(invoker.url, concurrency=3)
        for start in range(0, 300, 10):
            await (here if start % 20 else there).talk.trigger(start, start + 9)
        await until(lambda: all_running(here, there, 30), patience=60.0)
        assert max(invoker.attempts_taken.values()) == 1
        tasks = {each.task_id for each in invoker.taken}
        assert len(tasks) == 30
        assert await here.talk.tasks("work", "Failed") == []


async def all_running(here: Replica, there: Replica, count: int) -> bool:
    running = await here.talk.tasks("work", "Running")
    return len(running) == count and await idle(here) and await idle(there)


async def test_a_dispatcher_that_stops_releases_what_it_has_in_hand(ctx: StepContext) -> None:
    async with scripted_invoker(then=429) as invoker:
        async with replica(ctx, door=60.0) as here:
            await here.register(invoker.url)
            task_id = await one_task(here.talk)
            await invoker.until_asked(2)
        talk = Conversation(ctx)
        row = await talk.task(task_id)
        assert (row["status"], row["failures"], row["last_outcome"]) == ("Queued", 0, "Released")
        assert set(await talk.due_wakes()) == {task_id}


async def test_a_dispatcher_that_stops_during_a_call_gives_the_attempt_up(ctx: StepContext) -> None:
    async with scripted_invoker("hang") as invoker:
        async with replica(ctx, answer=60.0) as here:
            await here.register(invoker.url)
            task_id = await one_task(here.talk)
            await invoker.until_taken(1)
        [attempt] = await Conversation(ctx).attempts(task_id)
        assert attempt["outcome"] == "Failed"
        assert "stopped before the invoker answered" in attempt["error_message"]


async def test_a_canceled_task_is_not_handed_over(ctx: StepContext) -> None:
    async with replica(ctx) as here:
        task_id = await one_task(here.talk)
        await until(lambda: held(ctx, task_id))
        await here.talk.cancel(task_id)
        async with scripted_invoker() as invoker:
            await here.register(invoker.url)
            await until(lambda: nothing_waits(here.talk))
            assert invoker.asked == []
