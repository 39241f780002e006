"""Deliveries whose rows wait for a block to be final name the block and its producer."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import cast

import pytest
from typer.testing import CliRunner

from tracelake.cli import deliveries, status
from tracelake.cli.main import app
from tracelake.client import Client
from tracelake.contracts.deliveries import (
    DeliveryDetail,
    DeliveryPage,
    DeliverySummary,
    WaitingProducer,
)

SINCE = datetime(2026, 11, 2, tzinfo=UTC)
WAITS = [WaitingProducer("dag/work", 5000, SINCE), WaitingProducer("dag/other", 7, SINCE)]
SHOWN = [
    "block 5000 of dag/work, since 2026-11-02 00:00:00Z",
    "block 7 of dag/other, since 2026-11-02 00:00:00Z",
]
FIELDS = {
    "dag_name": "dag",
    "name": "ops",
    "dataset": "alerts",
    "to": "webhook HOOK",
    "when": "finalized",
    "where": None,
    "status": "sending",
    "paused_by": [],
    "waiting": 0,
    "sent": 0,
    "retracted": 0,
    "dead": 0,
    "behind": 12,
    "oldest_seconds": None,
    "failing_since": None,
    "last_error": None,
    "last_error_at": None,
    "last_sent_at": None,
    "task_id": None,
    "task_status": None,
    "waits_for": WAITS,
}


class Stack:
    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None: ...

    def delivery(self, *_: object, **__: object) -> DeliveryDetail:
        return DeliveryDetail(**FIELDS, template=None, key=None, messages=[])


def output(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(deliveries, "connect", lambda *_: cast(Client, Stack()))
    return CliRunner().invoke(app, ["deliveries", *arguments], catch_exceptions=False).stdout


def test_a_delivery_names_the_blocks_that_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "; ".join(SHOWN) in output(monkeypatch, "show", "dag/ops")


def test_the_overview_names_each_producer_that_waits(capsys: pytest.CaptureFixture[str]) -> None:
    idle = DeliverySummary(**{**FIELDS, "name": "idle", "waits_for": []})
    page = DeliveryPage([DeliverySummary(**FIELDS), idle])
    status.print_waiting_for_blocks(page.deliveries)
    shown = capsys.readouterr().out
    assert all(each in shown for each in SHOWN)
    assert "dag/idle" not in shown
    status.print_waiting_for_blocks([idle])
    assert capsys.readouterr().out == ""
