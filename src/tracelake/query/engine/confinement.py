"""How a slot's process is confined: in a bubblewrap sandbox, or as a plain process where there is none.

Both start the process with no environment and no descriptors but its socket, and both end it with the service,
however the service ends. ``Slots.confinement`` says which one is used.

In a sandbox the process has its own user, file system, network without a way out, and limits. It sees the
interpreter, its packages and this package, read-only; no data file has a name there. Spilled data goes to the
sandbox's private ``/tmp``, which is memory and counts as such: the limit is the sum.

A plain process gives up what a process can give up by itself (``restrict``): sockets, other programs, and files
other than those attached where the kernel has Landlock. Memory is limited by an rlimit. It shares the service's
user and view of the machine, so a hole in the engine's parser is worth more here than in a sandbox. With neither
bubblewrap nor Landlock no query is run, unless the operator allows it (``TRACELAKE_QUERY_UNCONFINED``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Iterable
from importlib import util
from pathlib import Path
from typing import Protocol

import msgspec

import tracelake
from tracelake import kernel
from tracelake.domain.errors import Unavailable
from tracelake.query.engine.restrict import MIB, MOST_DESCRIPTORS, OTHER_DESCRIPTORS, OWN_BYTES, SlotLimits
from tracelake.sandbox.bubblewrap import SandboxedProcess
from tracelake.sandbox.layout import EndReason, ReadOnlyBind, SandboxLimits, SandboxSpec, python_runtime
from tracelake.sandbox.sandbox import Sandbox
from tracelake.trees import remove_if_possible

PROGRAM = "tracelake.query.engine.boot"
PACKAGE = Path(tracelake.__file__).resolve().parent
_NEEDED = ("duckdb", "pyarrow", "numpy", "msgspec", "orjson", "sqlglot")
#: Libraries read these when they are loaded. No threads before the fork; no memory that is reserved but not used,
#: which an rlimit would count.
_SETTINGS = {"OPENBLAS_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
_BOOT = (
    f"import os, sys; sys.path[:0] = sys.argv.pop().split(':'); os.environ.update({_SETTINGS!r}); "
    "import importlib; importlib.import_module(sys.argv.pop()).main()"
)
UNCONFINED = "TRACELAKE_QUERY_UNCONFINED"
_CODE = "/opt/tracelake"
_FOLDER = "/tmp"
_PROCESSES = 64
_THREADS_OF_EACH = 8
_PREFIX = "tracelake-query-"


class SlotProcess(Protocol):
    """``ended`` is done when no process is left."""

    channel: socket.socket
    ended: asyncio.Future[EndReason]

    def kill(self) -> None:
        """Kill all of it at once; ``ended`` is done afterwards."""


class Confinement(Protocol):
    """``description`` is for people."""

    description: str
    confined: bool

    async def start(self, stderr: int) -> SlotProcess: ...

    async def close(self) -> None: ...


def arguments(program: str, setup: bytes, path: Iterable[str]) -> list[str]:
    """For an interpreter that ignores its environment, the caller's folder and ``site``."""
    return ["-I", "-S", "-B", "-c", _BOOT, setup.decode(), program, ":".join(path)]


def library_folders() -> list[Path]:
    """The folders that the program's packages are installed in: usually one."""
    found: dict[Path, None] = {}
    for name in _NEEDED:
        spec = util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"the query engine needs the package {name}")
        found[Path(spec.origin).resolve().parent.parent] = None
    return list(found)


async def best_confinement(limits: SlotLimits, *, unconfined: bool = False) -> Confinement:
    """Raises Unavailable ``NotConfined`` where nothing keeps a query from the machine's files, unless
    ``unconfined`` accepts that."""
    try:
        sandbox = await Sandbox.open()
    except Unavailable as error:
        why = " ".join(error.message.split())
        if not kernel.landlock_version() and not unconfined:
            raise _not_confined(why) from None
        return PlainSlots(limits, why)
    return SandboxedSlots(sandbox, limits)


def _not_confined(why: str) -> Unavailable:
    return Unavailable(
        "NotConfined",
        f"queries can't be kept from this machine's files: there is no sandbox ({why}) and the kernel has no "
        "Landlock. Install bubblewrap, or use a kernel with Landlock (Linux 5.13 or later); "
        f"{UNCONFINED}=1 runs queries without either",
    )


