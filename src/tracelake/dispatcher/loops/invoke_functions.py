"""The ``lambda`` runtime: turns wake-ups into leases and passes the leased attempts to invokers.

A task is claimed only when an invoker can be asked, so tasks that can't run keep waiting without a lease. A wake-up
leaves the outbox when its task was claimed or can't be; until then it is held there, and comes again if this
process dies. When no invoker can be asked at all, wake-ups go back to the outbox, which tries them again after a
while and shows why; an invoker that registers makes them due at once.

An invoker gets as many calls at a time as it has slots. One that had no slot, or couldn't be reached, gets a single
call until it has taken an attempt again: each call holds a lease, and leases that wait for a slot are of no use.
After it couldn't be reached it is left alone for a while, longer each time.

The lease is taken right before the call and lasts for the function's whole timeout and a margin, so that no
heartbeats are needed. Then exactly one of these ends the Dispatcher's part:

- an invoker took it: the function reports by itself, or the lease runs out;
- it was certainly not taken (no invoker listens, no slot came free in time, the process stops): ``Released``, which
  costs the task no attempt;
- the outcome is unknown (a lost answer): ``Failed``. The function may be running; its own report is refused from
  then on, and the retry is another attempt. The same attempt is never passed on twice.

A crash between the claim and the call leaves a lease that runs out.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from uuid import UUID

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from tracelake.contracts.bundles import Invocation
from tracelake.contracts.dispatcher_api import ClaimRequest, CompleteRequest
from tracelake.dispatcher.dispatch import Dispatch, OwnCompletions, until_database_answers
from tracelake.dispatcher.invoker_client import InvokeOutcome, InvokerClient, InvokeResult
from tracelake.dispatcher.runtimes import INVOKE_MARGIN_SECONDS
from tracelake.domain.backoff import Backoff
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.store import functions, outbox
from tracelake.store.db import Database, DeployLock, OutboxEntry
from tracelake.store.functions import InvokerRow

IN_HAND = 64
"""Maximum number of attempts that are being passed to invokers at a time."""
MAX_WAITING = 20_000
LOOK_SECONDS = 1.0
HELD_BACKOFF = Backoff(1.0, 15.0)
"""Waits of a wake-up that no invoker can take; it is never given up, for it hasn't failed."""
_NEVER_GIVEN_UP = 2**31 - 1
Settle = Callable[[Sequence[int]], None]
_AWAY = Backoff(1.0, 15.0)
WORKER_ID = "lambda"
SLOT_SECONDS = INVOKE_MARGIN_SECONDS / 2
"""Time that a lease waits for a slot: the other half of the margin is for the function's last report."""
_SLOT_BACKOFF = Backoff(0.01, 0.25)


log = structlog.get_logger(__name__)


async def refresh_invokers(db: Database, known: Invokers, always_there: Sequence[InvokerRow] = ()) -> None:
    """Update the known invokers; ``always_there`` are configured ones, which don't register themselves."""
    present = await db.run(functions.present_invokers, lock=DeployLock.NONE)
    known.see([*always_there, *present])


