"""A slot's process as the service sees it, and the program that it runs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from importlib import util
from pathlib import Path
from typing import Protocol

import tracelake
from tracelake.worker.sandbox import EndReason

PROGRAM = "tracelake.query.engine.child"
PACKAGE = Path(tracelake.__file__).resolve().parent

_NEEDED = ("duckdb", "pyarrow", "numpy", "msgspec", "orjson", "sqlglot")
#: Libraries read these when they are loaded. No threads before there is a query; no memory that is reserved but not
#: used, which an rlimit would count.
_SETTINGS = {"OPENBLAS_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
_BOOT = (
    f"import os, sys; sys.path[:0] = sys.argv.pop().split(':'); os.environ.update({_SETTINGS!r}); "
    "import importlib; importlib.import_module(sys.argv.pop()).main()"
)


class SlotProcess(Protocol):
    """``ended`` is done when nothing of it is left."""

    channel: socket.socket
    ended: asyncio.Future[EndReason]

    def kill(self) -> None:
        """At once and as a whole; ``ended`` says when it is done."""


class Confinement(Protocol):
    """``description`` is for people."""

    description: str
    confined: bool

    async def start(self, stderr: int) -> SlotProcess: ...

    async def close(self) -> None: ...


def arguments(program: str, setup: bytes, path: Iterable[str]) -> list[str]:
    """For an interpreter: nothing of its environment, of the caller's folder or of ``site`` is taken in."""
    return ["-I", "-S", "-B", "-c", _BOOT, setup.decode(), program, ":".join(path)]


def library_folders() -> list[Path]:
    """Where what the program imports is installed: one folder as a rule."""
    found: dict[Path, None] = {}
    for name in _NEEDED:
        spec = util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"the query engine needs the package {name}")
        found[Path(spec.origin).resolve().parent.parent] = None
    return list(found)
