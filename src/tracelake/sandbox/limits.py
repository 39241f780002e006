"""Limits of a sandbox: rlimits for each process, and control groups for the sandbox as a whole.

Rlimits are always set. Without a memory cgroup they are all there is: then the memory of each process is limited
rather than the sandbox's, and the system call filter refuses kinds of memory that no rlimit counts. The limit is
on the data segment: one on the address space would stop runtimes that reserve much and use little, such as Node.

Control groups are of version 2 or 1, whichever is available. A sandbox's group is made below our own, so the
worker's limits hold for its sandboxes too. In version 2 a group with controllers may have no processes of its
own: if the worker's group was delegated to it and it is alone there, it moves into a leaf; otherwise it looks for
a place beside itself. Limits that no group can hold are left to rlimits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tracelake.sandbox.layout import SandboxLimits

# Below this, bubblewrap and the launcher couldn't do their work.
FEWEST_OPEN_FILES = 64
_REAPER = 1
# Since this version the kernel counts processes for each user namespace, before for the user on the whole
# machine.
_COUNTED_BY_NAMESPACE = (5, 14)
CONTROLLERS = ("memory", "pids", "cpu")
_PREFIX = "tracelake-sandbox"
_LEAF = "tracelake-worker"
_PERIOD_MICROSECONDS = 100_000
_REMOVAL_TRIES = 250
_REMOVAL_PAUSE = 0.02
# bubblewrap itself, its reaper inside, and the helper count as well.
OVERHEAD_PROCESSES = 3


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
        # A second later the hard limit kills a program that ignores SIGXCPU.
        given.append(("RLIMIT_CPU", limits.cpu_seconds, limits.cpu_seconds + 1))
    if not memory_is_counted:
        given.append(("RLIMIT_DATA", limits.memory_bytes, limits.memory_bytes))
    return given


def process_limit(limits: SandboxLimits, *, own_user: bool) -> int:
    """``own_user``: the sandbox has a user to itself."""
    allowed = limits.processes + _REAPER
    if own_user or _kernel() >= _COUNTED_BY_NAMESPACE:
        return allowed
    # The kernel also counts the worker's own processes, since they have the same user.
    return allowed + _tasks_of(os.getuid())


def describe_limits(parent: CgroupParent | None) -> str:
    """A description for people: which limits hold, and by what."""
    if parent is None:
        return "rlimits only: memory is limited for each process, not for a sandbox as a whole"
    missing = [c for c in ("memory", "pids", "cpu") if c not in parent.folders]
    held = f"cgroup v{parent.version} ({', '.join(parent.folders)}) and rlimits"
    return f"{held}; without {', '.join(missing)}" if missing else held


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


@dataclass(frozen=True, slots=True)
class CgroupParent:
    """Where groups are made: the folder of each controller. In version 2 they are one and the same."""

    version: int
    folders: dict[str, Path]

    def make(self, name: str) -> Cgroup:
        group = Cgroup(self.version, {c: f / f"{_PREFIX}-{name}" for c, f in self.folders.items()})
        try:
            for folder in group.distinct():
                folder.mkdir()
        except OSError:
            group.remove()
            raise
        return group

    def sweep(self) -> None:
        """Remove groups that killed workers left behind. Names begin with the worker's process number."""
        for parent in set(self.folders.values()):
            for folder in parent.glob(f"{_PREFIX}-*"):
                owner = folder.name.removeprefix(f"{_PREFIX}-").split("-")[0]
                # A number that is in use again only keeps the group until a later sweep.
                if owner.isdigit() and not Path("/proc", owner).exists():
                    with contextlib.suppress(OSError):
                        folder.rmdir()


