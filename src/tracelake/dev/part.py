"""What a supervisor keeps running: a part is started, watched and stopped by one thread of its own.

That one thread forks the part's process and lives for as long as the part may: the kernel's parent-death
signal, by which no process outlives the supervisor, is bound to the thread that forked.
"""

from __future__ import annotations

import threading
from typing import Protocol


class Part(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""

    @property
    def alive(self) -> bool: ...

    @property
    def ended(self) -> str:
        """How it ended, once it has: "was killed by SIGKILL"."""

    def start(self, stopping: threading.Event) -> None:
        """Return once it is ready, or soon after ``stopping`` is set; raise when it can't be started.

        Called again after it died.
        """

    def stop(self) -> None:
        """End it within its own patience, leaving no process. Repeatable, also before the first start."""

    def last_words(self) -> tuple[str, ...]:
        """The last lines of its log."""
