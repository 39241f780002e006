"""Records on their way to a buffered dataset."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

import pytest

from tracelake.domain.errors import Invalid
from tracelake.operators import context as module
from tracelake.operators.context import record_batches


def test_what_json_has_no_word_for_is_sent_as_text() -> None:
    record = {
        "hash": b"\x01\xff",
        "value": 2**255,
        "exact": Decimal("1.50"),
        "at": datetime(2026, 11, 2, tzinfo=UTC),
        "id": UUID(int=1),
        "payload": {"topics": [b"\x00"], "none": None},
    }
    assert list(record_batches([record])) == [
        [
            {
                "hash": "0x01ff",
                "value": 2**255,
                "exact": "1.50",
                "at": "2026-11-02T00:00:00Z",
                "id": "00000000-0000-0000-0000-000000000001",
                "payload": {"topics": ["0x00"], "none": None},
            }
        ]
    ]


def test_no_records_are_no_batch() -> None:
    assert list(record_batches([])) == []


def test_a_batch_is_as_large_as_one_message_takes_and_a_large_record_goes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 100)
    records = [{"t": "x" * size} for size in (30, 30, 30, 500, 1)]
    assert [len(batch) for batch in record_batches(records)] == [2, 1, 1, 1]


def test_a_record_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(Invalid, match="record 1 "):
        list(record_batches([{"a": 1}, {"a": object()}]))