class FunctionInvocations:
    """Holds the wake-ups of functions until an invoker can be asked; ``look`` brings ``known`` up to date."""

    def __init__(
        self,
        db: Database,
        known: Invokers,
        look: Callable[[], Awaitable[None]],
        sender: InvocationSender,
        registry: CollectorRegistry,
        *,
        max_bulk_wait: float = 0.0,
    ) -> None:
        """Bulk tasks wait behind others that become ready up to ``max_bulk_wait`` seconds later."""
        self._db = db
        self._sender = sender
        self._max_bulk_wait = max_bulk_wait
        self._invokers = known
        self._look = look
        self._looked_at = float("-inf")
        self._waiting: dict[UUID, tuple[OutboxEntry, Settle]] = {}
        self._turns: dict[UUID, float] = {}
        self._in_hand: dict[UUID, asyncio.Task[None]] = {}
        self._stirred = asyncio.Event()
        waiting = Gauge("tracelake_invocations_waiting", "Tasks that wait for an invoker.", registry=registry)
        waiting.set_function(lambda: len(self._waiting))

    def offer(self, entries: Sequence[OutboxEntry], settle: Settle) -> None:
        """Receive wake-ups. ``settle`` is called with those that are done with; any other stays in the outbox and
        comes again. A task that waits here already needs no second wake-up."""
        now = asyncio.get_running_loop().time()
        for entry in entries:
            # The same entry comes again when its hold in the outbox ends. It isn't settled then: the outbox
            # is the only copy that survives this process. A second entry of the same task is superfluous.
            held = self._waiting.get(entry.task_id) if entry.task_id is not None else None
            if entry.task_id is None or (held is not None and held[0].outbox_id != entry.outbox_id):
                settle([entry.outbox_id])
            elif held is None and len(self._waiting) < MAX_WAITING:
                self._waiting[entry.task_id] = (entry, settle)
                self._turns[entry.task_id] = now + entry.behind(self._max_bulk_wait)
        self._stirred.set()

    async def run(self) -> None:
        """Pass waiting tasks to invokers forever, as far as there are any."""
        while True:
            with suppress(TimeoutError):
                # Invokers that register elsewhere stir nothing
                # here, so waiting tasks look for them by the clock.
                async with asyncio.timeout(LOOK_SECONDS if self._waiting else None):
                    await self._stirred.wait()
            self._stirred.clear()
            try:
                await self._pass()
            except Unavailable as error:
                log.warning("functions wait for the database", error=error.message)
                await asyncio.sleep(LOOK_SECONDS)
            except Exception:
                log.exception("loop failed", loop="invoke functions")
                await asyncio.sleep(LOOK_SECONDS)

    async def drain(self, seconds: float) -> None:
        """Start nothing more. Leases that wait for a slot are released; calls under way get half of the time for
        their answer, and the other half to be given up in order."""
        self._sender.stop()
        # Waiting wake-ups are still in the outbox: another replica, or the next start, finds them there.
        self._waiting.clear()
        self._turns.clear()
        if self._in_hand:
            _, late = await asyncio.wait(self._in_hand.values(), timeout=seconds / 2)
            # A cancelled call ends its attempt, which is another
            # call to the database and needs time of its own.
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=seconds / 2)

    async def _pass(self) -> None:
        if not self._waiting:
            return
        now = asyncio.get_running_loop().time()
        if not len(self._invokers) or now - self._looked_at >= LOOK_SECONDS:
            await self._look()
            self._looked_at = now
        self._begin(now)
        if self._waiting and (why := self._invokers.why_none(now)):
            await self._put_back(why)

    def _begin(self, now: float) -> None:
        for task_id in sorted(self._waiting, key=self._turns.__getitem__):
            if len(self._in_hand) >= IN_HAND:
                return
            # A retry's wake-up may come while the attempt before it is still being ended here.
            if task_id in self._in_hand:
                continue
            invoker = self._invokers.choose(now)
            if invoker is None:
                return
            # No await between the choice and the count of the
            # call, or two tasks would get the same free slot.
            entry, settle = self._waiting.pop(task_id)
            del self._turns[task_id]
            settled = partial(settle, [entry.outbox_id])
            task = asyncio.create_task(self._sender.deliver(task_id, InvokerCall(invoker), settled))
            self._in_hand[task_id] = task
            task.add_done_callback(partial(self._done, task_id))

    def _done(self, task_id: UUID, _: asyncio.Task[None]) -> None:
        del self._in_hand[task_id]
        self._stirred.set()

    async def _put_back(self, why: str) -> None:
        # Swapped before the await: wake-ups that are offered meanwhile must not be dropped with these.
        waiting, self._waiting, self._turns = self._waiting, {}, {}
        ids = [entry.outbox_id for entry, _ in waiting.values()]
        await self._db.run(
            lambda tx: outbox.failed(tx, ids, why, backoff=HELD_BACKOFF, max_tries=_NEVER_GIVEN_UP),
            lock=DeployLock.NONE,
        )
        log.warning("functions can't be invoked", count=len(ids), error=why)


