"""The demo: the control plane on this machine, a worker that hangs, a Dispatcher that is killed, and a count.

    python -m tracelake.dev.demo      (or: make demo)

A range of blocks is asked for, cut into chunks inside the Dispatcher, and each chunk goes through two jobs on
two worker processes. One worker hangs in the middle of its work; the Dispatcher is killed with SIGKILL.
The exit code is 0 only if every chunk came out at the end exactly once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

BLOCKS = 200_000
CHUNK = 1_000
CHUNKS = BLOCKS // CHUNK
JOBS = ("ingest", "transform")
DEADLINE_SECONDS = 180.0
STALL_AFTER = 60


def main() -> int:
    console = Console()
    console.print("[bold]Tracelake[/bold]: events in, leased tasks out, every output committed once.\n")
    with tempfile.TemporaryDirectory(prefix="tracelake-demo-") as folder, contextlib.ExitStack() as stack:
        began = time.monotonic()
        home = Path(folder) / "home"
        handle = stack.enter_context(_stack(home))
        console.print(f"started a Postgres, a queue and a Dispatcher in {time.monotonic() - began:.1f} s")
        with httpx.Client(
            base_url=handle["user_url"],
            headers={"Authorization": f"Bearer {handle['user_token']}"},
            timeout=30,
        ) as api:
            yaml = resources.files("tracelake.dev").joinpath("demo_dag.yaml").read_text(encoding="utf-8")
            api.post("/v1/dags", content=yaml).raise_for_status()
            api.post(
                "/v1/sources/demo/request/trigger", json={"start": 0, "end": BLOCKS - 1}
            ).raise_for_status()
            console.print(f"deployed [bold]demo[/bold] and asked for blocks 0 to {BLOCKS - 1:,}\n")
            stack.enter_context(_worker(home, "worker-1", ["--stall-after", str(STALL_AFTER)]))
            stack.enter_context(_worker(home, "worker-2", []))
            work_began = time.monotonic()
            _watch(console, api, handle)
            return _report(console, api, time.monotonic() - work_began)


@contextlib.contextmanager
def _stack(home: Path) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "tracelake", "dev", "--home", str(home), "--no-workers"]
    command += ["--user-port", "0", "--internal-port", "0"]
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
            yield json.loads((home / "dev.json").read_text())
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=20)


@contextlib.contextmanager
def _worker(home: Path, name: str, options: list[str]) -> Iterator[None]:
    command = [sys.executable, "-m", "tracelake.dev.demo_worker", str(home / "dev.json"), name, *options]
    environment = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LANG")}
    log = (home / "logs" / f"{name}.log").open("w")
    with log, subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process:
        try:
            yield
        finally:
            process.kill()


def _watch(console: Console, api: httpx.Client, handle: dict[str, Any]) -> None:
    """Progress until all is done; on the way the Dispatcher gets killed."""
    killed = False
    deadline = time.monotonic() + DEADLINE_SECONDS
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bars = {job: progress.add_task(job, total=CHUNKS) for job in JOBS}
        while time.monotonic() < deadline:
            done = {job: _count(api, job, "Completed") for job in JOBS}
            for job, bar in bars.items():
                if done[job] is not None:
                    progress.update(bar, completed=done[job])
            if all(count == CHUNKS for count in done.values()):
                return
            if not killed and (done["ingest"] or 0) > CHUNKS // 2:
                killed = True
                os.kill(handle["pids"]["dispatcher"], signal.SIGKILL)
                progress.console.print("  killed the Dispatcher (SIGKILL); it is started again by itself")
            time.sleep(0.2)


def _count(api: httpx.Client, job: str, status: str) -> int | None:
    """How many tasks of a job have a status; None while the Dispatcher is away."""
    try:
        return len(_pages(api, "/v1/tasks", "tasks", dag="demo", job=job, status=status))
    except httpx.HTTPError:
        return None


def _pages(api: httpx.Client, path: str, what: str, **query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    params: dict[str, str | int] = {**query, "limit": 1000}
    while True:
        page = api.get(path, params=params)
        page.raise_for_status()
        body = page.json()
        found += body[what]
        if not body["next"]:
            return found
        params["after"] = body["next"]


def _report(console: Console, api: httpx.Client, seconds: float) -> int:
    listed = _pages(api, "/v1/datasets/transformed/partitions", "partitions")
    partitions = [(entry["start"], entry["end"]) for entry in listed]
    expected = {(start, start + CHUNK - 1) for start in range(0, BLOCKS, CHUNK)}
    tasks = {job: _count(api, job, "Completed") for job in JOBS}
    retried = _attempts_beyond_the_first(api)
    exact = len(partitions) == CHUNKS and set(partitions) == expected
    once = all(count == CHUNKS for count in tasks.values())
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("chunks asked for", f"{CHUNKS}")
    table.add_row("chunks that came out", f"{len(partitions)}", _verdict(exact, "each exactly once"))
    table.add_row(
        "tasks completed", f"{sum(count or 0 for count in tasks.values())}", _verdict(once, "none twice")
    )
    table.add_row("attempts taken over", f"{retried}", _verdict(retried > 0, "from the worker that hung"))
    table.add_row("time", f"{seconds:.1f} s", "with a hung worker and a killed Dispatcher in it")
    console.print()
    console.print(table)
    return 0 if exact and once and retried > 0 else 1


def _verdict(held: bool, text: str) -> str:
    return f"[green]✓[/green] {text}" if held else f"[red]✗ not so:[/red] {text}"


def _attempts_beyond_the_first(api: httpx.Client) -> int:
    tasks = [task for job in JOBS for task in _pages(api, "/v1/tasks", "tasks", dag="demo", job=job)]
    return sum(max(0, task["attempt"] - 1) for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
