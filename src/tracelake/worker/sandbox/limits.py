"""Limits that hold for each process of a sandbox: rlimits, always set, whatever cgroups add.

Without a memory cgroup they are all there is. Then a process's own memory is limited rather than the sandbox's, and
kinds of memory that no rlimit counts are refused by the system call filter. The data segment is what counts:
an address space limit would stop runtimes that reserve much and use little, such as Node.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from tracelake.worker.sandbox.cgroups import CgroupParent
from tracelake.worker.sandbox.spec import SandboxLimits

#: Below this, bubblewrap and the launcher couldn't do their work.
FEWEST_OPEN_FILES = 64
_REAPER = 1
#: Since then the kernel counts processes for each user namespace, earlier for the user on the whole machine.
_COUNTED_BY_NAMESPACE = (5, 14)


def rlimits(limits: SandboxLimits, *, memory_is_counted: bool) -> list[tuple[str, int, int]]:
    open_files = max(limits.open_files, FEWEST_OPEN_FILES)
    given = [
        ("RLIMIT_CORE", 0, 0),
        ("RLIMIT_NOFILE", open_files, open_files),
        ("RLIMIT_FSIZE", limits.file_bytes, limits.file_bytes),
        ("RLIMIT_MEMLOCK", 0, 0),
        ("RLIMIT_MSGQUEUE", 0, 0),
        ("RLIMIT_SIGPENDING", 1024, 1024),
    ]
    if limits.cpu_seconds is not None:
        given.append(("RLIMIT_CPU", limits.cpu_seconds, limits.cpu_seconds + 1))
    if not memory_is_counted:
        given.append(("RLIMIT_DATA", limits.memory_bytes, limits.memory_bytes))
    return given


def process_limit(limits: SandboxLimits, *, own_user: bool) -> int:
    """``own_user``: the sandbox has a user to itself."""
    allowed = limits.processes + _REAPER
    if own_user or _kernel() >= _COUNTED_BY_NAMESPACE:
        return allowed
    return allowed + _tasks_of(os.getuid())


def describe(parent: CgroupParent | None) -> str:
    """For people: which limits hold, and by what."""
    if parent is None:
        return "rlimits only: memory is limited for each process, not for a sandbox as a whole"
    missing = [c for c in ("memory", "pids", "cpu") if c not in parent.folders]
    said = f"cgroup v{parent.version} ({', '.join(parent.folders)}) and rlimits"
    return f"{said}; without {', '.join(missing)}" if missing else said


def _kernel() -> tuple[int, int]:
    major, minor = platform.release().split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def _tasks_of(uid: int) -> int:
    total = 0
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                total += len(os.listdir(process / "task")) if process.stat().st_uid == uid else 0
            except OSError:
                continue
    return total
