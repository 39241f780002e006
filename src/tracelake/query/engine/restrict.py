"""The limits of one query, and the rights that its process drops, irrevocably.

``drop_rights`` is called before the process sees any SQL: from then on it can't start a program or another process,
signal one, make a socket or change a file's owner and mode, and it writes only to its own folder, not even to a
file that it received for reading (``/proc/self/fd`` could be opened anew, when sandbox and service share a user).
``restrict_reads`` is called before the SQL runs where no sandbox hides the other files: the process may then open
only the files that it received and the interpreter's own. Both hold for the calling thread and for threads it
starts later, so they come before the engine has any.

The service counts a query's time and kills it; the other limits hold inside the slot. File rules are Landlock's
(Linux 5.13 and later); where the kernel has none, there are no such rules.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from dataclasses import dataclass, field

from tracelake import kernel
from tracelake.sandbox import seccomp

MIB = 1024 * 1024
#: Memory for the interpreter, the engine's code, and rows on their way in and out.
OWN_BYTES = 512 * MIB
#: Descriptors besides those of a query: files that the engine opens anew, a few for each thread, and the
#: interpreter's.
OTHER_DESCRIPTORS = 1024
#: Maximum number of descriptors of one query; more files have to be compacted first, or queried in parts.
MOST_DESCRIPTORS = 16_000
#: Landlock's rights (``LANDLOCK_ACCESS_FS_…``).
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_REFER, _TRUNCATE, _DEVICE_IOCTL = 1 << 13, 1 << 14, 1 << 15
#: Making devices, sockets, pipes and links.
_OTHER_MAKE = (1 << 6) | (1 << 9) | (1 << 10) | (1 << 11) | (1 << 12)
#: Versions of Landlock that brought a right; an older kernel refuses a ruleset that names it.
_SINCE = {2: _REFER, 3: _TRUNCATE, 5: _DEVICE_IOCTL}
_IN_OWN_FOLDER = _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _TRUNCATE
#: Files that the interpreter and the engine still read without a sandbox.
_SYSTEM = (
    "/usr",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/dev/urandom",
    "/dev/null",
    "/proc/self",
    "/sys/fs/cgroup",
)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLimits:
    """``memory_bytes`` is DuckDB's own limit; the process as a whole gets ``OWN_BYTES`` more. ``spill_bytes`` may
    go to the slot's private folder; 0 turns spilling off."""

    seconds: float = 30.0
    memory_bytes: int = 1024 * MIB
    spill_bytes: int = 2048 * MIB
    threads: int = field(default_factory=_cores)


def raise_descriptor_limit() -> None:
    """Raise it to the hard limit: a query's files are open in the service before they are sent to the slot."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_descriptors() -> int:
    """Maximum number of descriptors of one query on this machine; a slot has the same limit as the service."""
    return max(1, min(MOST_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - OTHER_DESCRIPTORS))


def limit_memory(data_bytes: int, file_bytes: int) -> None:
    """Limit this process. An engine that is refused memory reports it, where a cgroup would kill it or slow it."""
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def drop_rights(own_folder: str | None) -> None:
    """``own_folder``: where the engine may spill."""
    # An unprivileged process may restrict itself only after this: otherwise a setuid program could be misled.
    kernel.gain_no_privileges()
    if kernel.landlock_version():
        handled = _since(_EXECUTE | _IN_OWN_FOLDER | _OTHER_MAKE | _REFER | _DEVICE_IOCTL)
        with _Ruleset(handled) as rules:
            if own_folder is not None:
                rules.allow_path(own_folder, _since(_IN_OWN_FOLDER))
            rules.allow_path("/dev/null", _since(_WRITE_FILE))
    kernel.filter_system_calls(seccomp.build_filter(seccomp.machine(), alone=True))


def restrict_reads(descriptors: Iterable[int], folders: Iterable[str]) -> None:
    """``folders``: those that the interpreter may still load from, and the engine's own folder."""
    if not kernel.landlock_version():
        return
    with _Ruleset(_READ_FILE) as rules:
        for folder in (*_SYSTEM, *folders):
            rules.allow_path(folder, _READ_FILE)
        for descriptor in descriptors:
            rules.allow(descriptor, _READ_FILE)


def _since(rights: int) -> int:
    """The rights among these that this kernel knows."""
    version = kernel.landlock_version()
    return rights & ~sum(right for since, right in _SINCE.items() if version < since)


class _Ruleset:
    """Landlock rules, in force from the end of the ``with`` block."""

    def __init__(self, handled: int) -> None:
        self._descriptor = kernel.create_ruleset(handled)

    def __enter__(self) -> _Ruleset:
        return self

    def allow_path(self, path: str, rights: int) -> None:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            # A machine without this path has nothing there to
            # allow, and leaving a rule out only forbids more.
            return
        try:
            self.allow(descriptor, rights)
        finally:
            os.close(descriptor)

    def allow(self, descriptor: int, rights: int) -> None:
        kernel.allow_beneath(self._descriptor, descriptor, rights)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            # A rule that failed to load would leave the ruleset incomplete, and restricting can't be undone.
            if kind is None:
                kernel.restrict_self(self._descriptor)
        finally:
            os.close(self._descriptor)
