"""Starts the operator host's process and describes the view that it has to set up.

The host gets no environment of the wrapper's and two descriptors: the control socket, and the read end of a pipe
that is never written to. The end of that pipe shows the host that the wrapper is gone, even one that was killed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog

from tracelake.domain.errors import Unavailable
from tracelake.worker.host.protocol import HostSetup, ProcessIdentity

_MODULE = "tracelake.worker.host.operator_host"
_LINE_BYTES = 2000
_KEPT_LINES = 5
_LOGGED_LINES = 1000
_SEND_BUFFER = 1024 * 1024

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """``hidden`` are files and folders with credentials outside of ``home``; ``shown`` are paths that operators
    need besides the interpreter, the objects and the work folder. ``namespaces``: require them, use them if
    possible, or don't try. ``user`` is the account that root runs operators under, by default
    ``TRACELAKE_OPERATOR_USER``; without either each process has an account of its own.
    """

    home: Path | None
    object_root: Path
    work_folder: Path
    operators: tuple[str, ...] = ()
    preload_spark: bool = False
    hidden: tuple[Path, ...] = ()
    shown: tuple[Path, ...] = ()
    namespaces: Literal["required", "auto", "never"] = "auto"
    user: str | None = None

    @property
    def chosen_user(self) -> str | None:
        return self.user or os.environ.get("TRACELAKE_OPERATOR_USER") or None

    @property
    def sources(self) -> list[str]:
        """The operator sources without duplicates, files by their full path."""
        full = (os.path.abspath(each) if each.endswith(".py") else each for each in self.operators)
        return list(dict.fromkeys(full))

    def setup(
        self, *, namespaces: bool, own: ProcessIdentity, provers: Sequence[ProcessIdentity]
    ) -> HostSetup:
        """``own`` is the place of the process that proves the view; ``provers`` are those of the processes that
        load ``sources``."""

        def absolute(paths: Sequence[Path]) -> list[str]:
            return [os.path.abspath(path) for path in paths]

        sources = self.sources
        files = [Path(source) for source in sources if source.endswith(".py")]
        return HostSetup(
            namespaces=namespaces,
            home=None if self.home is None else os.path.abspath(self.home),
            # Resolved, since a covered path must not be reachable by another name.
            object_root=os.path.realpath(self.object_root),
            work_folder=os.path.realpath(self.work_folder),
            operators=sources,
            preload_spark=self.preload_spark,
            hidden=absolute(self.hidden),
            shown=absolute([*self.shown, *files]),
            folder=own.folder,
            account=own.account,
            provers=list(provers),
        )


def launch() -> LaunchedHost:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Orders are sent without waiting, so a burst of them must fit.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    ours.setblocking(False)
    lifeline, held = os.pipe2(os.O_CLOEXEC)
    # Neither a user's own packages nor the current folder may add modules.
    argv = [sys.executable, "-s", "-P", "-m", _MODULE, str(theirs.fileno()), str(lifeline)]
    try:
        process = subprocess.Popen(
            argv,
            cwd="/",
            env={"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONPATH": _import_path()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(), lifeline),
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        os.close(held)
        raise Unavailable("OperatorHostGone", f"the operator host can't be executed: {error}") from None
    finally:
        theirs.close()
        os.close(lifeline)
    return LaunchedHost(process, ours, held)


class LaunchedHost:
    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, lifeline: int) -> None:
        assert process.stderr is not None
        self.control = control
        self._process = process
        self._lifeline = lifeline
        self._loop = asyncio.get_running_loop()
        self._handle = os.pidfd_open(process.pid)
        self._errors = process.stderr
        self._partial = b""
        self._logged = 0
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        os.set_blocking(self._errors.fileno(), False)
        self._loop.add_reader(self._errors, self._listen)

    @property
    def pid(self) -> int:
        return self._process.pid

    def on_exit(self, call: Callable[[], None]) -> None:
        """Call this once the process has ended; everything that it started has ended by then."""

        def exited() -> None:
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
            # The handle was readable, so this doesn't block.
            self._process.wait()
            self._listen()
            self._loop.remove_reader(self._errors)
            self._errors.close()
            call()

        self._loop.add_reader(self._handle, exited)

    def hang_up(self) -> None:
        if self.control.fileno() < 0:
            return
        self._loop.remove_reader(self.control)
        self.control.close()
        os.close(self._lifeline)

    def log_tail(self) -> str:
        return f": {self._lines[-1]}" if self._lines else ""

    def _listen(self) -> None:
        try:
            part = os.read(self._errors.fileno(), 65536)
        except BlockingIOError:
            return
        if not part:
            self._loop.remove_reader(self._errors)
        *lines, rest = (self._partial + part).split(b"\n")
        # A line without an end must not grow.
        self._partial = rest[-_LINE_BYTES:]
        for line in lines:
            self._log_line(line[:_LINE_BYTES].decode("utf-8", "replace").rstrip())

    def _log_line(self, line: str) -> None:
        if not line:
            return
        self._lines.append(line)
        self._logged += 1
        # The host's processes can write here too, and must not fill the worker's log.
        if self._logged <= _LOGGED_LINES:
            _log.warning("operator_host_output", line=line)


def _import_path() -> str:
    """The wrapper's import path, for the host; the zygote removes it with the rest of its environment."""
    return os.pathsep.join(place for place in sys.path if os.path.isabs(place) and os.pathsep not in place)
