"""The Dispatcher as a part: the same command that people run, on the stack's databases."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from tracelake.dev.addresses import Addresses
from tracelake.dev.child_process import ChildSpec
from tracelake.dev.dispatcher_files import own_file
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

    ports = addresses.ports

    def argv() -> list[str]:
        return [
            *(sys.executable, "-P", "-m", "tracelake", "dispatcher", "--home", str(home.folder)),
            *("--user-port", str(ports.user.number), "--internal-port", str(ports.internal.number)),
            *(option for runtime in runtimes for option in ("--runtime", runtime)),
        ]

    return ChildSpec(
        name=NAME,
        argv=argv,
        ready=lambda pid: own_file(home.folder, pid).exists(),
        # Python looks for modules in the folder it is started in; nobody keeps theirs in a home.
        folder=home.folder,
        log=home.logs / f"{NAME}.log",
        listens={"user": ports.user, "internal": ports.internal},
        env=lambda: {**os.environ, **databases(), "TRACELAKE_QUERY_URL": addresses.query_url},
    )
