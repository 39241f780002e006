"""Faults of a soak: of the chain, of one way to the node, of a follower's commits, and of the processes.

The chain grows, is reorganised, loses blocks, stays short for a while and grows again. Final blocks stay: that
is the meaning of finality, and a follower that sees it violated stops for good. A fault that needs the chain to
do something at a certain moment holds off the random events for that long (``ChainFaults.held``).

One of the two ways to the node lies, hangs, lags and breaks off, a few answers at a time.

A follower is hit at the worst moments: when its rows are committed and the event is pending, and when another
one has taken over and it still has rows to commit. The chain is made to reorganise at that moment, and to go on
until that is final; so a lost invalidation, or rows of an abandoned fork, would stay in the tables to the end.

Processes are killed and stopped, one after the other.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import psycopg
from psycopg import sql

from tests.support.anvil import Anvil, AnvilChain
from tests.support.chain_soak.stack import Attempt, SoakStack, within
from tests.support.faulty_rpc import Fault, FaultyRpc, Lie
from tracelake.postgres import sqlfiles

_WEIGHTS = {"grow": 12, "grow_empty": 2, "reorg": 3, "shrink": 2}
_STAYS_SHORT = 4
_VALUES = {Fault.LAG: 3, Fault.AHEAD: 2, Fault.MAX_BATCH: 2, Fault.TOO_MANY_REQUESTS: 1}
_FOR_GOOD = {Fault.FORBIDDEN, Fault.NO_METHOD, Fault.OTHER_CHAIN, Fault.BATCH_REFUSED, Fault.RANGE_LIMIT}
"""Faults that a pool remembers about an endpoint, since they aren't passing."""
_STOPPING = {Fault.OTHER_TYPE, Fault.FIELD_GONE, Fault.FORGED}
"""Faults that stop a follower, or need a value of their own."""
FAULTS = tuple(fault for fault in Fault if fault not in _FOR_GOOD | _STOPPING)
_ONE_IN = 3
_MOST_TIMES = 4
PATIENCE = 20.0
_IN_STEP_SECONDS = 10.0
_COMMIT_SECONDS = 8.0
_REFUSED_SECONDS = 2.0
_DEPTH = 9
_ZOMBIE_BLOCKS = 2
_SQL = sqlfiles.load("tests.support.chain_soak", "commit_mishaps.sql")
LEASE_SECONDS = 5
_TRIES = 3
_PAUSES = (0.5, 4.0)
Say = Callable[[str], None]
ProcessFault = Callable[[], bool]


class ChainFaults:
    def __init__(self, anvil: Anvil, seed: int, finality: int) -> None:
        self._anvil = anvil
        self._dice = random.Random(seed)
        self._finality = finality
        self._chain = AnvilChain(anvil, seed)
        self._highest = self._chain.grow(finality)
        self._quiet = 0
        self._held = threading.Lock()
        self.seen: Counter[str] = Counter()

    def next(self) -> None:
        """Cause the next event of the chain, unless it is ``held``."""
        if not self._held.acquire(blocking=False):
            return
        try:
            self._happen()
        finally:
            self._held.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep random events away from the chain inside of the block."""
        with self._held:
            yield

    @property
    def head(self) -> int:
        return self._anvil.head

    def grow(self, blocks: int) -> int:
        self._highest = max(self._highest, self._chain.grow(blocks))
        return self._highest

    def reorg(self, depth: int) -> bool:
        """Replace ``depth`` blocks, or as many as aren't final; False if there are none."""
        if (depth := min(depth, self._deepest)) < 1:
            return False
        self.seen["reorg"] += 1
        self.seen["deepest"] = max(self.seen["deepest"], depth)
        self._chain.reorg(depth)
        return True

    def add_dead_letter(self) -> None:
        """Make all blocks final, so that no later reorg can repair what an earlier one broke."""
        self.grow(self._finality + 1)

    def settle(self, blocks: int) -> int:
        """Grow to ``blocks`` above the highest block ever, so that those become final; return the head."""
        return self.grow(self._highest - self._anvil.head + blocks)

    @property
    def _deepest(self) -> int:
        # The first block must stay as well: it has the contracts.
        return self._anvil.head - max(1, self._highest - self._finality)

    def _happen(self) -> None:
        if self._quiet:
            self._quiet -= 1
            return
        [name] = self._dice.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))
        deepest = self._deepest
        if name in ("reorg", "shrink") and deepest >= 1:
            depth = self._dice.randint(1, deepest)
            if name == "reorg":
                self.reorg(depth)
            else:
                self._anvil.rollback(depth)
                self._quiet = self._dice.choice((0, _STAYS_SHORT))
                self.seen["shrink"] += 1
        elif name == "grow_empty":
            self._highest = max(self._highest, self._anvil.mine(self._dice.randint(1, 4)))
            self.seen["grow_empty"] += 1
        else:
            self.grow(self._dice.randint(1, 3))
            self.seen["grow"] += 1


