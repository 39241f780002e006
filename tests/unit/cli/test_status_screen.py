"""The screen of ``tracelake status``: what needs a hand is on it, with the command to go on with."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import cast
from uuid import UUID

import msgspec
import pytest
from typer.testing import CliRunner

from tracelake.cli import sources, status
from tracelake.cli.main import app
from tracelake.client import Client
from tracelake.contracts.buffers import BufferPage, BufferSummary
from tracelake.contracts.deliveries import DeliveryPage
from tracelake.contracts.pressure import HeldJob, KeptWork, PressureReport
from tracelake.contracts.sources import SourcePage, SourceSummary
from tracelake.contracts.user_api import (
    ChainPage,
    ChainStatus,
    DagPage,
    DagSummary,
    DatasetPage,
    FailedDeliveries,
    JobSummary,
    TaskPage,
    TaskSummary,
    WaitingFor,
)

NOW = datetime(2026, 11, 2, tzinfo=UTC)
UUIDS = [UUID(int=number) for number in range(3)]
CHAIN = ChainStatus(
    dag_name="dag",
    job="tip",
    task_id=UUIDS[0],
    running=True,
    condition="paused",
    since=NOW,
    state="paused by ann since 2026-11-02 00:00:00Z",
    known_age_seconds=4000.0,
    head=1200,
    tip=1000,
    lag=200,
    lag_seconds=2400.0,
    endpoint_problems="main: refused",
)


def buffer(index: int, dead_letters: int, *, published: bool = True) -> BufferSummary:
    return BufferSummary(
        dataset=f"alerts_{index}",
        dataset_uuid=UUIDS[index],
        dag_name="dag",
        published=published,
        schema_hash="",
        undelivered=0,
        waiting=0,
        in_flight=0,
        oldest_age_seconds=None,
        dead_letters=dead_letters,
        position=None,
        sink_task_id=None,
        sink_status=None,
    )


def job(name: str, paused_by: str | None) -> JobSummary:
    paused_at = NOW if paused_by else None
    return JobSummary(
        name, "reactive", None, "own", "ecs_python", "PerUpdate", "normal", True, paused_by, paused_at
    )


HOLD = HeldJob(
    dag_name="dag",
    job="named",
    cause_dag="dag",
    cause_job="quiet",
    bulk_only=False,
    since=NOW,
    chain=["dag/named", "dag/quiet"],
    released_below=5,
    released_below_seconds=None,
    message="named is held by pressure of dag/quiet",
)


KEPT = KeptWork(
    dag_name="dag",
    job="quiet",
    kept=2,
    full_dag="dag",
    full_job="quiet",
    message="2 kept scopes of dag/quiet wait",
)


def task(number: int, waited: float = 1.0) -> TaskSummary:
    missing = "no worker of runtime ecs_python has claimed it"
    return TaskSummary(
        task_id=UUID(int=number),
        dag_name="dag",
        job="late" if waited > 10 else "fresh",
        operator="own",
        runtime="ecs_python",
        kind="partition",
        status="Queued",
        attempt=0,
        failures=0,
        start=0,
        end=9,
        worker_id=None,
        created_at=NOW,
        ready_at=NOW - timedelta(seconds=waited),
        lease_expires_at=None,
        ended_at=None,
        error_message=None,
        waiting_for=WaitingFor("Worker", missing),
    )


def failed(number: int, ended: float) -> TaskSummary:
    return msgspec.structs.replace(
        task(number),
        status="Failed",
        job=f"job_{number}",
        ended_at=NOW + timedelta(seconds=ended),
        waiting_for=None,
    )


FAILED = [*(failed(number, number) for number in range(30, 14, -1)), failed(1, 100.0)]
"""Newest first by creation; the oldest one, a source's, failed last."""


def cron(job: str, schedule: str, timezone: str = "America/New_York") -> SourceSummary:
    return SourceSummary(
        dag_name="dag",
        job=job,
        kind="cron",
        runs_code=False,
        operator="noop",
        runtime="dispatcher",
        paused=False,
        schedule=schedule,
        timezone=timezone,
        catch_up="latest",
    )


class Stack:
    url = "http://127.0.0.1:1"

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None: ...

    def check_ready(self) -> datetime:
        return NOW

    def dags(self, *, limit: int) -> DagPage:
        return DagPage([DagSummary("dag", 1, NOW, [job("quiet", None), job("named", "ann")])][:limit], None)

    def tasks(self, *, status: str, **_: object) -> TaskPage:
        match status:
            case "Queued":
                return TaskPage([task(2), task(1, 3600.0)], None)
            case "Failed":
                return TaskPage(FAILED, None)
            case _:
                return TaskPage([], None)

    def chains(self) -> ChainPage:
        return ChainPage([CHAIN])

    def datasets(self, **_: object) -> DatasetPage:
        return DatasetPage([], None)

    def buffers(self) -> BufferPage:
        return BufferPage([buffer(0, 0), buffer(1, 1), buffer(2, 1200, published=False)])

    def deliveries(self) -> DeliveryPage:
        return DeliveryPage([])

    def failed_deliveries(self, **_: object) -> FailedDeliveries:
        return FailedDeliveries([])

    def pressure(self) -> PressureReport:
        return PressureReport([], [HOLD], backlogs=[KEPT])

    def sources(self) -> SourcePage:
        listed = [cron("nightly", "0 3 * * *"), cron("never", "* 2 * 3 SUN#2")]
        listed += [cron("universal", "0 3 * * *", "UTC")]
        return SourcePage(NOW, listed, None)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(status, "connect", lambda *_: cast(Client, Stack()))
    shown = CliRunner().invoke(app, ["status"], env={"COLUMNS": "200"}, catch_exceptions=False)
    return [line.strip() for line in shown.stdout.splitlines()]


