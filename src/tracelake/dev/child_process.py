"""``ChildProcess``: a part that is a program of its own, started with a log, awaited until ready, ended by signal.

It runs in a session of its own, so Ctrl-C on the terminal and signals to the supervisor's process group reach the
supervisor alone, which ends the parts in order. If the supervisor is killed, the kernel kills the child.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tracelake.domain.errors import Unavailable
from tracelake.kernel import parent_death_hook
from tracelake.program_log import CappedLog
from tracelake.serving.local_sockets import HeldPort, handed_down

_POLL = 0.02
_DRAIN_SECONDS = 1.0
_ERROR_LINE = "error: "
_TAIL_BYTES = 64 * 1024
_LAST_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """``argv`` and ``env``, the whole environment, are computed at each start; ``ready`` is polled with the pid
    until it holds. A child that can't start prints a line ``error: …``. It ``listens`` on ports that the supervisor
    holds: while it restarts after a crash, connections wait.
    """

    name: str
    argv: Callable[[], Sequence[str]]
    ready: Callable[[int], bool]
    folder: Path
    log: Path
    env: Callable[[], Mapping[str, str]] = field(repr=False)
    listens: Mapping[str, HeldPort] = field(default_factory=dict)
    start_timeout: float = 60.0
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout: float = 2.5


class ChildProcess:
    def __init__(self, spec: ChildSpec) -> None:
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._log: CappedLog | None = None

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.alive else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def ended(self) -> str:
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return "ended"
        how = f"ended with {ending(code)}" if code >= 0 else f"was killed by {ending(code)}"
        error = self._last_error() if code > 0 else None
        return f"{how} ({error})" if error else how

    def log_tail(self) -> tuple[str, ...]:
        if self._log is not None:
            self._log.drained(_DRAIN_SECONDS)
        return last_lines(self._spec.log)

    def start(self, stopping: threading.Event) -> None:
        spec = self._spec
        log = self._log = _open_log(spec.log)
        try:
            process = self._process = self._fork(log.write_fd)
        finally:
            # With our copy of the pipe's end open, the log's reader would never see its end.
            log.handed_on()
        deadline = time.monotonic() + spec.start_timeout
        while process.poll() is None and not spec.ready(process.pid):
            if stopping.wait(_POLL):
                return
            if time.monotonic() > deadline:
                self.stop()
                raise self._failed(f"wasn't ready after {spec.start_timeout:g} s")
        if (code := process.poll()) is not None:
            # Otherwise clients would wait at the held port for a part that isn't there.
            self._refuse_connections()
            raise self._failed(self._last_error() or f"ended at its start ({ending(code)})")

    def _last_error(self) -> str | None:
        """The last line ``error: …`` in the child's log."""
        if self._log is None:
            return None
        self._log.drained(_DRAIN_SECONDS)
        lines = reversed(self._log.tail().splitlines())
        return next((line[len(_ERROR_LINE) :] for line in lines if line.startswith(_ERROR_LINE)), None)

    def stop(self) -> None:
        try:
            self._end()
        finally:
            self._refuse_connections()

    def _refuse_connections(self) -> None:
        for port in self._spec.listens.values():
            port.refuse()

    def _end(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(self._spec.stop_signal)
        try:
            process.wait(self._spec.stop_timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _fork(self, log: int) -> subprocess.Popen[bytes]:
        spec = self._spec
        environment, descriptors = handed_down(spec.listens)
        try:
            return subprocess.Popen(
                list(spec.argv()),
                cwd=spec.folder,
                env={**spec.env(), **environment},
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # SIGKILL, since no process is left then that would wait for a graceful end.
                preexec_fn=parent_death_hook(signal.SIGKILL),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise self._failed(f"can't be executed: {error}") from None

    def _failed(self, why: str) -> Unavailable:
        return Unavailable("PartFailed", f"{self.name}: {why} (log: {self._spec.log})")


def ending(code: int) -> str:
    """Describe a return code."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _open_log(path: Path) -> CappedLog:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return CappedLog(path)
    except OSError as error:
        raise Unavailable("LogUnwritable", f"can't write the log {path}: {error.strerror}") from None


def last_lines(log: Path) -> tuple[str, ...]:
    """The last lines of the log, read from its end, since it may be large; none without a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ()
    return tuple(line for line in lines if line.strip())[-_LAST_LINES:]
