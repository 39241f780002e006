"""A real ``tracelake worker`` as a child process that a test may kill, stop, continue and start again.

It is told by its environment where the stack is, and ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tracelake.embedded_postgres import parent_death

_POLL = 0.02


class WorkerProcess:
    def __init__(
        self,
        home: Path,
        *,
        internal_url: str,
        worker_token: str,
        queue_dsn: str,
        object_root: Path,
        runtime: str = "ecs_python",
        name: str = "worker",
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.home = home
        self.name = name
        self.log_file = home / f"{name}.log"
        self._runtime = runtime
        self._options = tuple(options)
        self._ready_file = home / f"{name}.pid"
        self._environment = {
            "TRACELAKE_INTERNAL_URL": internal_url,
            "TRACELAKE_WORKER_TOKEN": worker_token,
            "TRACELAKE_QUEUE_DSN": queue_dsn,
            "TRACELAKE_OBJECT_ROOT": str(object_root),
            **(environment or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, timeout: float = 120.0) -> None:
        """Returns once it takes tasks; raises with the end of the log when the process ends instead."""
        self.launch()
        async with asyncio.timeout(timeout):
            while not self._ready_file.exists():
                if self.exit_code is not None:
                    raise RuntimeError(f"{self.name} ended with {self.exit_code}: {self.log()[-2000:]}")
                await asyncio.sleep(_POLL)

    def launch(self) -> None:
        """Start, and don't wait."""
        self.home.mkdir(parents=True, exist_ok=True)
        self._ready_file.unlink(missing_ok=True)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("TRACELAKE_")}
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv(),
                env={**inherited, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=parent_death.arm(),
            )

    def _argv(self) -> list[str]:
        return [
            *(sys.executable, "-m", "tracelake", "worker", "--runtime", self._runtime),
            *("--home", str(self.home), "--ready-file", str(self._ready_file)),
            *self._options,
        ]

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs, or was never started."""
        return self._process.poll() if self._process is not None else None

    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace") if self.log_file.exists() else ""

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """What it said in its log, or the lines of one event."""
        entries = [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]
        return [entry for entry in entries if name is None or entry["event"] == name]

    async def said(self, event: str, count: int = 1, timeout: float = 60.0) -> list[dict[str, Any]]:
        """Until it has said ``event`` so many times."""
        async with asyncio.timeout(timeout):
            while len(found := self.events(event)) < count:
                assert self.exit_code is None or self.events(event), self.log()[-3000:]
                await asyncio.sleep(_POLL)
            return found

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None, f"{self.name} was never started"
        self._process.send_signal(number)

    async def kill(self) -> None:
        self.send(signal.SIGKILL)
        await self.ended()

    async def ended(self, timeout: float = 60.0) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return await asyncio.to_thread(self._process.wait, timeout)

    async def close(self) -> None:
        """Whatever its state, it is gone afterwards."""
        if self._process is not None and self.exit_code is None:
            await self.kill()
