"""Handle files: where a running stack is found and what opens it.

``dev.json`` is the whole stack's and there only while all of it was up; ``dispatcher.json`` is a Dispatcher's
own. Both hold secrets, so they are made for their owner alone, and they appear whole or not at all: whoever
waits for one may read it as soon as it is there.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TypeVar

import msgspec

from tracelake.domain.errors import Invalid, Unavailable
from tracelake.stack_address import DEV_FILE, DISPATCHER_FILE

__all__ = [
    "DEV_FILE",
    "DISPATCHER_FILE",
    "DevHandle",
    "DispatcherHandle",
    "QueryHandle",
    "read_handle",
    "remove_handle",
    "write_handle",
]


class DispatcherHandle(msgspec.Struct, frozen=True):
    user_url: str
    internal_url: str
    user_token: str
    worker_token: str
    pid: int

    def __repr__(self) -> str:
        return f"DispatcherHandle({self.user_url}, {self.internal_url}, …)"


class DevHandle(msgspec.Struct, frozen=True, kw_only=True):
    """``query_url`` is where the Query Service listens, for tasks and for people. ``queue_dsn``
    and ``data_write_dsn`` are the workers', ``data_read_dsn`` is the Query Service's: each with a role that can do
    that and nothing else; the last one is also for people who want to look at hot tables. ``operators`` are what
    its own workers load, so that one started by hand can do the same tasks; ``rpc_pools`` is the file with the RPC
    pools if it isn't the home's."""

    user_url: str
    internal_url: str
    query_url: str
    worker_token: str
    user_token: str
    state_dsn: str
    data_dsn: str
    queue_dsn: str
    data_write_dsn: str
    data_read_dsn: str
    object_root: str
    operators: tuple[str, ...] = ()
    rpc_pools: str | None = None
    pids: dict[str, int]

    def __repr__(self) -> str:
        return f"DevHandle({self.user_url}, {self.internal_url}, …)"


class QueryHandle(msgspec.Struct, frozen=True):
    """Where a Query Service listens; nothing in it is secret."""

    url: str
    pid: int


Handle = TypeVar("Handle", DispatcherHandle, DevHandle, QueryHandle)


def write_handle(path: Path, handle: DispatcherHandle | DevHandle | QueryHandle) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(handle), indent=2) + b"\n")
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise Unavailable("HandleUnwritable", f"can't write {path}: {error.strerror}") from None


def read_handle(path: Path, kind: type[Handle]) -> Handle | None:
    """``None`` when there is no such file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Unavailable("HandleUnreadable", f"can't read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise Invalid("HandleDamaged", f"{path} isn't a stack's handle: {error}") from None


def remove_handle(path: Path) -> None:
    path.unlink(missing_ok=True)