@dataclass(slots=True)
class KnownInvoker:
    """``in_hand`` counts this process's calls to it, not the functions that it runs. Times are the event loop's."""

    url: str
    concurrency: int
    in_hand: int = 0
    full: bool = False
    failures: int = 0
    away_until: float = 0.0
    why_away: str = ""
    asked_at: float = 0.0

    def may_ask(self, now: float) -> bool:
        # A single call finds out whether it takes attempts
        # again; each further one would hold a lease for nothing.
        calls = 1 if self.full or self.failures else self.concurrency
        return now >= self.away_until and self.in_hand < calls

    def answered(self) -> None:
        self.full, self.failures, self.away_until, self.why_away = False, 0, 0.0, ""

    def had_no_slot(self) -> None:
        self.full, self.failures, self.away_until, self.why_away = True, 0, 0.0, ""

    def is_away(self, now: float, why: str) -> None:
        self.failures += 1
        self.away_until = now + _AWAY.delay(self.failures)
        self.why_away = why


class InvokerCall:
    """A call to an invoker, and possibly to another one after it; counted from when the invoker is chosen."""

    def __init__(self, invoker: KnownInvoker) -> None:
        self.invoker = invoker
        invoker.in_hand += 1

    def move(self, other: KnownInvoker) -> None:
        self.end()
        self.invoker = other
        other.in_hand += 1

    def end(self) -> None:
        self.invoker.in_hand -= 1


class Invokers:
    def __init__(self) -> None:
        self._known: dict[str, KnownInvoker] = {}

    def __len__(self) -> int:
        return len(self._known)

    def see(self, present: Sequence[InvokerRow]) -> None:
        """Replace the list of invokers; those that were known before keep their state."""
        # An invoker that is away must not look fresh after each pass, or its backoff would never grow.
        known = {
            row.url: self._known.get(row.url) or KnownInvoker(row.url, row.concurrency) for row in present
        }
        for row in present:
            known[row.url].concurrency = row.concurrency
        self._known = known

    def choose(self, now: float) -> KnownInvoker | None:
        """The least loaded one that may be asked; of several, the one that was asked longest ago."""
        free = [invoker for invoker in self._known.values() if invoker.may_ask(now)]
        if not free:
            return None
        chosen = min(free, key=lambda each: (each.full, each.in_hand / each.concurrency, each.asked_at))
        chosen.asked_at = now
        return chosen

    def choose_other(self, than: KnownInvoker, now: float) -> KnownInvoker | None:
        """Another invoker for a lease that ``than`` didn't take, unless it has no slot either."""
        other = self.choose(now)
        return other if other is not None and other is not than and not other.full else None

    def why_none(self, now: float) -> str | None:
        """Why no invoker can be asked for now; None when one may be, as soon as it has a slot."""
        if not self._known:
            return "no invoker is registered; start one with `tracelake worker --runtime lambda`"
        if all(invoker.away_until > now for invoker in self._known.values()):
            return next(iter(self._known.values())).why_away
        return None


