"""Why a backfill stands still, as its command says it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast
from uuid import UUID

import msgspec
import pytest

from tracelake.cli import backfill
from tracelake.cli.backfill import Backfill, PatientClient, PlainLines, why_waiting
from tracelake.contracts.coverage import BackfillHold, BackfillState, Gap, JobName
from tracelake.contracts.user_api import TaskDetail

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOLD = BackfillHold("chain", "past", False, "backpressure of chain/work")
WAITS = "waiting: chain/past is held by backpressure of chain/work, and goes on by itself"


def task(waiting: str | None, error: str | None) -> TaskDetail:
    fields: dict[str, Any] = dict.fromkeys(TaskDetail.__struct_fields__)
    fields |= {name: [] for name in ("attempts", "inputs", "outputs", "events")}
    fields |= {"task_id": UUID(int=1), "dag_name": "chain", "job": "ingest", "operator": "evm_ingest"}
    fields |= {"runtime": "ecs_spark", "status": "Queued", "kind": "partition", "attempt": 1, "failures": 1}
    fields |= {"created_at": NOW, "ready_at": NOW, "error_message": error}
    if waiting is not None:
        fields["waiting_for"] = {"reason": "RetryTime", "message": waiting}
    return msgspec.convert(fields, TaskDetail)


@pytest.mark.parametrize(
    ("waiting", "error", "said"),
    [
        (None, None, ""),
        ("no worker has claimed it", None, "no worker has claimed it"),
        (
            "its retry time has not come",
            "BlockNotFound: block 5000 isn't there yet",
            "its retry time has not come, after: BlockNotFound: block 5000 isn't there yet",
        ),
    ],
)
def test_what_is_waited_for_comes_with_what_went_wrong(
    waiting: str | None, error: str | None, said: str
) -> None:
    assert why_waiting(task(waiting, error)) == said


def state(*held: BackfillHold, committed: int = 0, running: int = 1) -> BackfillState:
    return BackfillState(
        job=JobName("chain", "ingest"),
        source=JobName("chain", "past"),
        splitter=None,
        runs_also=[],
        paused=[],
        max_concurrency=None,
        start=0,
        end=9,
        chunk=1,
        blocks=10,
        committed_blocks=committed,
        chunks=10,
        committed_chunks=committed,
        asked_chunks=10,
        unasked_chunks=0,
        queued=3,
        running=running,
        failures=0,
        events=[Gap(0, 9, 10)] if held else [],
        more_events=False,
        failed=[],
        held=list(held),
    )


class Stack:
    """Answers with these states one after the other, each ``seconds`` after the one before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *states: BackfillState, seconds: float) -> None:
        self.states = list(states)
        self.now = 1000.0
        self.seconds = seconds
        monkeypatch.setattr(backfill.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(backfill.time, "sleep", lambda _: None)

    def ask(self, _: object) -> BackfillState:
        self.now += self.seconds
        return self.states.pop(0)


@pytest.mark.parametrize(("seconds", "times"), [(1.0, 1), (61.0, 2)])
def test_a_hold_is_said_when_it_begins_also_while_earlier_tasks_run(
    seconds: float, times: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = (state(HOLD), state(HOLD), state(), state(HOLD), state(committed=10))
    stack = Stack(monkeypatch, *states, seconds=seconds)
    work = Backfill(cast(PatientClient, stack), "chain", "ingest", 0, 9, None, "oldest")
    work.run(PlainLines(), wait=True)
    assert capsys.readouterr().out.count(WAITS) == times


def test_normal_work_says_nothing_of_a_hold_of_bulk_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bulk = BackfillHold("chain", "ingest", True, "backpressure of chain/work")
    states = [msgspec.structs.replace(state(bulk), events=[]) for _ in range(3)]
    stack = Stack(monkeypatch, *states, state(committed=10), seconds=1.0)
    work = Backfill(cast(PatientClient, stack), "chain", "ingest", 0, 9, None, "oldest", "normal")
    work.run(PlainLines(), wait=True)
    assert "is held" not in capsys.readouterr().out
