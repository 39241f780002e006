"""One DAG through Spark, Python and a function, on the whole stack, from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.dev_stack import DevStack, eventually, tracelake

pytestmark = pytest.mark.xdist_group("spark")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    folder = tmp_path_factory.mktemp("whole stack")
    operators = str(EXAMPLES / "operators" / "block_squares.py")
    stack = DevStack(folder / "home", folder / "output", "--operators", operators, workers=True)
    try:
        stack.until_ready()
        yield stack
    finally:
        stack.close()


def test_the_example_runs_as_printed_and_each_job_has_a_log(stack: DevStack) -> None:
    command = f'#!/bin/sh\nexec "{sys.executable}" -m tracelake "$@"\n'
    program = stack.home.parent / "tracelake"
    program.write_text(command)
    program.chmod(0o755)
    run = subprocess.run(
        [EXAMPLES / "three_runtimes" / "run.sh", stack.home],
        env={**os.environ, "TRACELAKE": str(program)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    _, numbers, squares, chunks = run.stdout.split("== ")
    assert "rows=2000" in numbers
    assert "blocks=2000" in squares
    assert "chunks: blocks 0 to 1999 in chunks of 500" in chunks
    found = json.loads(stack.run("datasets", "show", "squares", "--json").stdout)
    assert [(each["partition_key"], each["row_count"]) for each in found["partitions"]] == [("0-1999", 2000)]


def test_a_second_worker_started_by_hand_takes_its_share(stack: DevStack, tmp_path: Path) -> None:
    dag = tmp_path / "shared.yaml"
    dag.write_text(
        """
name: shared
jobs:
  - { name: request, activation: source, runtime: dispatcher, source: { kind: manual }, outputs: 1 }
  - name: chunks
    activation: reactive
    runtime: dispatcher
    operator: range_splitter
    inputs: [{ from: { job: request, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
    config: { chunk_size: 10 }
  - name: squares
    activation: reactive
    runtime: ecs_python
    operator: block_squares
    inputs: [{ from: { job: chunks, output: 0 } }]
    outputs: [{ name: squares, storage: parquet }]
    execution_strategy: PerPartition
"""
    )
    assert stack.run("deploy", dag).returncode == 0
    options = ["worker", "--runtime", "ecs_python", "--home", str(stack.home), "--worker-id", "by-hand"]
    options += ["--operators", str(EXAMPLES / "operators" / "block_squares.py")]
    ready = tmp_path / "ready"
    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tracelake", *options, "--ready-file", str(ready)], stdout=log, stderr=log
        )
    try:
        eventually("the second worker is ready", ready.exists)
        started = 0

        def shared() -> bool:
            nonlocal started
            tracelake(
                *("trigger", "shared/request", "--start", str(started), "--end", str(started + 399)),
                *("--home", stack.home),
            )
            started += 400
            eventually("all chunks are done", lambda: len(done()) == started // 10)
            return len({task["worker_id"] for task in done()}) == 2

        def done() -> list[dict[str, str]]:
            query = ("--dag", "shared", "--job", "squares", "--status", "Completed", "--limit", "1000")
            tasks: list[dict[str, str]] = json.loads(stack.run("tasks", *query, "--json").stdout)["tasks"]
            return tasks

        eventually("both workers have had a share", shared)
    finally:
        worker.terminate()
        assert worker.wait(60) == 0
