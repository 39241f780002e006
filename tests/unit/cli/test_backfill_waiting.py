"""Why a backfill stands still, as its command says it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import pytest

from tracelake.cli.backfill import why_waiting
from tracelake.contracts.user_api import TaskDetail

NOW = datetime(2026, 1, 1, tzinfo=UTC)


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
