"""What happens to the processes, one after the other: killed, stopped, and caught at the worst moment."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from tracelake.testing.chain_soak.chain_weather import ChainWeather
from tracelake.testing.chain_soak.commit_mishaps import PATIENCE, CommitMishaps, send, standing_still
from tracelake.testing.chain_soak.stack import SoakStack, within

LEASE_SECONDS = 5
_TRIES = 3
_PAUSES = (0.5, 4.0)

Say = Callable[[str], None]
Mishap = Callable[[], bool]


class ProcessWeather:
    """Acts on the parts of a running stack, which starts again what died. Each mishap waits until there is
    something to hit, and counts if it did."""

    def __init__(self, stack: SoakStack, chain: ChainWeather, seed: int, say: Say) -> None:
        self._stack = stack
        self._at_commits = CommitMishaps(stack, chain)
        self._dice = random.Random(seed)
        self._say = say
        self._over = threading.Event()
        self.seen: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        """For so long, and until every kind has come once."""
        began = time.monotonic()
        for number in count(1):
            for mishap in self._round(number):
                if number > 1 and time.monotonic() - began >= seconds:
                    return
                for _ in range(_TRIES if number == 1 else 1):
                    happened = self._have(mishap, time.monotonic() - began)
                    if self._over.wait(self._dice.uniform(*_PAUSES)):
                        return
                    if happened:
                        break

    def give_up(self) -> None:
        """Nothing further after what is happening now."""
        self._over.set()

    def _have(self, mishap: Mishap, at: float) -> bool:
        name = mishap.__name__
        self._stack.keep_second_worker()
        happened = mishap()
        self.seen[name] += happened
        self._say(f"{at:5.1f} s  {name}{'' if happened else ': missed'}")
        return happened

    def _round(self, number: int) -> list[Mishap]:
        """In some order; Spark takes long to come back, so that what happens to it happens early. The first round
        is the shortest."""
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
        """There is nobody to take over: it finds its own tasks again, or what has become of them."""
        pid = within(PATIENCE, lambda: self._stack.pid("worker-ecs_spark"))
        if pid is None:
            return False
        with standing_still(pid):
            # Not waiting for a condition: that time passes is the mishap.
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
