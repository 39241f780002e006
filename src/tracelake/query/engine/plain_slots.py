"""Slots as plain processes, for machines without bubblewrap.

They keep what a process can take away from itself (``restrict``): no sockets, no programs, no files but those
attached, where the kernel has Landlock. Memory is limited by an rlimit. They share the service's user and view of
the machine, so a hole in the engine's parser is worth more here than in a sandbox.
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
from collections.abc import Callable
from pathlib import Path

import msgspec

from tracelake.query.engine import restrict
from tracelake.query.engine.limits import SlotLimits
from tracelake.query.engine.slot_process import PACKAGE, PROGRAM, SlotProcess, arguments, library_folders
from tracelake.trees import remove_if_possible
from tracelake.worker.sandbox import EndReason

_PREFIX = "tracelake-query-"


class PlainSlots:
    confined = False

    def __init__(self, limits: SlotLimits, why: str, program: str = PROGRAM) -> None:
        self._program = program
        self._limits = limits
        kept = "Landlock and seccomp" if restrict.landlock_version() else "seccomp"
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
            start_new_session=True,
        )

    async def close(self) -> None:
        """Every process is its slot's to end."""


class _Plain:
    def __init__(self, process: Process, channel: socket.socket, tidy: Callable[[], object]) -> None:
        self.channel = channel
        self._process = process
        self._tidy = tidy
        self.ended: asyncio.Future[EndReason] = asyncio.ensure_future(self._watch())

    def kill(self) -> None:
        """The template and its query: the latter can't leave the group."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _watch(self) -> EndReason:
        try:
            returncode = await self._process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            return EndReason.SIGNALED if returncode < 0 else EndReason.EXITED
        finally:
            self._tidy()


def _sweep() -> None:
    """Folders of services that were killed. Their names begin with the service's process number."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists() and folder.lstat().st_uid == os.getuid():
            remove_if_possible(folder)
