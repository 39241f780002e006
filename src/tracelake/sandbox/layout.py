"""A sandbox's specification, its file system as bubblewrap arguments, and its exit. Only reads the host.

A sandbox sees: ``/usr`` with its ``/bin`` and ``/lib*``, an ``/etc`` made for it, its own ``/proc`` and a small
``/dev``, a private ``/tmp``, the code at ``/var/task``, the runtime's folders below ``/opt`` and the sockets it
was given. Everything but ``/tmp`` and ``/dev/shm`` is read-only. Its network has a loopback interface and nothing
else.

The environment is given by ``--setenv``, and bubblewrap itself is executed with none: its own would be readable
inside as ``/proc/1/environ``. The arguments go through a descriptor, so that ``/proc/1/cmdline`` doesn't reveal
the host's paths either.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tracelake.domain.errors import Invalid
from tracelake.sandbox import launcher

MIB = 1024 * 1024
INSIDE_UID = 1000
_SHARED_MEMORY_BYTES = 64 * MIB
_SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_HOST_ETC = ("ld.so.cache", "alternatives")
FILES = {
    "/etc/passwd": f"sandbox:x:{INSIDE_UID}:{INSIDE_UID}:sandbox:/tmp:/bin/sh\n",
    "/etc/group": f"sandbox:x:{INSIDE_UID}:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_ISOLATION = (
    *("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
    *("--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID), "--hostname", "sandbox"),
    *("--seccomp", str(launcher.SECCOMP_FD), "--info-fd", str(launcher.INFO_FD)),
    *("--json-status-fd", str(launcher.STATUS_FD), "--block-fd", str(launcher.BLOCK_FD)),
)


@dataclass(frozen=True, slots=True)
class ReadOnlyBind:
    """A file or folder of the host, shown at ``target``. Every user must be allowed to read it (``o+rX``), since
    the sandbox's user is not ours. Permissions of the folders above it don't matter."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """``cpu_seconds`` applies to each process, the rest to the sandbox as a whole (memory to each process too if
    there is no cgroup; see ``SandboxReport.limits``)."""

    memory_bytes: int = 256 * MIB
    cpu_seconds: int | None = None
    cpu_share: float | None = None
    processes: int = 64
    open_files: int = 256
    file_bytes: int = 512 * MIB
    tmp_bytes: int = 512 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """One program to run. ``env`` is the whole environment. ``sockets`` maps a path inside to a Unix socket of
    the host. For each port of ``listen`` the sandbox's own loopback gets a listening socket, held by us before
    the program's first instruction: it comes back as ``SandboxedProcess.listeners``. The caller closes ``stdout``
    and ``stderr``.
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


@dataclass(frozen=True, slots=True)
class PythonRuntime:
    """An interpreter for functions with its standard library and installed packages, but nothing of ours. ``env``
    lets it find its own libraries at the new place."""

    executable: str
    binds: tuple[ReadOnlyBind, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def python_runtime() -> PythonRuntime:
    """The current interpreter, at ``/opt/python`` unless it belongs to the system."""
    program = Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()
    prefix = Path(sys.base_prefix).resolve()
    if prefix.is_relative_to("/usr"):
        return PythonRuntime(str(program))
    inside = f"/opt/python/{program.relative_to(prefix)}" if program.is_relative_to(prefix) else None
    if inside is None:
        raise Invalid("InterpreterUnknown", f"{program} is not below its own prefix {prefix}")
    return PythonRuntime(
        inside, (ReadOnlyBind(prefix, "/opt/python"),), {"LD_LIBRARY_PATH": "/opt/python/lib"}
    )


def check_spec(spec: SandboxSpec) -> None:
    """Refuse values that bubblewrap would misread, and mistakes that only the caller can correct."""
    texts = [
        *spec.argv,
        *spec.env,
        *spec.env.values(),
        spec.cwd,
        *spec.sockets,
        *(b.target for b in spec.runtime),
    ]
    if any("\0" in text for text in texts) or any("=" in name or not name for name in spec.env):
        raise Invalid(
            "SandboxSpecInvalid", "arguments and environment of a sandbox can't hold NUL characters"
        )
    for target in (*spec.sockets, *(bind.target for bind in spec.runtime)):
        if not target.startswith(("/opt/", "/run/")) or ".." in target.split("/"):
            raise Invalid("SandboxSpecInvalid", f"{target}: bind targets must be below /opt or /run")
    for descriptor in (spec.stdout, spec.stderr):
        if descriptor is not None and stat.S_ISREG(os.fstat(descriptor).st_mode):
            message = (
                "a sandbox writes to a pipe: it could open a file anew by /proc/self/fd, and read or cut it"
            )
            raise Invalid("SandboxSpecInvalid", message)


def sources(spec: SandboxSpec) -> list[Path]:
    """The host's paths that the spec shows, in the order of ``arguments``."""
    # Resolved here: the launcher opens them without following a link.
    return [path.resolve(strict=True) for path, _ in _shown(spec)]


def _shown(spec: SandboxSpec) -> list[tuple[Path, str]]:
    runtime = [(bind.source, bind.target) for bind in spec.runtime]
    return [(spec.code, "/var/task"), *runtime, *((path, target) for target, path in spec.sockets.items())]


def arguments(spec: SandboxSpec, places: Sequence[str]) -> list[str]:
    """``places``: where bubblewrap finds each of ``sources``. The root is made read-only last."""
    given = [*_ISOLATION, "--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM_FOLDERS:
        host = Path("/", name)
        if host.is_symlink():
            given += ["--symlink", os.readlink(host).removeprefix("/"), f"/{name}"]
        elif host.is_dir():
            given += ["--ro-bind", str(host), f"/{name}"]
    for name in _HOST_ETC:
        if Path("/etc", name).exists():
            given += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
    for number, target in enumerate(FILES):
        given += ["--perms", "0444", "--file", str(launcher.FIRST_FILE_FD + number), target]
    given += ["--proc", "/proc", "--dev", "/dev"]
    shared = min(spec.limits.tmp_bytes, _SHARED_MEMORY_BYTES)
    given += ["--size", str(shared), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    given += ["--perms", "1777", "--size", str(spec.limits.tmp_bytes), "--tmpfs", "/tmp"]
    for place, (_, target) in zip(places, _shown(spec), strict=True):
        given += ["--ro-bind", place, target]
    given += ["--remount-ro", "/", "--chdir", spec.cwd]
    for name, value in spec.env.items():
        given += ["--setenv", name, value]
    return given


def unreadable(paths: Sequence[Path]) -> Path | None:
    """The first path that another user couldn't open."""
    for path in paths:
        mode = path.stat().st_mode
        # To connect to a socket takes the right to write.
        wanted = 0o005 if stat.S_ISDIR(mode) else 0o006 if stat.S_ISSOCK(mode) else 0o004
        if mode & wanted != wanted:
            return path
    return None
