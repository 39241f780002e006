"""The Dispatcher as a part: the same command that people run, on the stack's databases."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from tracelake.dev.addresses import Addresses
from tracelake.dev.child_process import ChildSpec
from tracelake.dev.handle import DISPATCHER_FILE, DispatcherHandle, read_handle, remove_handle
from tracelake.dev.home import Home

NAME = "dispatcher"


def dispatcher_spec(
    home: Home,
    addresses: Addresses,
    *,
    databases: Callable[[], Mapping[str, str]],
    runtimes: Sequence[str] = (),
) -> ChildSpec:
    """``databases`` is asked for at each start: how to reach them as their owner."""
    file = home.folder / DISPATCHER_FILE

    def argv() -> list[str]:
        remove_handle(file)
        return [
            *(sys.executable, "-m", "tracelake", "dispatcher"),
            *("--home", str(home.folder), "--ready-file", str(file)),
            *("--user-port", str(addresses.ports.user), "--internal-port", str(addresses.ports.internal)),
            *(option for runtime in runtimes for option in ("--runtime", runtime)),
        ]

    def ready(pid: int) -> bool:
        handle = read_handle(file, DispatcherHandle)
        return handle is not None and handle.pid == pid

    return ChildSpec(
        name=NAME,
        argv=argv,
        ready=ready,
        # Python looks for modules in the folder it is started in; nobody keeps theirs in a home.
        folder=home.folder,
        log=home.logs / f"{NAME}.log",
        env=lambda: {**os.environ, **databases(), "TRACELAKE_QUERY_URL": addresses.query_url},
    )
