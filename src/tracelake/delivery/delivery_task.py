"""One leased delivery: three loops around the messages at hand.

One makes messages of new rows; one sends what is due, many at a time, and reports; one asks now and then for what
people replayed, for the chain's finality and for a new definition. A try is recorded at the Dispatcher before it
begins and when it has ended, both in one call for as many as there are. Every call carries the lease's fence, so a
process that lost its lease records nothing; what it was sending is sent again by its successor, under the same id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from tracelake.contracts.deliveries import (
    MAX_ERROR_CHARS,
    MAX_OUTCOMES,
    MAX_ROWS,
    MAX_WAITING,
    DeliveryConfig,
    DeliveryLoad,
    DeliveryLoaded,
    DeliveryMessage,
    DeliveryPlan,
    DeliveryPlanned,
    DeliveryReport,
    DeliveryReported,
    FinalityWait,
    TryOutcome,
)
from tracelake.delivery.outgoing import Outgoing
from tracelake.delivery.rows import ChainBlocks, RowPlanner, RowPortion, RowReader, RowSignals
from tracelake.delivery.targets import NotConfigured, Receiver, TargetParts, TryResult, open_target
from tracelake.domain.backoff import Backoff, spread
from tracelake.domain.errors import Conflict, Invalid, TracelakeError
from tracelake.domain.operators.catalog import DELIVERY
from tracelake.leases.held_task import HeldTask, Stop
from tracelake.leases.platform_task import PlatformTask
from tracelake.leases.until_answered import until_answered
from tracelake.settings import Secret

_OUTAGE_BACKOFF = Backoff(0.1, 5.0)
_BACKOFF = Backoff(5.0, 1800.0)
_LONG = 3600.0
T = TypeVar("T")


class DeliveryDispatcher(Protocol):
    """The Dispatcher's calls that a delivery uses. Each is repeated until it is answered."""

    async def load_delivery(self, request: DeliveryLoad) -> DeliveryLoaded: ...

    async def plan_delivery(self, request: DeliveryPlan) -> DeliveryPlanned: ...

    async def report_delivery(self, request: DeliveryReport) -> DeliveryReported: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How often a message is tried, and the pauses between; ``gone_seconds`` holds a delivery whose receiver wants
    no more until its pause is known here."""

    tries: int = 12
    backoff: Backoff = _BACKOFF
    gone_seconds: float = 30.0
    look_seconds: float = 2.0
    refresh_seconds: float = 2.0
    configured_seconds: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryParts:
    """The connections that all deliveries of a process share. ``in_flight`` bounds the tries of one delivery at a
    time."""

    client: DeliveryDispatcher
    data_read_dsn: Secret
    signals: RowSignals
    targets: TargetParts
    on_progress: Callable[[HeldTask], None]
    patience: Patience = field(default_factory=Patience)
    in_flight: int = 64


class DeliveryTask(PlatformTask):
    name = "delivery"

    def __init__(self, held: HeldTask, parts: DeliveryParts) -> None:
        super().__init__(held)
        self._parts = parts
        self._patience = parts.patience
        self._loop = asyncio.get_running_loop()
        self._outgoing = Outgoing()
        self._outcomes: list[TryOutcome] = []
        self._sends: set[asyncio.Task[None]] = set()
        self._rows_came = asyncio.Event()
        self._stirred = asyncio.Event()
        self._finishing = False
        self._paused = held.paused
        self._hold_until = 0.0
        self._resumed_at: datetime | None = None
        self._chains = ChainBlocks()
        self._position = 0
        self._waits: dict[str, FinalityWait] = {}
        self._trouble: str | None = None
        self._blocked: str | None = None
        """Why the last message wasn't tried: what is seen only when its receiver's name was resolved."""
        self._waits_for: str | None = None
        self._counts = {"sent": 0, "failed": 0, "dead": 0}

    def finish(self) -> bool:
        """Tries that have begun are still reported."""
        self._finishing = True
        self._stir()
        return True

    def hold(self, paused: bool) -> None:
        self._paused = paused
        self._stir()

    def _stir(self) -> None:
        self._stirred.set()
        self._rows_came.set()

    async def work(self) -> None:
        config = _config(self.held)
        target = open_target(config, self._parts.targets)
        reader = RowReader(self._parts.data_read_dsn)
        self._is_configured(target)
        begun = await self._load(begin=True)
        self._position = begun.position
        self._waits = {each.producer: each for each in begun.waits}
        unfollow = self._parts.signals.follow(config.dataset_version, self._rows_came)
        self._rows_came.set()
        self.held.log.info("delivery_begins", waiting=len(self._outgoing), position=self._position)
        loops = [
            asyncio.create_task(each)
            for each in (self._plan(config, reader), self._send(target), self._refresh(config, target))
        ]
        try:
            # A loop that fails ends them all. Sending ends last, once what is under way was reported.
            pending, sending = set(loops), loops[1]
            while not sending.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for loop in done:
                    loop.result()
        finally:
            unfollow()
            for loop in (*loops, *self._sends):
                loop.cancel()
            await asyncio.gather(*loops, *self._sends, return_exceptions=True)
            await reader.close()
            self._show()

    async def _load(self, *, begin: bool = False) -> DeliveryLoaded:
        held = self.held
        # Not at once: what ends an attempt mostly does so at its beginning, and is shown until it doesn't.
        trouble = self._trouble or self._blocked
        ready = not begin and trouble is None and self._waits_for is None
        limit = max(0, self._room)
        # What it lacks follows from what it has, also after an answer that was lost.
        holds = self._outgoing.message_ids() if limit else []
        found = await self._parts.client.load_delivery(
            DeliveryLoad(held.task_id, held.attempt, held.lease_token, begin, limit, trouble, ready, holds)
        )
        if found.finalized != self._chains.finalized:
            self._rows_came.set()
        self._chains = ChainBlocks(found.finalized, found.heads)
        if found.resumed_at != self._resumed_at:
            # A person wants another try now. The pause alone doesn't say so: a short one isn't noticed here.
            self._resumed_at = found.resumed_at
            self._hold_until = 0.0
            self._outgoing.hurry(self._loop.time())
            self._stirred.set()
        if found.messages:
            self._outgoing.add(found.messages, self._loop.time())
            self._stirred.set()
        return found

    async def _refresh(self, config: DeliveryConfig, target: Receiver) -> None:
        while not self._finishing:
            await asyncio.sleep(self._patience.refresh_seconds)
            # Also while there is nothing to send: people see what is missing before the first row comes.
            self._is_configured(target)
            if not self._outgoing:
                # What can't be looked at again isn't shown for ever.
                self._blocked = None
            found = await self._load()
            if found.definition != config.definition:
                # Released: the next claim brings the new definition.
                self.held.stop(Stop.OUTDATED)

    async def _plan(self, config: DeliveryConfig, reader: RowReader) -> None:
        planner = RowPlanner(config)
        while not self._finishing:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._patience.look_seconds):
                    await self._rows_came.wait()
            # Before the look: a signal that comes during it may be about a row that it no longer sees.
            self._rows_came.clear()
            while not self._finishing and not self._paused and self._room > 0:
                if not await self._read_round(planner, reader, config):
                    break

    async def _read_round(self, planner: RowPlanner, reader: RowReader, config: DeliveryConfig) -> bool:
        """A portion of each producer that waits, and then one of what is new; whether there is more at once."""
        more = False
        for producer in (*sorted(self._waits), None):
            limit = min(MAX_ROWS, self._room)
            if self._finishing or self._paused or limit <= 0:
                return False
            if producer is None:
                read = partial(self._read, planner, reader, config, limit)
            else:
                read = partial(self._read_waiting, planner, reader, config, limit, self._waits[producer])
            portion, has_more = await self._while_away(read)
            more = more or has_more
            if (portion.upto, portion.waits) != (self._position, self._waits) and not await self._keep(
                portion
            ):
                return False
        return more

    @property
    def _room(self) -> int:
        return MAX_WAITING - len(self._outgoing)

    async def _read(
        self, planner: RowPlanner, reader: RowReader, config: DeliveryConfig, limit: int
    ) -> tuple[RowPortion, bool]:
        portion = RowPortion(self._position, dict(self._waits))
        async with aclosing(reader.after(config.dataset_version, self._position, limit)) as rows:
            async for row in rows:
                if not planner.add(portion, row, self._chains) or portion.is_full:
                    break
        return portion, portion.count == limit or portion.is_full

    async def _read_waiting(
        self, planner: RowPlanner, reader: RowReader, config: DeliveryConfig, limit: int, wait: FinalityWait
    ) -> tuple[RowPortion, bool]:
        """Rows of one producer, from where they wait to the position that the others have reached."""
        producer = wait.producer
        others = {name: each for name, each in self._waits.items() if name != producer}
        portion = RowPortion(wait.position, others)
        if wait.block is not None and wait.block > self._chains.finalized.get(producer, wait.block):
            # Mostly it is still the first one: another can be only if that was retracted or written anew.
            limit = 1
        rows = reader.after(
            config.dataset_version, wait.position, limit, producer=producer, upto=self._position
        )
        async with aclosing(rows):
            async for row in rows:
                planner.add(portion, row, self._chains)
                if producer in portion.waits or portion.is_full:
                    break
        has_more = producer not in portion.waits and (portion.count == limit or portion.is_full)
        if has_more:
            portion.waits[producer] = FinalityWait(producer, portion.upto)
        portion.upto = self._position
        return portion, has_more

    async def _keep(self, portion: RowPortion) -> bool:
        """Whether the rows are messages now; if not, this attempt ends."""
        held = self.held
        request = DeliveryPlan(
            held.task_id,
            held.attempt,
            held.lease_token,
            self._position,
            portion.upto,
            portion.rows,
            portion.gone,
            _sorted(self._waits),
            _sorted(portion.waits),
        )
        try:
            planned = await self._parts.client.plan_delivery(request)
        except Conflict as error:
            if error.reason == "PositionMoved":
                # The answer to this very request was lost, mostly: begin again with what the Dispatcher has.
                held.stop(Stop.OUTDATED)
                return False
            raise
        self._position, self._waits = portion.upto, portion.waits
        self._outgoing.drop(planned.dropped)
        self._outgoing.add(planned.messages, self._loop.time())
        self._stirred.set()
        self._show()
        return True

    async def _while_away(self, action: Callable[[], Awaitable[T]]) -> T:
        def away(error: TracelakeError) -> None:
            if self._waits_for is None:
                self.held.log.warning("delivery_waits", reason=error.reason, error=error.message)
            self._waits_for = error.message
            self._show()

        def back() -> None:
            if self._waits_for is not None:
                self._waits_for = None
                self._show()

        return await until_answered(action, _OUTAGE_BACKOFF, on_away=away, on_back=back)

    async def _send(self, target: Receiver) -> None:
        while True:
            self._stirred.clear()
            outcomes, self._outcomes = self._outcomes[:MAX_OUTCOMES], self._outcomes[MAX_OUTCOMES:]
            starting = self._take(target)
            if outcomes or starting:
                await self._report(target, outcomes, starting)
            elif self._finishing and not self._sends:
                return
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause()):
                        await self._stirred.wait()

    def _take(self, target: Receiver) -> list[DeliveryMessage]:
        now = self._loop.time()
        if self._finishing or self._paused or now < self._hold_until:
            return []
        free = min(self._free, MAX_OUTCOMES)
        due = self._outgoing.next_due()
        if free <= 0 or due is None or due > now or not self._is_configured(target):
            return []
        return self._outgoing.take(free, now)

    @property
    def _free(self) -> int:
        """Tries that may begin beside those under way."""
        # One is enough to see whether an address can be used by now.
        most = self._parts.in_flight if self._blocked is None else 1
        return most - self._outgoing.under_way

    def _is_configured(self, target: Receiver) -> bool:
        try:
            target.check()
        except NotConfigured as error:
            if self._trouble is None:
                self.held.log.error("delivery_not_configured", error=str(error))
            self._trouble = str(error)
            self._hold_until = self._loop.time() + self._patience.configured_seconds
            self._show()
            return False
        self._trouble = None
        return True

    def _pause(self) -> float:
        """Until the next message is due; free slots, signals and resumes stir it before."""
        if self._finishing or self._paused or self._free <= 0:
            return _LONG
        due = self._outgoing.next_due()
        if due is None:
            return _LONG
        return max(0.0, max(due, self._hold_until) - self._loop.time())

    async def _report(
        self, target: Receiver, outcomes: list[TryOutcome], starting: list[DeliveryMessage]
    ) -> None:
        held = self.held
        answer = await self._parts.client.report_delivery(
            DeliveryReport(
                held.task_id,
                held.attempt,
                held.lease_token,
                outcomes,
                [message.message_id for message in starting],
            )
        )
        self._outgoing.drop(answer.dropped)
        # Once for all of them: progress that isn't sent yet is only replaced.
        self._show()
        started = set(answer.started)
        if answer.paused:
            # The heartbeat brings the pause, and its end; until then this is asked again now and then.
            self._hold_until = max(self._hold_until, self._loop.time() + self._patience.refresh_seconds)
        for message in starting:
            if answer.paused:
                self._outgoing.again(message.message_id, self._loop.time(), counts=False)
                continue
            if message.message_id not in started:
                # Retracted or removed meanwhile.
                self._outgoing.done(message.message_id)
                continue
            send = asyncio.create_task(self._try(target, message))
            self._sends.add(send)
            send.add_done_callback(self._sends.discard)

    async def _try(self, target: Receiver, message: DeliveryMessage) -> None:
        try:
            result = await target.send(message)
        except NotConfigured as error:
            result = TryResult("blocked", error=str(error)[:MAX_ERROR_CHARS])
        except Exception as error:
            # One message must not end the others; its own tries are counted.
            self.held.log.exception("delivery_try_failed", message_id=message.message_id)
            result = TryResult(
                "failed", in_doubt=True, error=f"{type(error).__name__} in the delivery process"
            )
        self._outcomes.append(self._judge(message, result))
        self._stirred.set()

    def _judge(self, message: DeliveryMessage, result: TryResult) -> TryOutcome:
        now = self._loop.time()
        tries = self._outgoing.tries(message.message_id) + 1
        verdict, delay = result.result, 0.0
        if verdict == "failed" and tries >= self._patience.tries:
            verdict = "dead"
        if verdict == "blocked":
            delay = self._patience.configured_seconds
            self._hold_until = max(self._hold_until, now + delay)
        self._blocked = result.error if verdict == "blocked" else None
        if verdict == "gone":
            delay = self._patience.gone_seconds
            self._hold_until = max(self._hold_until, now + delay)
        elif verdict == "failed":
            delay = max(self._patience.backoff.delay(tries, jitter=spread()), result.hold_seconds)
            self._hold_until = max(self._hold_until, now + result.hold_seconds)
        if verdict in ("sent", "dead"):
            self._outgoing.done(message.message_id)
            self._counts[verdict] += 1
        elif verdict == "blocked":
            self._outgoing.again(message.message_id, now + delay, counts=False)
        else:
            self._outgoing.again(message.message_id, now + delay)
            self._counts["failed"] += 1
        if verdict != "sent" or result.error is not None:
            self.held.log.warning(
                "delivery_try", message_id=message.message_id, tries=tries, result=verdict, error=result.error
            )
        return TryOutcome(message.message_id, verdict, result.in_doubt, result.status, result.error, delay)

    def _show(self) -> None:
        waits = self._trouble or self._blocked or self._waits_for or _shown_waits(self._waits)
        self.held.progressed(
            {
                **self._counts,
                "waiting": len(self._outgoing),
                "position": self._position,
                **({} if waits is None else {"waits_for": waits}),
            }
        )
        self._parts.on_progress(self.held)


def _sorted(waits: Mapping[str, FinalityWait]) -> list[FinalityWait]:
    return [waits[producer] for producer in sorted(waits)]


def _shown_waits(waits: Mapping[str, FinalityWait]) -> str | None:
    found = [f"block {each.block} of {each.producer}" for each in _sorted(waits) if each.block is not None]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{found[0]}{more}" if found else None


def _config(held: HeldTask) -> DeliveryConfig:
    if held.payload.operator != DELIVERY:
        raise Invalid("UnknownOperator", f"a delivery process runs {DELIVERY}, not {held.payload.operator!r}")
    try:
        return msgspec.convert(held.payload.config, DeliveryConfig)
    except msgspec.ValidationError as error:
        raise Invalid("InvalidConfig", f"the task's config isn't a delivery's: {error}") from None
