"""What a sandbox is asked to run, and how a run ended. Nothing here touches the machine.

A sandbox sees: ``/usr`` with its ``/bin`` and ``/lib*``, an ``/etc`` made for it, its own ``/proc`` and a small
``/dev``, a private ``/tmp``, the code at ``/var/task``, the runtime's folders below ``/opt`` and the sockets it was
given. Everything but ``/tmp`` and ``/dev/shm`` is read-only. Its network has a loopback interface and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ReadOnlyBind:
    """A host's file or folder, shown at ``target``. Anyone must be allowed to read it (``o+rX``): the sandbox's
    user is not ours. Who may enter the folders above it doesn't matter."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """``cpu_seconds`` counts for each process, the rest for the sandbox as a whole (memory too, unless there is no
    cgroup to be had; ``SandboxReport.limits`` says so)."""

    memory_bytes: int = 256 * MIB
    cpu_seconds: int | None = None
    cpu_share: float | None = None
    processes: int = 64
    open_files: int = 256
    file_bytes: int = 512 * MIB
    tmp_bytes: int = 512 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """One program to run.

    ``env`` is the whole environment. ``sockets`` maps a path inside to a Unix socket of the host. For each port of
    ``listen`` the sandbox's own loopback gets a listening socket, held by us before the program's first
    instruction: it comes back as ``SandboxedProcess.listeners``. ``stdout`` and ``stderr`` stay the caller's to
    close.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    code: Path
    runtime: Sequence[ReadOnlyBind] = ()
    sockets: Mapping[str, Path] = field(default_factory=dict)
    listen: Sequence[int] = ()
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    cwd: str = "/var/task"
    stdout: int | None = None
    stderr: int | None = None

    def __repr__(self) -> str:
        return f"SandboxSpec({self.code}, …)"


class EndReason(StrEnum):
    EXITED = "exited"
    SIGNALED = "signaled"
    KILLED = "killed"
    OUT_OF_MEMORY = "out of memory"
    OUT_OF_CPU_TIME = "out of CPU time"


@dataclass(frozen=True, slots=True)
class SandboxExit:
    """``returncode`` is the program's own, or 128 + the signal that ended it. ``KILLED`` means by ``kill()``."""

    returncode: int
    reason: EndReason