class EndpointFaults:
    def __init__(self, endpoint: FaultyRpc, seed: int) -> None:
        self._endpoint = endpoint
        self._dice = random.Random(seed)
        self._lies: list[Lie] = []

    def next(self) -> None:
        if self._dice.randrange(_ONE_IN):
            return
        fault = self._dice.choice(FAULTS)
        times = self._dice.randint(1, _MOST_TIMES)
        self._lies.append(self._endpoint.lie(fault, times=times, value=_VALUES.get(fault)))

    def settle(self) -> None:
        self._endpoint.honest()

    @property
    def wrong_answers(self) -> int:
        return sum(lie.applied for lie in self._lies)


class CommitFaults:
    """Faults at a follower's commit. Each method returns whether the fault had its effect."""

    def __init__(self, stack: SoakStack, chain: ChainFaults) -> None:
        self._stack = stack
        self._chain = chain

    def killed_between_commit_and_event(self) -> bool:
        """Kill a follower whose rows are committed and whose event is pending, and the Dispatcher as well."""
        return self._killed_after_its_commit(signal.SIGKILL)

    def killed_before_its_event_was_answered(self) -> bool:
        """Kill a follower that has sent its event and not received the answer."""
        return self._killed_after_its_commit(signal.SIGCONT)

    def stopped_past_its_lease(self) -> bool:
        """Stop a worker while its operator stages rows. A reorg replaces their blocks and another worker takes
        over; then the first one continues, and tries to commit them."""
        running = self.committing_follower()
        if running is None:
            return False
        refused = self._stack.commits_refused()
        with standing_still(running.pid):
            with self._chain.held():
                self._chain.grow(_ZOMBIE_BLOCKS)
                within(_COMMIT_SECONDS, self._with_data(lambda data: _has_staged(data, running)))
                self._chain.reorg(_ZOMBIE_BLOCKS + 1)
                self._chain.add_dead_letter()
            if within(2 * PATIENCE, lambda: self._successor(running)) is None:
                return False
        return within(_REFUSED_SECONDS, lambda: self._stack.commits_refused() > refused) is not None

    def committing_follower(self) -> Attempt | None:
        """A follower that has just committed rows, and is about to do so again."""
        seen: dict[int, int] = {}

        def commits() -> Attempt | None:
            running = self._stack.follower()
            return (
                running if running and seen.setdefault(running.number, running.tip) != running.tip else None
            )

        return within(PATIENCE, commits)

    def _killed_after_its_commit(self, then: signal.Signals) -> bool:
        """Kill a follower after its commit. While the Dispatcher is stopped, its event stays pending."""
        running, dispatcher = self.committing_follower(), self._stack.pid("dispatcher")
        if running is None or dispatcher is None:
            return False
        with self._chain.held():
            # Dependents must have read the rows that are about to be invalidated.
            within(_IN_STEP_SECONDS, self._all_are_in_step)
            with standing_still(dispatcher):
                self._chain.reorg(_DEPTH)
                pending = within(_COMMIT_SECONDS, self._with_data(lambda data: _has_pending(data, running)))
                send(running.pid, signal.SIGKILL)
                send(dispatcher, then)
            self._chain.add_dead_letter()
        return pending is not None

    def _all_are_in_step(self) -> bool:
        head = self._chain.head
        running = self._stack.follower()
        return running is not None and running.tip == head and self._stack.derived_upto() > head - _DEPTH // 2

    def _successor(self, before: Attempt) -> Attempt | None:
        running = self._stack.follower()
        return running if running is not None and running.number > before.number else None

    def _with_data(self, look: Callable[[psycopg.Connection], bool]) -> Callable[[], bool]:
        def found() -> bool:
            with suppress(psycopg.Error), psycopg.connect(self._stack.data_dsn, connect_timeout=2) as data:
                return look(data)
            return False

        return found


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pid, signal.SIGCONT)


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False if the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _has_pending(data: psycopg.Connection, running: Attempt) -> bool:
    row = data.execute(_SQL.pending_invalidation, (running.task_id,)).fetchone()
    return row is not None and bool(row[0])