@dataclass(frozen=True, slots=True)
class Cgroup:
    version: int
    folders: dict[str, Path]

    def distinct(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(self.folders.values()))

    def limit(self, limits: SandboxLimits) -> None:
        for controller, folder in self.folders.items():
            for file, value, required in _settings(self.version, controller, limits):
                if required or (folder / file).exists():
                    (folder / file).write_text(value)

    def entrances(self) -> list[str]:
        return [str(folder / "cgroup.procs") for folder in self.distinct()]

    def out_of_memory(self) -> bool:
        """Whether the kernel has killed a process of the group for its memory."""
        folder = self.folders.get("memory")
        if folder is None:
            return False
        file = folder / ("memory.events" if self.version == 2 else "memory.oom_control")
        try:
            counts = dict(line.split() for line in file.read_text().splitlines())
        except OSError:
            return False
        return int(counts.get("oom_kill", "0")) > 0

    def kill(self) -> None:
        for folder in self.distinct():
            with contextlib.suppress(OSError):
                # Only since Linux 5.14; before, processes are killed one by one.
                if (folder / "cgroup.kill").exists():
                    (folder / "cgroup.kill").write_text("1")
                for pid in (folder / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> bool:
        """Remove the group; False while processes that were killed are still in it."""
        for folder in self.distinct():
            with contextlib.suppress(OSError):
                folder.rmdir()
        return not any(folder.exists() for folder in self.distinct())


async def empty_and_remove(cgroup: Cgroup) -> None:
    """Retried, because the kernel counts a process for a moment after its end."""
    for _ in range(_REMOVAL_TRIES):
        cgroup.kill()
        if cgroup.remove():
            return
        await asyncio.sleep(_REMOVAL_PAUSE)


def _settings(version: int, controller: str, limits: SandboxLimits) -> Iterator[tuple[str, str, bool]]:
    """File, value, and whether a kernel without that file can't be used."""
    # The kernel refuses quotas below a millisecond.
    quota = None if limits.cpu_share is None else max(1000, int(limits.cpu_share * _PERIOD_MICROSECONDS))
    if controller == "pids":
        yield "pids.max", str(limits.processes + OVERHEAD_PROCESSES), True
    elif controller == "memory" and version == 2:
        yield "memory.max", str(limits.memory_bytes), True
        # Swap would add to the memory that a sandbox may use.
        yield "memory.swap.max", "0", False
        # All or nothing: a program that has lost one of its processes may hang instead of ending.
        yield "memory.oom.group", "1", False
    elif controller == "memory":
        yield "memory.limit_in_bytes", str(limits.memory_bytes), True
        # After the limit above: the kernel refuses a sum of memory and swap that is below it.
        yield "memory.memsw.limit_in_bytes", str(limits.memory_bytes), False
    elif quota is not None and version == 2:
        yield "cpu.max", f"{quota} {_PERIOD_MICROSECONDS}", True
    elif quota is not None:
        yield "cpu.cfs_period_us", str(_PERIOD_MICROSECONDS), True
        yield "cpu.cfs_quota_us", str(quota), True


def find_parent(proc: Path = Path("/proc/self")) -> CgroupParent | None:
    """The best place, or None. It is found by making a group, since permissions alone don't show what works."""
    try:
        mounts = (proc / "mountinfo").read_text().splitlines()
        memberships = (proc / "cgroup").read_text().splitlines()
    except OSError:
        return None
    places = _places(mounts, memberships)
    unified = places.pop("", None)
    folders = {c: places[c] for c in CONTROLLERS if c in places and _can_make(places[c])}
    if folders:
        return CgroupParent(1, folders)
    return None if unified is None else _find_unified(unified)


def _places(mounts: list[str], memberships: list[str]) -> dict[str, Path]:
    """Our own group's folder for each controller of version 1, and under "" that of version 2."""
    own: dict[str, str] = {}
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    found: dict[str, Path] = {}
    for line in mounts:
        before, _, after = line.partition(" - ")
        root, mountpoint = before.split()[3:5]
        kind, _, options = after.split()[:3]
        for controller in {"cgroup": options.split(","), "cgroup2": [""]}.get(kind, []):
            if controller in own:
                inner = own[controller].removeprefix(root.rstrip("/")).lstrip("/")
                folder = Path(mountpoint, inner)
                # In a container the path may be the host's; then the mount itself shows our own group.
                found[controller] = folder if folder.is_dir() else Path(mountpoint)
    return found


def _find_unified(own: Path) -> CgroupParent | None:
    for parent in (own, own.parent):
        usable = _enabled(parent)
        if {"memory", "pids"} <= usable and _can_make(parent):
            return CgroupParent(2, {c: parent for c in CONTROLLERS if c in usable})
    if not _alone_in(own) or not _can_make(own):
        return None
    with contextlib.suppress(OSError):
        leaf = own / _LEAF
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text(str(os.getpid()))
        offered = (own / "cgroup.controllers").read_text().split()
        wanted = " ".join(f"+{c}" for c in CONTROLLERS if c in offered)
        (own / "cgroup.subtree_control").write_text(wanted)
    usable = _enabled(own)
    return CgroupParent(2, {c: own for c in CONTROLLERS if c in usable}) if usable else None


def _enabled(folder: Path) -> set[str]:
    try:
        return set((folder / "cgroup.subtree_control").read_text().split()) & set(CONTROLLERS)
    except OSError:
        return set()


def _alone_in(folder: Path) -> bool:
    try:
        return (folder / "cgroup.procs").read_text().split() == [str(os.getpid())]
    except OSError:
        return False


def _can_make(folder: Path) -> bool:
    probe = folder / f"{_PREFIX}-{os.getpid()}-probe"
    try:
        probe.mkdir()
        usable = os.access(probe / "cgroup.procs", os.W_OK)
        probe.rmdir()
    except OSError:
        return False
    return usable
