"""Limits that hold for a sandbox as a whole: control groups, version 2 or 1, whichever is to be had.

A sandbox's group is made below our own, so what holds for the worker holds for its sandboxes too. Version 2 wants
a group with controllers to have no processes of its own: if the worker's group was delegated to it and it is alone
there, it moves into a leaf; otherwise it looks for a place beside itself. What can't be had is left to rlimits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tracelake.worker.sandbox.spec import SandboxLimits

CONTROLLERS = ("memory", "pids", "cpu")
_PREFIX = "tracelake-sandbox"
_LEAF = "tracelake-worker"
_PERIOD_MICROSECONDS = 100_000
_REMOVAL_TRIES = 250
_REMOVAL_PAUSE = 0.02
#: bubblewrap itself, its reaper inside, and the doorman count as well.
OVERHEAD_PROCESSES = 3


@dataclass(frozen=True, slots=True)
class CgroupParent:
    """Where groups are made: the folder of each controller. With version 2 they are one and the same."""

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
        """Remove what workers that were killed left behind. Names begin with the worker's process number."""
        for parent in set(self.folders.values()):
            for folder in parent.glob(f"{_PREFIX}-*"):
                owner = folder.name.removeprefix(f"{_PREFIX}-").split("-")[0]
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
                if (folder / "cgroup.kill").exists():
                    (folder / "cgroup.kill").write_text("1")
                for pid in (folder / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> bool:
        """Whether it's gone; processes that were killed hold it until the kernel has done with them."""
        for folder in self.distinct():
            with contextlib.suppress(OSError):
                folder.rmdir()
        return not any(folder.exists() for folder in self.distinct())


async def empty_and_remove(cgroup: Cgroup) -> None:
    """The kernel counts a process in for a moment after its end."""
    for _ in range(_REMOVAL_TRIES):
        cgroup.kill()
        if cgroup.remove():
            return
        await asyncio.sleep(_REMOVAL_PAUSE)


def _settings(version: int, controller: str, limits: SandboxLimits) -> Iterator[tuple[str, str, bool]]:
    """File, value, and whether a kernel without that file is of no use."""
    quota = None if limits.cpu_share is None else max(1000, int(limits.cpu_share * _PERIOD_MICROSECONDS))
    if controller == "pids":
        yield "pids.max", str(limits.processes + OVERHEAD_PROCESSES), True
    elif controller == "memory" and version == 2:
        yield "memory.max", str(limits.memory_bytes), True
        yield "memory.swap.max", "0", False
        yield "memory.oom.group", "1", False
    elif controller == "memory":
        yield "memory.limit_in_bytes", str(limits.memory_bytes), True
        yield "memory.memsw.limit_in_bytes", str(limits.memory_bytes), False
    elif quota is not None and version == 2:
        yield "cpu.max", f"{quota} {_PERIOD_MICROSECONDS}", True
    elif quota is not None:
        yield "cpu.cfs_period_us", str(_PERIOD_MICROSECONDS), True
        yield "cpu.cfs_quota_us", str(quota), True


def find_parent(proc: Path = Path("/proc/self")) -> CgroupParent | None:
    """The best place there is, or None. Asks by making a group: permissions alone don't tell."""
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
