"""Run programs in a sandbox from a process of its own, as root or as somebody without any rights.

A test hands over a list of ``Run``s and gets an ``Outcome`` for each. The driver itself is the bait: it listens on
a loopback port and on an abstract Unix socket, has a secret in its environment, and a file that anyone may read;
``BAIT`` in a program's arguments stands for all that, as JSON. After each run it looks for processes of the program
that are still there.

As root, somebody without rights couldn't reach an interpreter below a private home, so for that the driver shows
itself what it needs in a mount namespace before it gives its rights away.
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

from tracelake.worker.sandbox import Sandbox, SandboxLimits, SandboxSpec, launcher
from tracelake.worker.sandbox.layout import python_runtime

HIDDEN = "an-environment-that-must-not-be-seen"
BAIT = "@bait"
PYTHON = "@python"
LAUNCHERS = ("root", "unprivileged") if os.geteuid() == 0 else ("unprivileged",)
_SOMEBODY = 61_999
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
    somebody = ["--somebody"] if launcher_name == "unprivileged" and os.geteuid() == 0 else []
    return [sys.executable, "-m", "tracelake.testing.sandbox_driver", *somebody]


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


def _become_somebody() -> None:
    base = Path(sys.base_prefix)
    program = Path(sys._base_executable if hasattr(sys, "_base_executable") else sys.executable).resolve()
    package = Path(__file__).resolve().parents[2]
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    launcher.stage([str(base), str(package), *libraries])
    scratch = f"{launcher.STAGE}/scratch"
    os.mkdir(scratch)
    os.chown(scratch, _SOMEBODY, _SOMEBODY)
    os.setgroups([])
    os.setresgid(_SOMEBODY, _SOMEBODY, _SOMEBODY)
    os.setresuid(_SOMEBODY, _SOMEBODY, _SOMEBODY)
    places = [f"{launcher.STAGE}/{number}" for number in range(1, 2 + len(libraries))]
    environment = {"PYTHONPATH": ":".join(places), "TMPDIR": scratch, "PATH": os.defpath, "HIDDEN": HIDDEN}
    argv = [
        f"{launcher.STAGE}/0/{program.relative_to(base.resolve())}",
        "-m",
        "tracelake.testing.sandbox_driver",
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
        bait = _bait(Path(folder), listener.getsockname()[1])
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


def _bait(folder: Path, port: int) -> dict[str, Any]:
    folder.chmod(0o755)
    file = folder / "bait"
    file.write_text("host file")
    file.chmod(0o644)
    return {
        "file": str(file),
        "port": port,
        "abstract": f"bait-{uuid.uuid4().hex}",
        # Backwards: a program that looks for it in other processes must not find what it was told itself.
        "secret": HIDDEN[::-1],
        "pid": os.getpid(),
        "package": str(Path(__file__).resolve()),
    }


def _read_all(descriptor: int) -> str:
    said = bytearray()
    while piece := os.read(descriptor, 65536):
        said += piece[: max(0, _MAX_OUTPUT - len(said))]
    os.close(descriptor)
    return said.decode(errors="replace")


def main() -> None:
    if "--somebody" in sys.argv:
        _become_somebody()
    runs = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Run])
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(_drive(runs))))


if __name__ == "__main__":
    main()
