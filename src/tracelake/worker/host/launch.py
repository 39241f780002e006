"""The operator host's process: started with next to nothing, listened to, ended by hanging up.

It gets no environment of the wrapper's and two descriptors: the control socket, and the reading end of a pipe that
nobody ever writes to. The pipe's end is how the host learns that the wrapper is gone, even one that was killed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable

import structlog

from tracelake.domain.errors import Unavailable

_MODULE = "tracelake.worker.host.operator_host"
_LINE_BYTES = 2000
_KEPT_LINES = 5
_LOGGED_LINES = 1000
_SEND_BUFFER = 1024 * 1024

_log = structlog.get_logger(__name__)


def launch() -> LaunchedHost:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    ours.setblocking(False)
    lifeline, held = os.pipe2(os.O_CLOEXEC)
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
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        os.set_blocking(self._errors.fileno(), False)
        self._loop.add_reader(self._errors, self._listen)

    @property
    def pid(self) -> int:
        return self._process.pid

    def on_exit(self, call: Callable[[], None]) -> None:
        """Once the process has ended; by then everything that it started has."""

        def exited() -> None:
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
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

    def last_words(self) -> str:
        return f": {self._said[-1]}" if self._said else ""

    def _listen(self) -> None:
        try:
            part = os.read(self._errors.fileno(), 65536)
        except BlockingIOError:
            return
        if not part:
            self._loop.remove_reader(self._errors)
        *lines, rest = (self._partial + part).split(b"\n")
        self._partial = rest[-_LINE_BYTES:]
        for line in lines:
            self._say(line[:_LINE_BYTES].decode("utf-8", "replace").rstrip())

    def _say(self, line: str) -> None:
        if not line:
            return
        self._said.append(line)
        self._logged += 1
        if self._logged <= _LOGGED_LINES:
            _log.warning("operator_host_said", line=line)


def _import_path() -> str:
    """What the wrapper can import, its host can; the zygote clears it away with the rest of its environment."""
    return os.pathsep.join(place for place in sys.path if os.path.isabs(place) and os.pathsep not in place)
