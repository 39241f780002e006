"""The Dispatcher as a part: the same command that people run, on the stack's databases.

Ports given as 0 are chosen by the Dispatcher at its first start and asked for by number ever after, so
that a restart is found where it was.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from tracelake.dev.child_process import ChildSpec
from tracelake.dev.handle import DISPATCHER_FILE, DispatcherHandle, read_handle, remove_handle
from tracelake.dev.home import Home


class DispatcherPart:
    def __init__(
        self, home: Home, *, user_port: int, internal_port: int, runtimes: Sequence[str] = ()
    ) -> None:
        self._home = home
        self._file = home.folder / DISPATCHER_FILE
        self._ports = (user_port, internal_port)
        self._runtimes = tuple(runtimes)
        self._handle: DispatcherHandle | None = None

    @property
    def handle(self) -> DispatcherHandle:
        assert self._handle is not None
        return self._handle

    def spec(self, *, state_dsn: str, queue_dsn: str) -> ChildSpec:
        dsns: Mapping[str, str] = {"TRACELAKE_STATE_DSN": state_dsn, "TRACELAKE_QUEUE_DSN": queue_dsn}
        return ChildSpec(
            name="dispatcher",
            argv=self._argv,
            ready=self._ready,
            # Python looks for modules in the folder it is started in; nobody keeps theirs in a home.
            folder=self._home.folder,
            log=self._home.logs / "dispatcher.log",
            env={**os.environ, **dsns},
        )

    def _argv(self) -> list[str]:
        remove_handle(self._file)
        user_port, internal_port = self._ports
        return [
            *(sys.executable, "-m", "tracelake", "dispatcher"),
            *("--home", str(self._home.folder), "--ready-file", str(self._file)),
            *("--user-port", str(user_port), "--internal-port", str(internal_port)),
            *(option for runtime in self._runtimes for option in ("--runtime", runtime)),
        ]

    def _ready(self, pid: int) -> bool:
        handle = read_handle(self._file, DispatcherHandle)
        if handle is None or handle.pid != pid:
            return False
        self._handle = handle
        self._ports = (_port(handle.user_url), _port(handle.internal_url))
        return True


def _port(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port
