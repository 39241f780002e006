"""What the commands of deliveries say of dead letters, and which command they recommend."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from tracelake.cli import deliveries
from tracelake.cli.main import app
from tracelake.contracts.deliveries import (
    DeadMessage,
    DeliveryDetail,
    DeliveryPage,
    DeliverySummary,
    MessagesDropped,
    MessagesReplayed,
    SkippedMessage,
)

NOW = datetime(2026, 11, 2, tzinfo=UTC)
LARGE = DeadMessage(1, "the row has 300,000 bytes as JSON; a message may have 262,144", NOW)
PLAIN = DeliverySummary(
    dag_name="alerts",
    name="whales",
    dataset="alert_events",
    to="webhook HOOK",
    when="instant",
    where=None,
    status="sending",
    paused_by=[],
    waiting=0,
    sent=5,
    retracted=0,
    dead=0,
    behind=0,
    oldest_seconds=None,
    failing_since=None,
    last_error="it answered 500",
    last_error_at=NOW,
    last_sent_at=NOW,
    task_id=None,
    task_status=None,
)


class Stack:
    def __init__(self, *found: DeliverySummary, answer: Any = None) -> None:
        self.found, self.answer = list(found), answer

    def deliveries(self) -> DeliveryPage:
        return DeliveryPage(self.found)

    def replay_delivery(self, _dag: str, _name: str, _ids: Iterable[int] | None) -> Any:
        return self.answer

    def drop_messages(self, _dag: str, _name: str, _ids: Iterable[int], *, everything: bool) -> Any:
        return self.answer


def run(monkeypatch: pytest.MonkeyPatch, stack: Stack, *arguments: str) -> Result:
    monkeypatch.setattr(deliveries, "connect", lambda *_: nullcontext(stack))
    return CliRunner().invoke(app, ["deliveries", *arguments], env={"COLUMNS": "200"})


def troubled(capsys: pytest.CaptureFixture[str], **fields: Any) -> str:
    deliveries.print_troubled([msgspec.structs.replace(PLAIN, **fields)])
    return capsys.readouterr().out


def test_a_dead_letter_that_is_too_large_is_shown_with_its_own_error_and_is_to_be_dropped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = troubled(capsys, dead=1, newest_dead=LARGE, too_large=[1])
    assert "300,000 bytes" in shown
    assert "it answered 500" not in shown
    assert "tracelake deliveries drop alerts/whales 1" in shown


def test_while_a_dead_letter_can_be_sent_a_replay_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    shown = troubled(capsys, dead=2, replayable=1, newest_dead=LARGE, too_large=[1])
    assert "tracelake deliveries replay alerts/whales" in shown


def test_a_failing_delivery_is_shown_with_the_error_of_its_last_try(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields: dict[str, Any] = {"status": "failing", "failing_since": NOW}
    shown = troubled(capsys, **fields, dead=1, newest_dead=LARGE, too_large=[1])
    assert "it answered 500" in shown
    assert "tracelake deliveries show alerts/whales" in shown


def test_an_error_after_which_a_try_succeeded_is_no_longer_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "it answered 500" not in run(monkeypatch, Stack(PLAIN), "list").stdout


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({}, "it answered 500 (at 2026-11-02 00:00:00Z; a try has succeeded since)"),
        ({"failing_since": NOW}, "it answered 500 (at 2026-11-02 00:00:00Z)"),
        ({"last_sent_at": NOW - timedelta(hours=1)}, "it answered 500 (at 2026-11-02 00:00:00Z)"),
    ],
)
def test_the_last_error_is_shown_with_its_time_and_whether_it_is_over(
    changed: dict[str, Any], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {**msgspec.structs.asdict(PLAIN), **changed}
    deliveries.print_delivery(DeliveryDetail(**fields, template=None, key=None, messages=[]))
    [line] = [each for each in capsys.readouterr().out.splitlines() if each.startswith("last error")]
    assert line.removeprefix("last error").strip() == shown


def test_a_replay_that_can_send_nothing_says_why_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped = [SkippedMessage(1, "dead", LARGE.error), SkippedMessage(7, "sent", None)]
    stack = Stack(answer=MessagesReplayed(0, skipped))
    done = run(monkeypatch, stack, "replay", "alerts/whales")
    assert (done.exit_code, done.stdout) == (1, "0 messages wait again\n")
    assert done.stderr.splitlines() == [
        f"message 1 can't be sent: {LARGE.error}; drop it with: tracelake deliveries drop alerts/whales 1",
        "message 7 isn't sent again, it is sent: -",
    ]


def test_a_drop_names_messages_or_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(answer=MessagesDropped(1))
    assert run(monkeypatch, stack, "drop", "alerts/whales").exit_code == 2
    assert run(monkeypatch, stack, "drop", "alerts/whales", "1", "--all").exit_code == 2
    done = run(monkeypatch, stack, "drop", "alerts/whales", "1")
    assert (done.exit_code, done.stdout) == (0, "1 message was dropped\n")
