"""``python -m tracelake.dev.demo`` (or: ``make demo``)

A range of blocks is asked for and cut into chunks inside the Dispatcher; each chunk goes through a query on Spark,
an operator in Python and a function in the sandbox. On the way the Spark worker and the Dispatcher are killed with
SIGKILL. The exit code is 0 only if every chunk came out at the end exactly once, and the figures are right.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tracelake.client import Client
from tracelake.contracts.user_api import PartitionSummary, TaskSummary
from tracelake.dev.handle import DEV_FILE, DevHandle, read_handle
from tracelake.domain.errors import TracelakeError, Unavailable

BLOCKS = 12_000
CHUNK = 1_000
CHUNKS = BLOCKS // CHUNK
JOBS = ("squares", "sums", "checked")
DEADLINE_SECONDS = 240.0
IN_SANDBOX = """runtime: lambda
    udf: { bundle: "BUNDLE", entrypoint: checked.handler }"""
IN_PYTHON = """runtime: ecs_python
    operator: noop"""
FUNCTION = """
from tracelake_function import Task

def handler(event, context):
    task = Task(event)
    print(f"blocks {task.start} to {task.end} came through")
"""


def main() -> int:
    console = Console()
    console.print("[bold]Tracelake[/bold]: events in, leased tasks out, every output committed once.\n")
    with tempfile.TemporaryDirectory(prefix="tracelake-demo-") as folder:
        began = time.monotonic()
        home = Path(folder) / "home"
        with _stack(home) as handle, Client(handle.user_url, handle.user_token) as client:
            console.print(
                f"started two Postgres servers, a Dispatcher, a Spark server and workers for all runtimes "
                f"in {time.monotonic() - began:.1f} s"
            )
            if not (sandbox := "worker-lambda" in handle.pids):
                console.print(
                    "no sandbox here (tracelake doctor says why): a no-op stands in for the function"
                )
            _deploy(client, sandbox)
            client.trigger("demo", "request", start=0, end=BLOCKS - 1)
            console.print(f"deployed [bold]demo[/bold] and asked for blocks 0 to {BLOCKS - 1:,}\n")
            work_began = time.monotonic()
            _watch(console, client, home)
            return _report(console, client, time.monotonic() - work_began)


@contextlib.contextmanager
def _stack(home: Path) -> Iterator[DevHandle]:
    command = [sys.executable, "-m", "tracelake", "dev", "--home", str(home)]
    command += ["--user-port", "0", "--internal-port", "0", "--operators", "tracelake.dev.demo.operators"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if line.strip() == "ready":
                    break
            else:
                raise SystemExit("tracelake dev did not start:\n" + "".join(said))
            yield _handle(home)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=20)


def _handle(home: Path) -> DevHandle:
    handle = read_handle(home / DEV_FILE, DevHandle)
    assert handle is not None
    return handle


def _deploy(client: Client, sandbox: bool) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("checked.py", FUNCTION)
    archive.seek(0)
    bundle, _ = client.push_bundle(archive)
    yaml = resources.files("tracelake.dev.demo").joinpath("dag.yaml").read_text(encoding="utf-8")
    if not sandbox:
        yaml = yaml.replace(IN_SANDBOX, IN_PYTHON)
    client.deploy(yaml.replace("BUNDLE", bundle.bundle).encode())


def _watch(console: Console, client: Client, home: Path) -> None:
    """Progress until all is done; on the way a worker and the Dispatcher get killed."""
    to_kill = [("worker-ecs_spark", CHUNKS // 4), ("dispatcher", CHUNKS // 2)]
    deadline = time.monotonic() + DEADLINE_SECONDS
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bars = {job: progress.add_task(job, total=CHUNKS) for job in JOBS}
        while time.monotonic() < deadline:
            done = {job: _count(client, job) for job in JOBS}
            for job, bar in bars.items():
                if done[job] is not None:
                    progress.update(bar, completed=done[job])
            if all(count == CHUNKS for count in done.values()):
                return
            if to_kill and (done["sums"] or 0) >= to_kill[0][1]:
                part, _ = to_kill.pop(0)
                os.kill(_handle(home).pids[part], signal.SIGKILL)
                progress.console.print(f"  killed {part} (SIGKILL); it is started again by itself")
            time.sleep(0.2)


def _count(client: Client, job: str) -> int | None:
    """How many tasks of a job are completed; None while the Dispatcher is away."""
    try:
        return len(client.tasks(dag="demo", job=job, status="Completed", limit=1000).tasks)
    except Unavailable:
        return None


def _report(console: Console, client: Client, seconds: float) -> int:
    expected = [(start, start + CHUNK - 1) for start in range(0, BLOCKS, CHUNK)]
    came_out = client.partitions("checked", limit=1000).partitions
    sums = client.partitions("sums", limit=1000).partitions
    tasks = [task for job in JOBS for task in client.tasks(dag="demo", job=job, limit=1000).tasks]
    exact = [(entry.start, entry.end) for entry in came_out] == expected
    total = sum(_totals(sums))
    right = total == sum(block * block for block in range(BLOCKS))
    once = len(tasks) == len(JOBS) * CHUNKS and all(task.status == "Completed" for task in tasks)
    again = sum(max(0, task.attempt - 1) for task in tasks)
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("chunks asked for", f"{CHUNKS}")
    table.add_row("chunks that came out", f"{len(came_out)}", _verdict(exact, "each exactly once"))
    table.add_row("tasks completed", f"{_completed(tasks)}", _verdict(once, "each by its runtime"))
    table.add_row("sum of all squares", f"{total:,}", _verdict(right, "as arithmetic has it"))
    table.add_row("attempts taken over", f"{again}", _verdict(again > 0, "from the worker that was killed"))
    table.add_row("time", f"{seconds:.1f} s", "with a killed worker and a killed Dispatcher in it")
    console.print()
    console.print(table)
    return 0 if exact and once and right and again > 0 else 1


def _completed(tasks: list[TaskSummary]) -> int:
    return sum(task.status == "Completed" for task in tasks)


def _totals(partitions: list[PartitionSummary]) -> Iterator[int]:
    """Read back what was committed, by the list of files that the commit names."""
    import pyarrow.parquet as pq

    for partition in partitions:
        for location in partition.files:
            path = unquote(urlsplit(location).path)
            yield from (int(total) for total in pq.read_table(path).column("total").to_pylist())


def _verdict(held: bool, text: str) -> str:
    return f"[green]✓[/green] {text}" if held else f"[red]✗ not so:[/red] {text}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TracelakeError as error:
        sys.exit(f"error: {error.message}")