def test_the_last_error_of_a_follower_that_runs_is_shown_with_its_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = msgspec.structs.replace(CHAIN, last_error="boom", last_error_since=NOW)
    status.print_chains([failed, msgspec.structs.replace(failed, job="other", state="queued: boom")])
    lines = [line for line in capsys.readouterr().out.splitlines() if "boom" in line]
    assert lines[-1] == "  dag/tip: boom, since 2026-11-02 00:00:00Z"
    assert len(lines) == 2, "the other one's state has it"


def test_what_failed_last_is_shown_and_how_many_more_there_are(lines: list[str]) -> None:
    begin = lines.index("failed") + 2
    assert [line.split()[1] for line in lines[begin : begin + 10]] == [
        "dag/job_1",
        *(f"dag/job_{number}" for number in range(30, 21, -1)),
    ]
    assert lines[begin + 10] == "and 7 more: tracelake tasks --status failed"


def test_a_list_that_is_cut_says_at_least(capsys: pytest.CaptureFixture[str]) -> None:
    status.print_failed(FAILED, whole=False)
    assert "and at least 7 more: tracelake tasks --status failed" in capsys.readouterr().out


def test_dead_letters_are_shown_with_the_command_that_shows_more(lines: list[str]) -> None:
    begin = lines.index("dead letters")
    assert lines[begin + 1 :] == [
        "1 dead letter of alerts_1",
        "next: tracelake buffers show alerts_1",
        "1,200 dead letters of alerts_2",
        f"next: tracelake buffers show {UUIDS[2]}",
    ]


def test_a_paused_job_is_told_with_who_paused_it_if_that_is_known(lines: list[str]) -> None:
    assert "dag/quiet is paused: tracelake resume dag/quiet" in lines
    assert any(line.startswith("dag/named is paused by ann at 2026-11-02") for line in lines)


def test_a_chain_shows_how_old_its_numbers_are_and_what_keeps_it(lines: list[str]) -> None:
    [line] = [line for line in lines if line.split()[:1] == ["dag/tip"]]
    assert "200 blocks (2,400 s)" in line
    assert "4,000 s ago" in line
    assert line.endswith("paused by ann since 2026-11-02 00:00:00Z")
    assert "dag/tip: main: refused: tracelake rpc status" in lines


def test_holds_are_told_in_the_words_of_the_report(lines: list[str]) -> None:
    begin = lines.index("held by backpressure") + 1
    assert lines[begin : begin + 2] == [HOLD.message, KEPT.message], "what waits for room has its reason too"


def test_what_has_waited_for_a_while_says_for_what(lines: list[str]) -> None:
    assert "dag/late waits: no worker of runtime ecs_python has claimed it" in lines
    assert not any(line.startswith("dag/fresh waits") for line in lines)


NEVER = "makes no ticks: '* 2 * 3 SUN#2' never fires in America/New_York"


def test_a_schedule_that_can_not_be_used_is_told(lines: list[str]) -> None:
    [line] = [line for line in lines if NEVER in line]
    assert line.startswith("dag/never ")
    assert lines[lines.index("sources without ticks") + 1] == line


def test_a_schedule_that_can_not_be_used_keeps_no_other_source_from_the_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "connect", lambda *_: cast(Client, Stack()))
    shown = CliRunner().invoke(app, ["sources", "list"], catch_exceptions=False).stdout.splitlines()
    assert "2026-11-02T08:00:00" in shown[1].replace(" ", "T")
    assert NEVER in shown[2]
    found = CliRunner().invoke(app, ["sources", "list", "--json"], catch_exceptions=False).stdout
    nightly, never, _ = json.loads(found)["sources"]
    assert (nightly["next"], nightly["problem"]) == ("2026-11-02T08:00:00Z", None)
    assert never["next"] is None
    assert NEVER in never["problem"]


def test_the_next_ticks_are_in_the_zone_of_the_schedule_and_in_utc_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "connect", lambda *_: cast(Client, Stack()))

    def shown(job: str) -> list[list[str]]:
        found = CliRunner().invoke(app, ["sources", "next", job, "--count", "1"], catch_exceptions=False)
        return [line.split() for line in found.stdout.splitlines()]

    head, tick = shown("dag/nightly")
    assert head == ["America/New_York", "UTC", "TICK"]
    assert tick[:4] == ["Mon", "2026-11-02", "03:00:00", "-0500"]
    head, tick = shown("dag/universal")
    assert head == ["UTC", "TICK"]
    assert tick == ["Mon", "2026-11-02", "03:00:00", "+0000", "1793588400"]