def _has_staged(data: psycopg.Connection, running: Attempt) -> bool:
    for (name,) in data.execute(_SQL.staging_tables, (running.task_id.hex,)).fetchall():
        statement = sql.SQL(_SQL.has_rows).format(table=sql.Identifier("staging", name))
        if data.execute(statement).fetchone() == (True,):
            return True
    return False


class ProcessFaults:
    """Kills and stops parts of a running stack, which restarts them. Each fault waits until there is a process
    to hit, and counts if it did."""

    def __init__(self, stack: SoakStack, chain: ChainFaults, seed: int, say: Say) -> None:
        self._stack = stack
        self._at_commits = CommitFaults(stack, chain)
        self._dice = random.Random(seed)
        self._say = say
        self._over = threading.Event()
        self.seen: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        """Cause faults for ``seconds``, and until every kind has happened once."""
        began = time.monotonic()
        for number in count(1):
            for fault in self._round(number):
                if number > 1 and time.monotonic() - began >= seconds:
                    return
                for _ in range(_TRIES if number == 1 else 1):
                    happened = self._have(fault, time.monotonic() - began)
                    if self._over.wait(self._dice.uniform(*_PAUSES)):
                        return
                    if happened:
                        break

    def give_up(self) -> None:
        """End after the current fault."""
        self._over.set()

    def _have(self, fault: ProcessFault, at: float) -> bool:
        name = fault.__name__
        self._stack.keep_second_worker()
        happened = fault()
        self.seen[name] += happened
        self._say(f"{at:5.1f} s  {name}{'' if happened else ': missed'}")
        return happened

    def _round(self, number: int) -> list[ProcessFault]:
        """Faults in random order, those of Spark early, since it is slow to restart. The first round is the
        shortest."""
        slow = [self.spark_server_killed, self.spark_worker_killed]
        quick = [
            self.follower_killed,
            self.data_database_killed,
            self.dispatcher_killed,
            self._at_commits.killed_between_commit_and_event,
            self._at_commits.killed_before_its_event_was_answered,
            self._at_commits.stopped_past_its_lease,
        ]
        if number > 1:
            quick += [self.state_database_killed, self.spark_worker_stopped]
        self._dice.shuffle(quick)
        return [slow[0], *quick[:2], slow[1], *quick[2:]]

    def follower_killed(self) -> bool:
        running = self._at_commits.committing_follower()
        return running is not None and send(running.pid, signal.SIGKILL)

    def spark_worker_killed(self) -> bool:
        return self._kill("worker-ecs_spark")

    def data_database_killed(self) -> bool:
        return self._at_commits.committing_follower() is not None and self._kill("postgres-data")

    def dispatcher_killed(self) -> bool:
        return self._at_commits.committing_follower() is not None and self._kill("dispatcher")

    def state_database_killed(self) -> bool:
        return self._kill("postgres-state")

    def spark_server_killed(self) -> bool:
        pid = within(PATIENCE, self._java)
        return pid is not None and send(pid, signal.SIGKILL)

    def spark_worker_stopped(self) -> bool:
        """Stop the only Spark worker past its leases: it finds its own tasks again, or their successors."""
        pid = within(PATIENCE, lambda: self._stack.pid("worker-ecs_spark"))
        if pid is None:
            return False
        with standing_still(pid):
            # A plain sleep: the time that passes is the fault.
            time.sleep(2 * LEASE_SECONDS)
        return True

    def _java(self) -> int | None:
        for pid in self._stack.below("worker-ecs_spark"):
            with suppress(OSError):
                if b"java" in Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]:
                    return pid
        return None

    def _kill(self, part: str) -> bool:
        pid = within(PATIENCE, lambda: self._stack.pid(part))
        return pid is not None and send(pid, signal.SIGKILL)
