"""The engine's settings: what a connection is made with, how it is locked for one query, and the proof.

Three layers, of which each would do: the gate lets no statement through that reads a file or a setting, the engine
is told to open nothing but what was attached, and the process around it can't. This is the second. Every setting is
read back from the engine before a query runs; one that isn't as meant is a refusal, never a warning. Those that a
connection is made with are read in the query's process before it is given any SQL, to save time when it matters;
those that are set for the query after they were locked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import duckdb

from tracelake.domain.errors import Unavailable
from tracelake.query.engine.attach import SQL
from tracelake.query.engine.identifiers import literal
from tracelake.query.engine.limits import SlotLimits

#: One thread and none for I/O: a process without threads can be forked.
_WITHOUT_THREADS = {"threads": "1", "async_threads": "0"}
_AT_CONNECT: Mapping[str, object] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
    "allow_unsigned_extensions": False,
    "allow_persistent_secrets": False,
    "allow_unredacted_secrets": False,
    "allow_extension_repositories": "forbidden",
    "python_enable_replacements": False,
}
_AFTER_CONNECT: Mapping[str, object] = {
    "python_scan_all_frames": False,
    "TimeZone": "UTC",
    "parquet_metadata_cache": True,
}
_AS_IT_IS: Mapping[str, object] = {"enable_logging": False, "log_query_path": "", "enable_profiling": None}
_LOCKED: Mapping[str, object] = {
    "enable_external_access": False,
    "lock_configuration": True,
    "allowed_configs": [],
}
#: As many as the engine itself would have.
_ASYNC_THREADS_OF_EACH = 4
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def connect(limits: SlotLimits, folder: str | None) -> duckdb.DuckDBPyConnection:
    """``folder``: where the engine may spill."""
    config: dict[str, Any] = {
        **_WITHOUT_THREADS,
        **{name: str(value).lower() for name, value in _AT_CONNECT.items()},
        "memory_limit": f"{limits.memory_bytes // 1024}KiB",
        "temp_directory": _spill_folder(limits, folder),
        "max_temp_directory_size": f"{limits.spill_bytes // 1024}KiB",
    }
    connection = duckdb.connect(":memory:", config=config)
    for name, value in _AFTER_CONNECT.items():
        connection.execute(f"SET GLOBAL {name} = {literal(str(value))}")
    return connection


def use_threads(connection: duckdb.DuckDBPyConnection, limits: SlotLimits) -> None:
    connection.execute(f"SET threads = {limits.threads:d}; SET async_threads = {_async_threads(limits):d}")


def lock(connection: duckdb.DuckDBPyConnection, paths: Sequence[str]) -> None:
    """For this query: these paths and no others, and no way back."""
    listed = ", ".join(literal(path) for path in paths)
    connection.execute(
        f"SET allowed_paths = [{listed}]; SET enable_external_access = false; SET lock_configuration = true"
    )


def prove_made(connection: duckdb.DuckDBPyConnection, limits: SlotLimits, folder: str | None) -> None:
    """What a connection was made with. Raises Unavailable, naming the setting; no query must be run then."""
    wanted = {**_AT_CONNECT, **_AFTER_CONNECT, **_AS_IT_IS, "temp_directory": _spill_folder(limits, folder)}
    sizes = {"memory_limit": limits.memory_bytes, "max_temp_directory_size": limits.spill_bytes}
    found = _settings(connection, [*wanted, *sizes])
    for name, value in wanted.items():
        if found[name] != value:
            raise _not_locked(name)
    for name, size in sizes.items():
        if not _about(str(found[name]), size):
            raise _not_locked(name)


def prove_locked(
    connection: duckdb.DuckDBPyConnection, paths: Sequence[str], limits: SlotLimits, folder: str | None
) -> None:
    """What was set for one query, and that nothing can be set from here on. Raises as ``prove_made`` does."""
    wanted = {**_LOCKED, "threads": limits.threads, "async_threads": _async_threads(limits)}
    found = _settings(connection, [*wanted, "allowed_paths", "allowed_directories"])
    for name, value in wanted.items():
        if found[name] != value:
            raise _not_locked(name)
    if not _are(found["allowed_paths"], paths):
        raise _not_locked("allowed_paths")
    # Turning outside access off allows the engine its own folder for spilling.
    own = _spill_folder(limits, folder)
    if not set(found["allowed_directories"]) <= ({f"{own}/"} if own else set()):
        raise _not_locked("allowed_directories")


def _settings(connection: duckdb.DuckDBPyConnection, names: Sequence[str]) -> dict[str, Any]:
    """By ``current_setting``: it gives lists as lists, and costs a quarter of what the whole table costs."""
    asked = ", ".join(f"current_setting({literal(name)})" for name in names)
    rows = connection.execute(SQL.settings.format(settings=asked)).fetchall()
    return dict(zip(names, rows[0], strict=True))


def _async_threads(limits: SlotLimits) -> int:
    return _ASYNC_THREADS_OF_EACH * limits.threads


def _spill_folder(limits: SlotLimits, folder: str | None) -> str:
    return folder if folder is not None and limits.spill_bytes > 0 else ""


def _about(shown: str, size: int) -> bool:
    """The engine shows sizes with one digit, cut off."""
    match = re.fullmatch(r"([0-9.]+) (\w+)", shown)
    if match is None or match[2] not in _UNITS:
        return False
    unit = _UNITS[match[2]]
    return abs(float(match[1]) - size / unit) <= 0.11 + 1024 / unit


def _are(allowed: Sequence[str], paths: Sequence[str]) -> bool:
    """The engine resolves links as far as it can see: to the process's own folder, or to the file itself."""
    own = f"/proc/{os.getpid()}/"
    left = set(allowed)
    matched = set()
    for path in paths:
        name = path.replace("/proc/self/", own)
        name = name if name in left else os.path.realpath(path)
        if name not in left:
            return False
        matched.add(name)
    return matched == left


def _not_locked(name: str) -> Unavailable:
    return Unavailable("EngineNotLocked", f"the query engine did not take the setting {name}")
