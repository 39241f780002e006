"""An operator host on a home of its own, with an operator that runs any code of a test.

``python -m tests.support.operator_scene HOME`` is a wrapper in a process of its own, for tests that kill it: it
takes one process from a host, runs the code on its standard input, prints the operator's output, and stays.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import msgspec

from tracelake import kernel
from tracelake.contracts.dispatcher_api import TaskPayload
from tracelake.contracts.operator_protocol import VERSION, Finished, FromOperator, Run
from tracelake.logs import configure_logs
from tracelake.trees import remove_tree
from tracelake.worker.host.client import HostSpec, OperatorHost, OperatorProcess

SECRETS = ("secrets.json", "worker_tokens", "dev.json", "keys/task.pem", "postgres/state/PG_VERSION")

HELD = "dataset/held"

_OPERATOR = """
from tracelake.operators.registry import operator

@operator("try_code")
def try_code(ctx):
    exec(compile(ctx.config["code"], "<tried>", "exec"), {"ctx": ctx})
"""


def make_home(folder: Path) -> HostSpec:
    """A home with secrets in it, and the spec of a host that keeps them from its operators."""
    home = folder / "home"
    for name in SECRETS:
        path = home / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text("a secret of the home\n")
        path.chmod(0o600)
    (home / "objects").mkdir(mode=0o755)
    source = home.parent / "tried_operators.py"
    source.write_text(_OPERATOR)
    return HostSpec(
        home=home,
        object_root=home / "objects",
        work_folder=home / "work" / "operators",
        operators=(str(source),),
        namespaces="required",
    )


@dataclass(frozen=True, slots=True)
class AttemptOutput:
    """The end of an attempt, and its output."""

    finished: Finished
    output: str


@asynccontextmanager
async def running_host(spec: HostSpec) -> AsyncIterator[OperatorHost]:
    host = await OperatorHost.start(spec)
    try:
        yield host
    finally:
        await host.stop()


async def clear(host: OperatorHost) -> None:
    """End all that a test started on a host that tests share, and remove what it left in the object root."""
    while host._hosted or host._removing:
        for hosted in [*host._hosted.values()]:
            await hosted.kill()
        await asyncio.gather(*host._removing)
    for left in host.spec.object_root.iterdir():
        remove_tree(left)


async def spawn(host: OperatorHost, *writes: str) -> OperatorProcess:
    """A process that can run any code, and write in these folders below the object root."""
    process = await host.spawn(host.spec.operators[0])
    for name in writes:
        folder = host.spec.object_root / name
        folder.mkdir(parents=True, exist_ok=True)
        if process.owner is not None:
            os.chown(folder, process.owner, -1)
    await process.grant([], writes)
    return process


def held_folder(spec: HostSpec) -> Path:
    """Where ``spawn(host, HELD)`` may write, and where it is seen from outside."""
    return spec.object_root / HELD


def run_message(operator: str, environment: dict[str, str] | None = None, **config: object) -> Run:
    task = {
        "task_id": str(uuid4()),
        "attempt": 1,
        "epoch": 1,
        "job": {"dag_name": "tried", "name": "job"},
        "operator": operator,
        "config": config,
        "inputs": [],
        "outputs": [],
        "runtime": "ecs_python",
        "timeout_seconds": 600,
        "heartbeat_timeout_seconds": 120,
        "update_strategy": "replace",
        "unique_key": [],
        "secrets": [],
    }
    payload = msgspec.convert(task, TaskPayload)
    return Run(version=VERSION, task=payload, environment=environment or {})


async def attempt(
    process: OperatorProcess, code: str, environment: dict[str, str] | None = None
) -> AttemptOutput:
    """Run one attempt. Processes that it leaves behind may keep the log open, so its end isn't waited for."""
    read, write = os.pipe()
    try:
        await process.run(run_message("try_code", environment, code=textwrap.dedent(code)), write)
        os.close(write)
        write = -1
        message: FromOperator = await process.receive()
        while not isinstance(message, Finished):
            message = await process.receive()
        os.set_blocking(read, False)
        output = b""
        while piece := _available(read):
            output += piece
        return AttemptOutput(message, output.decode())
    finally:
        for end in (read, write):
            if end >= 0:
                os.close(end)


async def begin(process: OperatorProcess, code: str) -> int:
    """Start an attempt that won't end by itself; return the descriptor of its output."""
    read, write = os.pipe()
    await process.run(run_message("try_code", code=textwrap.dedent(code)), write)
    os.close(write)
    return read


def _available(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except BlockingIOError:
        return b""


async def until_printed(descriptor: int, word: str) -> None:
    """Wait until the operator has printed a word; raise if its output ends without it."""
    seen = b""
    while word.encode() not in seen:
        piece = await asyncio.to_thread(os.read, descriptor, 4096)
        if not piece:
            raise AssertionError(f"never printed {word!r}: {seen.decode(errors='replace')}")
        seen += piece


HOLD_LOCK = """
import fcntl, os, signal, sys, time

def hold(name):
    '''Until it is killed, whatever else it is asked.'''
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lock = os.open(os.path.join(WORK, name), os.O_CREAT | os.O_RDWR, 0o666)
    fcntl.flock(lock, fcntl.LOCK_EX)
    print("holding", name, flush=True)
    while True:
        time.sleep(60)
"""


def code_that_holds(folder: Path, rest: str) -> str:
    """Code with a ``hold(name)`` that keeps a lock until it is killed, so that others can see when it is."""
    return f"WORK = {str(folder)!r}\n{HOLD_LOCK}\n{textwrap.dedent(rest)}"


async def until_released(path: Path) -> None:
    """The holder is gone, or never was."""

    def wait() -> None:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)

    await asyncio.to_thread(wait)


def is_held(path: Path) -> bool:
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


async def _wrapper(folder: Path, code: str) -> None:
    kernel.forbid_inspection()
    configure_logs("text", "ERROR")
    # The home is there already; what it holds was made by the test.
    spec = HostSpec(
        home=folder / "home",
        object_root=folder / "home" / "objects",
        work_folder=folder / "home" / "work" / "operators",
        operators=(str(folder / "tried_operators.py"),),
        namespaces="never" if "never" in sys.argv else "required",
    )
    async with running_host(spec) as host:
        read = await begin(await spawn(host, HELD), code)
        while piece := await asyncio.to_thread(os.read, read, 65536):
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_wrapper(Path(sys.argv[1]), sys.stdin.read()))