class SandboxedSlots:
    confined = True

    def __init__(self, sandbox: Sandbox, limits: SlotLimits, program: str = PROGRAM) -> None:
        self._program = program
        self._sandbox = sandbox
        self._limits = limits
        self.description = f"sandbox: {sandbox.report}"

    async def start(self, stderr: int) -> SlotProcess:
        ours, theirs = socket.socketpair()
        try:
            # Closed here once the process has it: otherwise the
            # end of the process would never be an end of file.
            with theirs:
                process = await self._sandbox.start(self._spec(theirs.fileno(), stderr))
        except BaseException:
            ours.close()
            raise
        return _Sandboxed(process, ours)

    async def close(self) -> None:
        await self._sandbox.close()

    def _spec(self, channel: int, stderr: int) -> SandboxSpec:
        python = python_runtime()
        libraries = {f"/opt/packages/{number}": folder for number, folder in enumerate(library_folders())}
        limits = self._limits
        setup = {"limits": limits, "folder": _FOLDER, "libraries": ["/opt"], "parent": 0}
        return SandboxSpec(
            argv=[
                python.executable,
                *arguments(self._program, msgspec.json.encode(setup), [_CODE, *libraries]),
            ],
            env=python.env,
            code=PACKAGE / "query" / "engine",
            runtime=[
                *python.binds,
                ReadOnlyBind(PACKAGE, f"{_CODE}/tracelake"),
                *(ReadOnlyBind(folder, target) for target, folder in libraries.items()),
            ],
            cwd="/",
            limits=SandboxLimits(
                memory_bytes=limits.memory_bytes + limits.spill_bytes + OWN_BYTES,
                processes=_PROCESSES + _THREADS_OF_EACH * limits.threads,
                open_files=MOST_DESCRIPTORS + OTHER_DESCRIPTORS,
                file_bytes=max(limits.spill_bytes, MIB),
                tmp_bytes=max(limits.spill_bytes, MIB),
            ),
            stdout=channel,
            stderr=stderr,
        )


class _Sandboxed:
    def __init__(self, process: SandboxedProcess, channel: socket.socket) -> None:
        self.channel = channel
        self._process = process
        self._killing: asyncio.Task[object] | None = None
        self.ended: asyncio.Future[EndReason] = asyncio.ensure_future(self._watch())

    def kill(self) -> None:
        if self._killing is None and not self.ended.done():
            # Kept, since the loop itself has only weak references to tasks.
            self._killing = asyncio.ensure_future(self._process.kill())

    async def _watch(self) -> EndReason:
        return (await self._process.wait()).reason


class PlainSlots:
    confined = False

    def __init__(self, limits: SlotLimits, why: str, program: str = PROGRAM) -> None:
        self._program = program
        self._limits = limits
        kept = "Landlock and seccomp" if kernel.landlock_version() else "seccomp"
        _sweep()
        self.description = f"plain processes with rlimits, {kept}: {why}"

    async def start(self, stderr: int) -> SlotProcess:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await self._execute(folder, theirs.fileno(), stderr)
        except BaseException:
            ours.close()
            remove_if_possible(folder)
            raise
        return _Plain(process, ours, lambda: remove_if_possible(folder))

    async def _execute(self, folder: Path, channel: int, stderr: int) -> Process:
        libraries = [str(library) for library in library_folders()]
        setup = {
            "limits": self._limits,
            "folder": str(folder),
            "libraries": [*libraries, str(PACKAGE), sys.base_prefix],
            "parent": os.getpid(),
        }
        return await asyncio.create_subprocess_exec(
            str(getattr(sys, "_base_executable", None) or sys.executable),
            *arguments(self._program, msgspec.json.encode(setup), [str(PACKAGE.parent), *libraries]),
            stdin=DEVNULL,
            stdout=channel,
            stderr=stderr,
            env={},
            cwd="/",
            # A process group of its own: ``killpg`` reaches the
            # fork too, and a Ctrl-C in the terminal reaches none.
            start_new_session=True,
        )

    async def close(self) -> None:
        """Does nothing: each slot ends its own process."""


class _Plain:
    def __init__(self, process: Process, channel: socket.socket, tidy: Callable[[], object]) -> None:
        self.channel = channel
        self._process = process
        self._tidy = tidy
        self.ended: asyncio.Future[EndReason] = asyncio.ensure_future(self._watch())

    def kill(self) -> None:
        """Kills the template and its query, which can't leave the process group."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _watch(self) -> EndReason:
        try:
            # A fork may outlive its template for a moment, so
            # the group is killed after the template has ended.
            returncode = await self._process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            return EndReason.SIGNALED if returncode < 0 else EndReason.EXITED
        finally:
            self._tidy()


def _sweep() -> None:
    """Removes folders of services that were killed. Their names begin with the service's process number."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        # Other users can make folders of this name in a shared temporary folder.
        if owner.isdigit() and not Path("/proc", owner).exists() and folder.lstat().st_uid == os.getuid():
            remove_if_possible(folder)
