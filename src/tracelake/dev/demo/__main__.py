"""``python -m tracelake.dev.demo`` (or: ``make demo``)

A chain becomes tables: its past as Parquet, in chunks, on Spark; its present in Postgres, block by block. On the
way the Spark worker and the Dispatcher are killed with SIGKILL, and the chain replaces its last blocks by others.
The exit code is 0 only if everything that is stored in the end is what the chain has, each chunk exactly once.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import psycopg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tracelake.client import Client
from tracelake.dev.demo import check
from tracelake.dev.demo.surroundings import growing, handle_of, stack
from tracelake.domain.errors import NotFound, TracelakeError, Unavailable
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import running

PAST = 1_200
CHUNK = 100
CHUNKS = PAST // CHUNK
REORG_DEPTH = 5
BLOCK_SECONDS = 0.5
JOBS = ("history", "checked")
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
    console.print("[bold]Tracelake[/bold]: a chain in, complete tables out, every output committed once.\n")
    chain = DevChain(seed=1, blocks=PAST + 20)
    with tempfile.TemporaryDirectory(prefix="tracelake-demo-") as name, running(chain) as node:
        folder, began = Path(name), time.monotonic()
        with stack(folder, node.url) as handle, Client(handle.user_url, handle.user_token) as client:
            console.print(
                f"started two Postgres servers, a Dispatcher, a Spark server and workers for all runtimes "
                f"in {time.monotonic() - began:.1f} s"
            )
            if not (sandbox := "worker-lambda" in handle.pids):
                console.print(
                    "no sandbox here (tracelake doctor says why): a no-op stands in for the function"
                )
            _deploy(client, chain, sandbox)
            client.trigger("demo", "request", start=0, end=PAST - 1)
            console.print(
                f"deployed [bold]demo[/bold]: blocks 0 to {PAST - 1:,} were asked for, later ones are followed\n"
            )
            began = time.monotonic()
            with growing(chain, BLOCK_SECONDS):
                _watch_the_past(console, client, folder)
                _change_the_present(console, client, chain, folder)
            _wait(lambda: _is_followed(client, chain, folder))
            return _report(console, client, chain, folder, time.monotonic() - began)


def _deploy(client: Client, chain: DevChain, sandbox: bool) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("checked.py", FUNCTION)
    archive.seek(0)
    bundle, _ = client.push_bundle(archive)
    yaml = resources.files("tracelake.dev.demo").joinpath("dag.yaml").read_text(encoding="utf-8")
    if not sandbox:
        yaml = yaml.replace(IN_SANDBOX, IN_PYTHON)
    for name, value in {
        "BUNDLE": bundle.bundle,
        "CHAIN_ID": str(chain.chain_id),
        "CHUNK_SIZE": str(CHUNK),
        "START_BLOCK": str(PAST),
    }.items():
        yaml = yaml.replace(name, value)
    client.deploy(yaml.encode())


def _watch_the_past(console: Console, client: Client, folder: Path) -> None:
    """Progress until all chunks are there; on the way a worker and the Dispatcher get killed."""
    to_kill = [("worker-ecs_spark", CHUNKS // 4), ("dispatcher", CHUNKS // 2)]
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bars = {job: progress.add_task(job, total=CHUNKS) for job in JOBS}

        def all_done() -> bool:
            done = {job: _completed(client, job) for job in JOBS}
            for job, bar in bars.items():
                if done[job] is not None:
                    progress.update(bar, completed=done[job])
            if to_kill and (done["history"] or 0) >= to_kill[0][1]:
                part, _ = to_kill.pop(0)
                os.kill(handle_of(folder).pids[part], signal.SIGKILL)
                progress.console.print(f"  killed {part} (SIGKILL); it is started again by itself")
            return all(count == CHUNKS for count in done.values())

        _wait(all_done)


def _change_the_present(console: Console, client: Client, chain: DevChain, folder: Path) -> None:
    _wait(lambda: _is_followed(client, chain, folder))
    head = chain.reorg(REORG_DEPTH)
    console.print(f"  the chain replaced its blocks {head - REORG_DEPTH + 1:,} to {head:,} by others")


def _completed(client: Client, job: str) -> int | None:
    """How many tasks of a job are completed; None while the Dispatcher is away."""
    try:
        return len(client.tasks(dag="demo", job=job, status="Completed", limit=1000).tasks)
    except Unavailable:
        return None


def _is_followed(client: Client, chain: DevChain, folder: Path) -> bool:
    """The chain's last blocks are in Postgres, and what was made of them is too."""
    try:
        data_dsn = handle_of(folder).data_dsn
        followed = check.hot_hashes(client, data_dsn, "blocks")[-1:]
        decoded = check.hot_rows(client, data_dsn, "transfers")
    except (NotFound, Unavailable, psycopg.Error):
        return False
    return followed == [chain.blocks(chain.head, chain.head)[0].hash] and decoded == check.count_transfers(
        chain, PAST, chain.head
    )


def _wait(is_so: Callable[[], bool]) -> None:
    """What never comes is for the report to say."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.2)


def _report(console: Console, client: Client, chain: DevChain, folder: Path, seconds: float) -> int:
    data_dsn, head = handle_of(folder).data_dsn, chain.head
    tasks = [task for job in JOBS for task in client.tasks(dag="demo", job=job, limit=1000).tasks]
    came_out = [(entry.start, entry.end) for entry in client.partitions("checked", limit=1000).partitions]
    again = sum(max(0, task.attempt - 1) for task in tasks)
    past, present = check.stored_hashes(client, "old_blocks"), check.hot_hashes(client, data_dsn, "blocks")
    logs = check.stored_rows(client, "old_logs") + check.hot_rows(client, data_dsn, "logs")
    transfers = check.hot_rows(client, data_dsn, "transfers")
    checks = [
        (
            "chunks of the past",
            f"{len(came_out)}",
            came_out == [(start, start + CHUNK - 1) for start in range(0, PAST, CHUNK)]
            and len(tasks) == len(JOBS) * CHUNKS,
            "each exactly once",
        ),
        ("blocks in Parquet", f"{len(past):,}", past == check.hashes(chain, 0, PAST - 1), "hash by hash"),
        (
            "blocks in Postgres",
            f"{len(present):,}",
            present == check.hashes(chain, PAST, head),
            "after the reorg",
        ),
        ("logs in both", f"{logs:,}", logs == check.count_logs(chain, 0, head), "as many as the chain has"),
        (
            "transfers decoded",
            f"{transfers:,}",
            transfers == check.count_transfers(chain, PAST, head),
            "none of the old fork",
        ),
        ("attempts taken over", f"{again}", again > 0, "from the worker that was killed"),
    ]
    table = Table(show_header=False, box=None, padding=(0, 2))
    for what, figure, held, text in checks:
        table.add_row(what, figure, f"[green]✓[/green] {text}" if held else f"[red]✗ not so:[/red] {text}")
    table.add_row("time", f"{seconds:.1f} s", "with two kills and a reorg in it")
    console.print()
    console.print(table)
    return 0 if all(held for _, _, held, _ in checks) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TracelakeError as error:
        sys.exit(f"error: {error.message}")
