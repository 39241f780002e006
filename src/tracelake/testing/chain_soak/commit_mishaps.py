"""What happens to a follower at the worst moment: when its rows are committed and nobody has heard of it, and when
another one has taken over and it still has rows to commit.

The chain is made to reorganise at that moment, and to go on until that is final. So an invalidation that got lost,
or rows of a fork that has gone, would stay in the tables to the end.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psycopg
from psycopg import sql

from tracelake import sqlfiles
from tracelake.testing.chain_soak.chain_weather import ChainWeather
from tracelake.testing.chain_soak.stack import Attempt, SoakStack, within

PATIENCE = 20.0
_IN_STEP_SECONDS = 10.0
_COMMIT_SECONDS = 8.0
_REFUSED_SECONDS = 2.0
_DEPTH = 9
_ZOMBIE_BLOCKS = 2
_SQL = sqlfiles.load("tracelake.testing.chain_soak", "commit_mishaps.sql")


class CommitMishaps:
    """Each answers whether it came to what it was meant for."""

    def __init__(self, stack: SoakStack, chain: ChainWeather) -> None:
        self._stack = stack
        self._chain = chain

    def killed_between_commit_and_event(self) -> bool:
        """Its rows are there, and nobody has heard a word of it: who should have is killed as well."""
        return self._killed_after_its_commit(signal.SIGKILL)

    def killed_before_its_event_was_answered(self) -> bool:
        """The Dispatcher hears of the rows, and nobody is there any more to know that it did."""
        return self._killed_after_its_commit(signal.SIGCONT)

    def stopped_past_its_lease(self) -> bool:
        """The worker stands still, its operator goes on and stages rows. The chain changes its mind about them,
        another worker takes over; then the first one wakes up and finds that it is to commit them."""
        running = self.committing_follower()
        if running is None:
            return False
        refused = self._stack.commits_refused()
        with standing_still(running.pid):
            with self._chain.held():
                self._chain.grow(_ZOMBIE_BLOCKS)
                within(_COMMIT_SECONDS, self._with_data(lambda data: _has_staged(data, running)))
                self._chain.reorg(_ZOMBIE_BLOCKS + 1)
                self._chain.bury()
            if within(2 * PATIENCE, lambda: self._successor(running)) is None:
                return False
        return within(_REFUSED_SECONDS, lambda: self._stack.commits_refused() > refused) is not None

    def committing_follower(self) -> Attempt | None:
        """One that has just committed something, and is about to do so again."""
        seen: dict[int, int] = {}

        def commits() -> Attempt | None:
            running = self._stack.follower()
            return (
                running if running and seen.setdefault(running.number, running.tip) != running.tip else None
            )

        return within(PATIENCE, commits)

    def _killed_after_its_commit(self, then: signal.Signals) -> bool:
        """While the Dispatcher stands still, a follower can commit its rows but not say so."""
        running, dispatcher = self.committing_follower(), self._stack.pid("dispatcher")
        if running is None or dispatcher is None:
            return False
        with self._chain.held():
            # Others have read what is about to be taken back.
            within(_IN_STEP_SECONDS, self._everybody_is_in_step)
            with standing_still(dispatcher):
                self._chain.reorg(_DEPTH)
                unsaid = within(_COMMIT_SECONDS, self._with_data(lambda data: _has_unsaid(data, running)))
                send(running.pid, signal.SIGKILL)
                send(dispatcher, then)
            self._chain.bury()
        return unsaid is not None

    def _everybody_is_in_step(self) -> bool:
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
    """Whether there was somebody to get it."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _has_unsaid(data: psycopg.Connection, running: Attempt) -> bool:
    row = data.execute(_SQL.unsaid_invalidation, (running.task_id,)).fetchone()
    return row is not None and bool(row[0])


def _has_staged(data: psycopg.Connection, running: Attempt) -> bool:
    for (name,) in data.execute(_SQL.staging_tables, (running.task_id.hex,)).fetchall():
        statement = sql.SQL(_SQL.has_rows).format(table=sql.Identifier("staging", name))
        if data.execute(statement).fetchone() == (True,):
            return True
    return False
