"""The engine's settings: those of a new connection, those that lock it for one query, and the checks of both.

Three layers protect the machine, each sufficient by itself: the gate lets no statement through that reads a file
or a setting, the engine may open only the attached files, and the process around it can't open others. This is the
second. Every setting is read back from the engine before a query runs; one that differs is a refusal, never a
warning. The connection's settings are checked before the process is given any SQL, to save time when a caller
waits; the query's own after they were locked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import duckdb

from tracelake.domain.errors import Unavailable
from tracelake.query.engine.attach import SQL
from tracelake.query.engine.column_types import literal
from tracelake.query.engine.restrict import SlotLimits

#: One thread and none for I/O: a process with one thread can be forked safely.
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
# Never set, only checked: each of them could write a query's text somewhere.
_AS_IT_IS: Mapping[str, object] = {"enable_logging": False, "log_query_path": "", "enable_profiling": None}
_LOCKED: Mapping[str, object] = {
    "enable_external_access": False,
    "lock_configuration": True,
    "allowed_configs": [],
}
_REWRITER = "expression_rewriter"
#: The engine's own ratio.
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


def without_rewriter(connection: duckdb.DuckDBPyConnection) -> None:
    """Turn off the optimizer's rule that moves a cast from a column to a constant (``bignum`` says why)."""
    connection.execute(f"SET disabled_optimizers = {literal(_REWRITER)}")
    if _settings(connection, ["disabled_optimizers"]) != {"disabled_optimizers": _REWRITER}:
        raise _not_locked("disabled_optimizers")


def lock(connection: duckdb.DuckDBPyConnection, paths: Sequence[str]) -> None:
    """Allow these paths and no others, and no further change of any setting."""
    listed = ", ".join(literal(path) for path in paths)
    connection.execute(
        # The order matters: the engine refuses new paths once
        # external access is off, and every change once locked.
        f"SET allowed_paths = [{listed}]; SET enable_external_access = false; SET lock_configuration = true"
    )


def check_connection_settings(
    connection: duckdb.DuckDBPyConnection, limits: SlotLimits, folder: str | None
) -> None:
    """Check the settings of a new connection. Raises Unavailable with the setting's name; no query may run then."""
    wanted = {**_AT_CONNECT, **_AFTER_CONNECT, **_AS_IT_IS, "temp_directory": _spill_folder(limits, folder)}
    sizes = {"memory_limit": limits.memory_bytes, "max_temp_directory_size": limits.spill_bytes}
    found = _settings(connection, [*wanted, *sizes])
    for name, value in wanted.items():
        if found[name] != value:
            raise _not_locked(name)
    for name, size in sizes.items():
        if not _about(str(found[name]), size):
            raise _not_locked(name)


def check_query_settings(
    connection: duckdb.DuckDBPyConnection, paths: Sequence[str], limits: SlotLimits, folder: str | None
) -> None:
    """Check the settings for one query, and that none can be changed any more. Raises as
    ``check_connection_settings`` does."""
    wanted = {**_LOCKED, "threads": limits.threads, "async_threads": _async_threads(limits)}
    found = _settings(connection, [*wanted, "allowed_paths", "allowed_directories"])
    for name, value in wanted.items():
        if found[name] != value:
            raise _not_locked(name)
    if not _are(found["allowed_paths"], paths):
        raise _not_locked("allowed_paths")
    # When external access is turned off, the engine itself adds its folder for spilling.
    own = _spill_folder(limits, folder)
    if not set(found["allowed_directories"]) <= ({f"{own}/"} if own else set()):
        raise _not_locked("allowed_directories")


def _settings(connection: duckdb.DuckDBPyConnection, names: Sequence[str]) -> dict[str, Any]:
    """By ``current_setting``: it returns lists as lists, and takes a quarter of the time of the settings table."""
    selected = ", ".join(f"current_setting({literal(name)})" for name in names)
    rows = connection.execute(SQL.settings.format(settings=selected)).fetchall()
    return dict(zip(names, rows[0], strict=True))


def _async_threads(limits: SlotLimits) -> int:
    return _ASYNC_THREADS_OF_EACH * limits.threads


def _spill_folder(limits: SlotLimits, folder: str | None) -> str:
    return folder if folder is not None and limits.spill_bytes > 0 else ""


def _about(shown: str, size: int) -> bool:
    """Compares a size with the engine's text of it, which has one decimal, cut off."""
    match = re.fullmatch(r"([0-9.]+) (\w+)", shown)
    if match is None or match[2] not in _UNITS:
        return False
    unit = _UNITS[match[2]]
    return abs(float(match[1]) - size / unit) <= 0.11 + 1024 / unit


def _are(allowed: Sequence[str], paths: Sequence[str]) -> bool:
    """Whether exactly these paths are allowed. The engine resolves links as far as it can see: to the process's own
    folder, or to the file itself."""
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
