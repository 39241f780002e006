"""``tracelake task show`` of a task with a long history: what it wrote isn't lost below its events."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime
from uuid import UUID

import pytest
from typer.testing import CliRunner

from tracelake.cli import tasks
from tracelake.cli.main import app
from tracelake.cli.show import pairs
from tracelake.contracts.user_api import AttemptDetail, EventDetail, OutputDetail, TaskDetail

NOW = datetime(2026, 11, 2, tzinfo=UTC)
TASK = UUID(int=1)
FOLLOWER = TaskDetail(
    task_id=TASK,
    dag_name="chain",
    job="tip",
    operator="block_follower",
    runtime="ecs_python",
    kind="source",
    status="Running",
    attempt=12,
    failures=0,
    start=None,
    end=None,
    worker_id="w",
    created_at=NOW,
    ready_at=NOW,
    lease_expires_at=None,
    ended_at=None,
    error_message=None,
    progress={"head": 9, "head_at": 1795063947, "head_time": 1795063940, "verified_at": "never"},
    waiting_for=None,
    attempts=[AttemptDetail(n, "w", 1, NOW, None, None, None) for n in range(12, 0, -1)],
    inputs=[],
    outputs=[OutputDetail(0, "blocks", TASK, TASK, None, "postgres", [])],
    events=[EventDetail(n, 12, TASK, "cursor", n, n, 0, "counted", NOW) for n in range(100, 0, -1)],
)


class Stack:
    def task(self, _: UUID) -> TaskDetail:
        return FOLLOWER


def test_outputs_come_before_events_which_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "connect", lambda *_: nullcontext(Stack()))
    shown = CliRunner().invoke(app, ["task", "show", str(TASK)], env={"COLUMNS": "200"}).stdout.splitlines()
    assert [line for line in shown if line in ("attempts", "outputs", "events")] == [
        "attempts",
        "outputs",
        "events",
    ]
    assert [line for line in shown if "more" in line] == ["  and 2 more: --json", "  and 90 more: --json"]
    assert len(shown) < 60
    assert any("head_at=2026-11-19 04:52:27Z  head_time=2026-11-19 04:52:20Z" in line for line in shown)


def test_only_what_may_be_a_time_of_now_is_shown_as_one() -> None:
    assert pairs({"started_at": 12, "head_at": "x", "head": 1795063947}) == (
        "started_at=12  head_at=x  head=1795063947"
    )
