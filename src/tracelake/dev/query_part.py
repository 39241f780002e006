"""The Query Service as a part: the same command that people run, on the stack's databases.

It listens before these and the Dispatcher are there, and finds them when it is asked something. Where nothing
confines queries it refuses to serve any; the rest of the stack is of use without it.
"""

from __future__ import annotations

import os
import sys
import threading

from tracelake.dev.addresses import Addresses
from tracelake.dev.child_process import ChildProcess, ChildSpec
from tracelake.dev.handle import QueryHandle, read_handle, remove_handle
from tracelake.dev.home import Home
from tracelake.domain.errors import Unavailable

NAME = "query"
QUERY_FILE = "query.json"
START_SECONDS = 60.0
_WAY_OUT = "TRACELAKE_QUERY_UNCONFINED=1"
"""Named in the refusal of a service that can't confine queries, and in no other."""


class QueryPart(ChildProcess):
    """``refused`` says why there are no queries; the part counts as started then."""

    refused: str | None = None

    @property
    def alive(self) -> bool:
        return self.refused is not None or super().alive

    @property
    def pid(self) -> int | None:
        return None if self.refused is not None else super().pid

    def start(self, stopping: threading.Event) -> None:
        try:
            super().start(stopping)
        except Unavailable as error:
            if _WAY_OUT not in error.message:
                raise
            self.refused = error.message


def query_spec(home: Home, addresses: Addresses) -> ChildSpec:
    """The Dispatcher's address comes from the file that it writes."""
    file = home.folder / QUERY_FILE
    inherited = {name: value for name, value in os.environ.items() if name != "TRACELAKE_INTERNAL_URL"}

    def argv() -> list[str]:
        remove_handle(file)
        return [
            *(sys.executable, "-P", "-m", "tracelake", "query-service", "--home", str(home.folder)),
            *("--port", str(addresses.ports.query.number), "--ready-file", str(file)),
        ]

    def ready(pid: int) -> bool:
        handle = read_handle(file, QueryHandle)
        return handle is not None and handle.pid == pid

    return ChildSpec(
        name=NAME,
        argv=argv,
        ready=ready,
        folder=home.folder,
        log=home.logs / f"{NAME}.log",
        listens={"query": addresses.ports.query},
        env=lambda: {**inherited, **addresses.for_queries()},
        start_timeout=START_SECONDS,
    )
