"""Real Dispatchers, workers, sinks and schedulers as child processes that a test kills, stops and starts again.

A Dispatcher listens on free ports, which change with every start, and its loops run in fractions of a second,
so that a test sees what takes minutes in production. Workers and sinks get the stack's addresses from their
environment. All of them end with the process that started them.
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

from tests.support.databases import PASSWORD
from tracelake.dev.handle import own_file
from tracelake.kernel import parent_death_hook

SHORT_LOOPS = {
    "TRACELAKE_REAP_SECONDS": "0.2",
    "TRACELAKE_REWAKE_SECONDS": "0.5",
    "TRACELAKE_REWAKE_AFTER_SECONDS": "2",
    "TRACELAKE_RECONCILE_SECONDS": "1",
    "TRACELAKE_WATCH_SOURCES_SECONDS": "1",
    "TRACELAKE_OUTBOX_SWEEP_SECONDS": "0.2",
    "TRACELAKE_OBSERVE_SECONDS": "0.5",
    "TRACELAKE_INSTALLATION_SECONDS": "0.3",
}
_POLL = 0.02


class DispatcherProcess:
    """Replicas may share a ``home``; each has a ``name``, for its log and ready file, unless it publishes its
    address ``in_home``, as one does that people start."""

    def __init__(
        self,
        home: Path,
        *,
        state_dsn: str,
        queue_dsn: str,
        name: str = "dispatcher",
        environment: Mapping[str, str] | None = None,
        in_home: bool = False,
    ) -> None:
        self.name = name
        self._in_home = in_home
        self.log_file = home / f"{name}.log"
        self._home = home
        self._ready_file = home / f"{name}.ready.json"
        self._environment = {
            "TRACELAKE_STATE_DSN": state_dsn,
            "TRACELAKE_QUEUE_DSN": queue_dsn,
            # Roles belong to the server, which several installations of a test run share.
            "TRACELAKE_QUEUE_PASSWORD": PASSWORD.reveal(),
            "TRACELAKE_CATALOG_PASSWORD": PASSWORD.reveal(),
            "TRACELAKE_AUDIT_PASSWORD": PASSWORD.reveal(),
            **SHORT_LOOPS,
            **(environment or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: dict[str, Any] = {}

    async def start(self, timeout: float = 60.0) -> None:
        """Returns once both ports answer; raises with the end of the log when the process ends instead."""
        self.launch()
        async with asyncio.timeout(timeout):
            while not self._ready_file.exists():
                if self.exit_code is not None:
                    raise RuntimeError(f"{self.name} ended with {self.exit_code}: {self.log()[-2000:]}")
                await asyncio.sleep(_POLL)
        self._ready = json.loads(self._ready_file.read_bytes())

    def launch(self) -> None:
        """Start, and don't wait."""
        assert self.exit_code is not None or self._process is None, f"{self.name} runs already"
        self._home.mkdir(parents=True, exist_ok=True)
        if not self._in_home:
            self._ready_file.unlink(missing_ok=True)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("TRACELAKE_")}
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *("-m", "tracelake", "dispatcher", "--home", str(self._home)),
                    *("--user-port", "0", "--internal-port", "0"),
                    *(() if self._in_home else ("--ready-file", str(self._ready_file))),
                ],
                env={**inherited, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=parent_death_hook(signal.SIGINT),
            )
        if self._in_home:
            self._ready_file = own_file(self._home, self.pid)

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def user_url(self) -> str:
        return str(self._ready["user_url"])

    @property
    def internal_url(self) -> str:
        return str(self._ready["internal_url"])

    @property
    def user_headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._ready['user_token']}"}

    @property
    def worker_headers(self) -> dict[str, str]:
        return {"X-Trace-Worker-Token": str(self._ready["worker_token"])}

    @property
    def exit_code(self) -> int | None:
        """None while it runs, or was never started."""
        return self._process.poll() if self._process is not None else None

    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace") if self.log_file.exists() else ""

    def stop(self) -> None:
        """SIGSTOP: it keeps its connections and locks, and does nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    async def kill(self) -> None:
        self._signal(signal.SIGKILL)
        await self.ended()

    async def terminate(self, timeout: float = 10.0) -> int:
        """SIGTERM; its exit code, which must come within ``timeout`` seconds."""
        self._signal(signal.SIGTERM)
        return await self.ended(timeout)

    async def ended(self, timeout: float = 10.0) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return await asyncio.to_thread(self._process.wait, timeout)

    async def close(self) -> None:
        """End the process, whatever its state."""
        if self._process is not None and self.exit_code is None:
            await self.kill()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, f"{self.name} was never started"
        self._process.send_signal(number)


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
            "TRACELAKE_OBJECTS": str(object_root),
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
                preexec_fn=parent_death_hook(signal.SIGINT),
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
        """The lines of the log, or those of one event."""
        entries = [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]
        return [entry for entry in entries if name is None or entry["event"] == name]

    async def logged(self, event: str, count: int = 1, timeout: float = 60.0) -> list[dict[str, Any]]:
        """Wait until the log has ``count`` lines of an event; return them."""
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
        """End the process, whatever its state."""
        if self._process is not None and self.exit_code is None:
            await self.kill()


class SinkProcess(WorkerProcess):
    """``TRACELAKE_DATA_WRITE_DSN`` is among its ``environment``."""

    def _argv(self) -> list[str]:
        return [
            *(sys.executable, "-m", "tracelake", "sink", "--home", str(self.home)),
            *("--ready-file", str(self._ready_file), *self._options),
        ]


class SchedulerProcess(WorkerProcess):
    """It is given the Dispatcher's address and a worker token, and looks often."""

    def __init__(self, home: Path, *, internal_url: str, worker_token: str, name: str = "scheduler") -> None:
        super().__init__(
            home,
            internal_url=internal_url,
            worker_token=worker_token,
            queue_dsn="",
            object_root=home,
            name=name,
            options=("--poll-seconds", "0.1", "--scheduler-id", name),
        )

    def _argv(self) -> list[str]:
        return [
            *(sys.executable, "-m", "tracelake", "scheduler", "--home", str(self.home)),
            *("--ready-file", str(self._ready_file), *self._options),
        ]
