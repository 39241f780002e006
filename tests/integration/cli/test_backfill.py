"""``tracelake backfill`` and ``datasets gaps``, on a real Dispatcher with a real worker."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.dev_stack import eventually, tracelake
from tests.support.postgres import SharedPostgres
from tests.support.worker_scene import BackfillScene, WorkerScene, shared_scene

OPERATORS = str(Path(__file__).with_name("backfill_operators.py"))

pytestmark = pytest.mark.xdist_group("backfill")


@pytest.fixture(scope="module")
def scene(
    postgres_cluster: SharedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerScene]:
    with (
        shared_scene(postgres_cluster, tmp_path_factory.mktemp("backfill")) as opened,
        opened.working("worker", "--operators", OPERATORS),
    ):
        yield opened


def test_a_range_is_filled_in_chunk_by_chunk_and_a_second_time_costs_nothing(scene: WorkerScene) -> None:
    filled = BackfillScene(scene, "filled", concurrency=4)
    planned = filled.run("--from", "5", "--to", "44", "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "40 blocks in 5 chunks of 10: 0 committed, 0 asked for before, 5 to ask for" in planned.stdout
    assert "through filled/src → filled/split, at most 4 at once" in planned.stdout
    assert "would ask for 5-44" in planned.stdout
    assert filled.tasks() == []
    done = filled.run("--from", "5", "--to", "44")
    assert done.returncode == 0, done.stderr
    assert "all 40 blocks are committed" in done.stdout
    again = filled.run("--from", "0", "--to", "44")
    assert again.returncode == 0
    assert "45 blocks in 5 chunks of 10: 4 committed, 0 asked for before, 1 to ask for" in again.stdout
    expected = [(0, 4), (5, 9), (10, 19), (20, 29), (30, 39), (40, 44)]
    assert filled.scopes() == Counter(expected)
    assert {task.attempt for task in filled.tasks()} == {1}


@pytest.mark.parametrize("order", ["newest", "oldest"])
def test_the_order_is_the_order_in_which_tasks_are_made_and_the_first_begins(
    scene: WorkerScene, order: str
) -> None:
    ordered = BackfillScene(scene, order)
    assert ordered.run("--from", "0", "--to", "79", "--order", order).returncode == 0
    expected = sorted(range(0, 80, 10), reverse=order == "newest")
    assert [task.start for task in ordered.tasks()] == expected
    claimed = [
        (scene.client.task(task.task_id).attempts[0].claimed_at, task.start) for task in ordered.tasks()
    ]
    assert min(claimed)[1] == expected[0]


def test_what_fails_is_told_and_tried_again_by_the_next_command(scene: WorkerScene) -> None:
    beyond = BackfillScene(scene, "beyond", tip=24)
    failed = beyond.run("--from", "0", "--to", "39")
    assert failed.returncode == 1
    assert (
        "failed: beyond/ingest 20-29: BeyondTip: block 29 is beyond the tip of the chain, 24 (task "
        in failed.stderr
    )
    assert "error: 2 tasks failed" in failed.stderr
    gaps = tracelake("datasets", "gaps", "beyond/ingest/logs", "--from", "0", "--to", "39", *beyond.where)
    assert gaps.returncode == 0
    assert [line.split() for line in gaps.stdout.splitlines()] == [
        ["FROM", "TO", "BLOCKS"],
        ["20", "39", "20"],
    ]
    again = beyond.run("--from", "0", "--to", "39", "--json")
    assert again.returncode == 1
    kinds = Counter(json.loads(line)["kind"] for line in again.stdout.splitlines())
    assert kinds["failed"] == 2
    assert kinds["progress"] >= 1
    assert "2 failed to try again" in again.stderr
    assert beyond.scopes() == Counter([(0, 9), (10, 19), (20, 29), (30, 39)])
    assert [task.attempt for task in beyond.tasks()] == [1, 1, 2, 2]


def test_ctrl_c_ends_the_command_and_not_the_work(scene: WorkerScene) -> None:
    slow = BackfillScene(scene, "slow", seconds=0.2)
    command = slow.start("--from", "0", "--to", "99")
    eventually("some chunks are committed", lambda: slow.committed() >= 2)
    command.send_signal(signal.SIGINT)
    said, errors = command.communicate(timeout=60)
    assert command.returncode == 130, errors
    assert "the work goes on without this command" in said
    eventually("it does", lambda: slow.committed() == 10)
    assert {task.attempt for task in slow.tasks()} == {1}


def test_a_command_that_does_not_wait_only_asks(scene: WorkerScene) -> None:
    patient = BackfillScene(scene, "patient")
    scene.client.set_paused("patient", "ingest", True)
    asked = patient.run("--from", "0", "--to", "29", "--no-wait", "--chunk", "5")
    assert asked.returncode == 0, asked.stderr
    eventually("the ranges were split", lambda: len(patient.tasks("split")) == 6)
    planned = patient.run("--from", "0", "--to", "29", "--chunk", "5", "--dry-run")
    assert "0 committed, 6 asked for before, 0 to ask for" in planned.stdout
    assert "waits: patient/ingest is paused" in planned.stdout
    scene.client.set_paused("patient", "ingest", False)
    assert patient.run("--from", "0", "--to", "29").returncode == 0
    assert len(patient.tasks()) == 6


def test_a_million_blocks_are_planned_at_once(scene: WorkerScene) -> None:
    large = BackfillScene(scene, "large")
    planned = large.run("--from", "0", "--to", "999999", "--dry-run", "--json")
    state = json.loads(planned.stdout)
    assert (state["chunks"], state["unasked_chunks"], len(state["events"])) == (100_000, 100_000, 1)
    assert (large.tasks(), large.tasks("split")) == ([], [])


@pytest.mark.parametrize(
    ("options", "told", "code"),
    [
        (("--from", "9", "--to", "0"), "--from 9 is behind --to 0", 2),
        (("--from", "0", "--to", "9", "--chunk", "7"), "don't fit the grid of wrong/split", 1),
    ],
)
def test_what_cannot_be_asked_is_refused_with_a_reason(
    scene: WorkerScene, options: tuple[str, ...], told: str, code: int
) -> None:
    refused = BackfillScene(scene, "wrong").run(*options)
    assert refused.returncode == code
    assert told in refused.stderr


def test_gaps_of_nothing_and_of_everything(scene: WorkerScene) -> None:
    empty = BackfillScene(scene, "empty")

    def gaps(name: str, *options: str) -> str:
        shown = tracelake("datasets", "gaps", name, *options, *empty.where)
        return shown.stdout + shown.stderr

    assert gaps("empty/ingest/blocks") == "nothing is committed yet\n"
    assert "empty/ingest has the outputs blocks, logs: name one" in gaps("empty/ingest")
    assert empty.run("--from", "0", "--to", "19").returncode == 0
    assert gaps("empty/ingest/1") == "no gaps in 0-19\n"
    assert json.loads(gaps("empty/ingest/logs", "--to", "25", "--json"))["gaps"] == [
        {"start": 20, "end": 25, "blocks": 6}
    ]
