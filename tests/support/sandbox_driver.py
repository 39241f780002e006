"""Runs programs in a sandbox from a process of its own, as root or as a user without any rights.

A test passes a list of ``Run``s and gets an ``Outcome`` for each. The driver itself is the bait: it listens on
a loopback port and on an abstract Unix socket, has a secret in its environment, and a file that anyone may
read; ``BAIT`` in a program's arguments stands for all that, as JSON. After each run it looks for processes of
the program that are left.

Under root, a user without rights couldn't reach an interpreter below a private home, so the driver makes it
visible in a mount namespace before it drops its rights.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import tracelake
from tracelake.sandbox import launcher
from tracelake.sandbox.layout import SandboxLimits, SandboxSpec, python_runtime
from tracelake.sandbox.sandbox import Sandbox

HIDDEN = "an-environment-that-must-not-be-seen"
BAIT = "@bait"
PYTHON = "@python"
LAUNCHERS = ("root", "unprivileged") if os.geteuid() == 0 else ("unprivileged",)
_OTHER_USER = 61_999
_MAX_OUTPUT = 1024 * 1024


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """``code`` is text by file name; ``seconds`` is when the run is killed from outside."""

    argv: list[str]
    code: dict[str, str] = {}
    limits: dict[str, int | float | None] = {}
    seconds: float = 60.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """``left`` counts the program's processes that outlived it; ``most`` are those that were seen at once."""

    returncode: int
    reason: str
    output: str
    left: int
    most: int


def run_in_sandboxes(launcher_name: str, runs: Sequence[Run]) -> list[Outcome]:
    """One driver for all of them."""
    answered = subprocess.run(
        driver_command(launcher_name),
        input=msgspec.json.encode(runs),
        stdout=subprocess.PIPE,
        env={**os.environ, "HIDDEN": HIDDEN},
        check=False,
    )
    if answered.returncode != 0:
        raise AssertionError(
            "the sandbox could not be used; is bubblewrap missing? scripts/install-system-packages installs it"
        )
    return msgspec.json.decode(answered.stdout, type=list[Outcome])


def driver_command(launcher_name: str) -> list[str]:
    other_user = ["--other-user"] if launcher_name == "unprivileged" and os.geteuid() == 0 else []
    return [sys.executable, "-m", "tests.support.sandbox_driver", *other_user]


def processes_with(token: str) -> list[int]:
    """Every process of the machine whose arguments hold the token, but for us."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if token.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _become_other_user() -> None:
    base = Path(sys.base_prefix)
    program = Path(sys._base_executable if hasattr(sys, "_base_executable") else sys.executable).resolve()
    checkout = Path(__file__).resolve().parents[2]
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    launcher.stage([str(base), str(checkout / "src"), str(checkout), *libraries])
    scratch = f"{launcher.STAGE}/scratch"
    os.mkdir(scratch)
    os.chown(scratch, _OTHER_USER, _OTHER_USER)
    os.setgroups([])
    os.setresgid(_OTHER_USER, _OTHER_USER, _OTHER_USER)
    os.setresuid(_OTHER_USER, _OTHER_USER, _OTHER_USER)
    places = [f"{launcher.STAGE}/{number}" for number in range(1, 3 + len(libraries))]
    environment = {"PYTHONPATH": ":".join(places), "TMPDIR": scratch, "PATH": os.defpath, "HIDDEN": HIDDEN}
    argv = [
        f"{launcher.STAGE}/0/{program.relative_to(base.resolve())}",
        "-m",
        "tests.support.sandbox_driver",
    ]
    os.execve(argv[0], argv, environment)


async def _drive(runs: list[Run]) -> list[Outcome]:
    sandbox = await Sandbox.open()
    try:
        return [await _run(sandbox, run) for run in runs]
    finally:
        await sandbox.close()


async def _run(sandbox: Sandbox, run: Run) -> Outcome:
    python = python_runtime()
    token = f"run-{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        bait = _escape_targets(Path(folder), listener.getsockname()[1])
        with socket.socket(socket.AF_UNIX) as abstract:
            abstract.bind(f"\0{bait['abstract']}")
            abstract.listen()
            words = {PYTHON: python.executable, BAIT: json.dumps(bait)}
            spec = SandboxSpec(
                argv=[words.get(word, word) for word in run.argv] + [token],
                env={**python.env, "OWN": "variable"},
                code=_write_code(Path(folder, "code"), run.code),
                runtime=python.binds,
                limits=msgspec.convert(run.limits, SandboxLimits),
            )
            return await _watch(sandbox, spec, run.seconds, token)


async def _watch(sandbox: Sandbox, spec: SandboxSpec, seconds: float, token: str) -> Outcome:
    read, write = os.pipe()
    reading = asyncio.ensure_future(asyncio.to_thread(_read_all, read))
    try:
        started = await sandbox.start(dataclasses.replace(spec, stdout=write, stderr=write))
    finally:
        os.close(write)
    most = 0
    ending = asyncio.ensure_future(started.wait())
    until = asyncio.get_running_loop().time() + seconds
    while not ending.done() and asyncio.get_running_loop().time() < until:
        await asyncio.wait({ending}, timeout=0.1)
        most = max(most, len(processes_with(token)))
    ended = await started.kill()
    left = len(processes_with(token))
    return Outcome(
        returncode=ended.returncode, reason=ended.reason, output=await reading, left=left, most=most
    )


def _write_code(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir()
    folder.chmod(0o755)
    for name, text in files.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o644)
    return folder


def _escape_targets(folder: Path, port: int) -> dict[str, Any]:
    folder.chmod(0o755)
    file = folder / "bait"
    file.write_text("host file")
    file.chmod(0o644)
    return {
        "file": str(file),
        "port": port,
        "abstract": f"bait-{uuid.uuid4().hex}",
        # Backwards: a program that searches other processes for it must not find its own argument.
        "secret": HIDDEN[::-1],
        "pid": os.getpid(),
        "package": str(Path(tracelake.__file__).resolve()),
    }


def _read_all(descriptor: int) -> str:
    output = bytearray()
    while piece := os.read(descriptor, 65536):
        output += piece[: max(0, _MAX_OUTPUT - len(output))]
    os.close(descriptor)
    return output.decode(errors="replace")


def main() -> None:
    if "--other-user" in sys.argv:
        _become_other_user()
    runs = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Run])
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(_drive(runs))))


if __name__ == "__main__":
    main()
