"""Texts of rows and receivers that would stop a delivery, or show its secret."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import msgspec
import pytest

from tracelake.contracts.deliveries import MAX_PLAN_BYTES, MAX_ROWS, DeliveryConfig, DeliveryPlan
from tracelake.delivery.http_post import ReceiverAnswer
from tracelake.delivery.rows import ChainBlocks, RowPlanner, RowPortion
from tracelake.delivery.targets import judge_answer
from tracelake.domain.buffers import BufferSchema
from tracelake.domain.dag.model import DeliverySpec, WebhookTarget

ID = UUID(int=1)


def config() -> DeliveryConfig:
    schema = {
        "columns": [{"name": name, "type": "text"} for name in ("id", "note")],
        "unique": ["id"],
    }
    spec = DeliverySpec(name="ops", dataset="alerts", to=WebhookTarget("HOOK"))
    return DeliveryConfig(ID, "alerting", ID, "1", spec, msgspec.convert(schema, BufferSchema))


@pytest.mark.parametrize("character", ["\U0001f600", '"', "\\"])
def test_a_portion_of_rows_is_never_too_large_to_be_planned(character: str) -> None:
    planner = RowPlanner(config())
    portion = RowPortion(0)
    for position in range(1, MAX_ROWS + 1):
        row = {
            "id": f"{position}",
            "note": character * 20_000,
            "position": position,
            "revision": 0,
            "made_at_revision": 0,
            "retracted_at": None,
            "written_at": datetime(2026, 1, 1, tzinfo=UTC),
            "producer": "alerting/work",
            "scope_end": None,
        }
        planner.add(portion, row, ChainBlocks())
        if portion.is_full:
            break
    assert portion.count >= 5
    plan = DeliveryPlan(ID, 1, ID, 0, portion.upto, portion.rows, portion.gone)
    assert len(msgspec.json.encode(plan)) < MAX_PLAN_BYTES


@pytest.mark.parametrize(
    "body",
    [b"Cannot POST /services/T0/XyZ12345abc", b"no hook named XyZ12345abc", b"<pre>k=q%20secret1</pre>"],
)
def test_an_answer_that_repeats_the_address_is_not_shown(body: bytes) -> None:
    result = judge_answer(ReceiverAnswer(404, {}, body), "/services/T0/XyZ12345abc?k=q%20secret1")
    assert (result.status, result.result) == (404, "failed")
    assert "XyZ12345abc" not in (result.error or "")
    assert "secret1" not in (result.error or "")
    kept = judge_answer(ReceiverAnswer(404, {}, b"no such channel"), "/services/T0/XyZ12345abc")
    assert "no such channel" in (kept.error or "")