class InvocationSender:
    """Leases a task, offers it to invokers, and ends the attempt if none took it.

    ``look`` brings ``invokers`` up to date: one that left is often followed by another at once.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        client: InvokerClient,
        invokers: Invokers,
        look: Callable[[], Awaitable[None]],
        registry: CollectorRegistry,
        *,
        slot_seconds: float = SLOT_SECONDS,
    ) -> None:
        self._dispatch = dispatch
        self._client = client
        self._invokers = invokers
        self._look = look
        self._slot_seconds = slot_seconds
        self._stopping = asyncio.Event()
        self._completions = OwnCompletions(dispatch, self._stopping.is_set)
        self._ended = Counter(
            "tracelake_invocations_total",
            "Invocations by outcome.",
            ["outcome"],
            registry=registry,
        )

    def stop(self) -> None:
        """Release leases that wait for a slot, and pass no more attempts on."""
        self._stopping.set()

    async def deliver(self, task_id: UUID, turn: InvokerCall, settled: Callable[[], None]) -> None:
        """``settled`` is called once the task is claimed, or known not to be claimable: its wake-up is used up."""
        try:
            invocation = await self._lease(task_id)
            # Only now: until its task is claimed, the wake-up in the outbox is what survives a crash.
            settled()
            if invocation is not None:
                await self._end(invocation, await self._offer(invocation, turn))
        except TracelakeError as error:
            log.warning("invocation given up", task_id=str(task_id), reason=error.reason, error=error.message)
        except Exception:
            log.exception("invocation crashed", task_id=str(task_id))
        finally:
            turn.end()

    async def _lease(self, task_id: UUID) -> Invocation | None:
        # The key makes a repeated claim get the lease whose answer was lost, instead of AlreadyRunning.
        request = ClaimRequest(task_id, WORKER_ID, secrets.token_hex(8))
        claimed = await until_database_answers(
            lambda: self._dispatch.claim(request), stopping=self._stopping.is_set
        )
        if claimed.status != "Claimed":
            return None
        assert claimed.task is not None
        assert claimed.lease_token is not None
        assert claimed.lease_expires_at is not None
        assert claimed.capability_token is not None
        return Invocation.of(
            claimed.task, claimed.lease_token, claimed.lease_expires_at, claimed.capability_token
        )

    async def _offer(self, invocation: Invocation, turn: InvokerCall) -> InvokeResult:
        """Ask invokers until one took the attempt or may have taken it, or the time for that is over."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._slot_seconds
        backoff = _SLOT_BACKOFF.counter()
        while True:
            if self._stopping.is_set():
                return InvokeResult(
                    InvokeOutcome.FULL, "the Dispatcher was stopped before an invoker took it"
                )
            result = await self._ask(turn, invocation)
            if result.outcome not in (InvokeOutcome.FULL, InvokeOutcome.AWAY):
                return result
            other = self._invokers.choose_other(turn.invoker, loop.time())
            if other is None and result.outcome is InvokeOutcome.AWAY:
                # The invokers known so far will do; the lease is already running.
                with suppress(Unavailable):
                    await self._look()
                other = self._invokers.choose_other(turn.invoker, loop.time())
            if other is not None:
                turn.move(other)
                continue
            pause = backoff.failed()
            # A slot may come free while we wait; an invoker that is away is not worth a held lease.
            if result.outcome is InvokeOutcome.AWAY or loop.time() + pause > until:
                return result
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()

    async def _ask(self, turn: InvokerCall, invocation: Invocation) -> InvokeResult:
        invoker = turn.invoker
        try:
            result = await self._client.invoke(invoker.url, invocation)
        except asyncio.CancelledError:
            # Stopping can wait no longer, and the lease must not be left to run out.
            result = InvokeResult(
                InvokeOutcome.UNKNOWN, "the Dispatcher was stopped before the invoker answered"
            )
        match result.outcome:
            case InvokeOutcome.ACCEPTED | InvokeOutcome.REJECTED:
                invoker.answered()
            case InvokeOutcome.FULL:
                invoker.had_no_slot()
            case InvokeOutcome.AWAY | InvokeOutcome.UNKNOWN:
                invoker.is_away(asyncio.get_running_loop().time(), result.detail)
        return result

    async def _end(self, invocation: Invocation, result: InvokeResult) -> None:
        self._ended.labels(result.outcome.value).inc()
        bound = log.bind(task_id=str(invocation.task_id), attempt=invocation.attempt)
        match result.outcome:
            case InvokeOutcome.ACCEPTED:
                bound.info("function invoked", job=f"{invocation.job.dag_name}/{invocation.job.name}")
                return
            case InvokeOutcome.FULL | InvokeOutcome.AWAY:
                over = CompleteRequest.of(invocation, "Released", result.detail)
            case InvokeOutcome.REJECTED:
                over = CompleteRequest.of(invocation, "Failed", result.detail)
            case InvokeOutcome.UNKNOWN:
                why = f"the invocation's outcome is unknown: {result.detail}"
                over = CompleteRequest.of(invocation, "Failed", why)
        bound.warning("function not invoked", outcome=result.outcome.value, detail=result.detail)
        await self._completions.report(over, bound)
