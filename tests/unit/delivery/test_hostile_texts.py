"""Texts of rows and receivers that would stop a delivery, or show its secret."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from uuid import UUID

import msgspec
import pytest

from tests.support.delivery_scene import Receiver
from tracelake.contracts.deliveries import (
    MAX_PLAN_BYTES,
    MAX_ROWS,
    DeliveryConfig,
    DeliveryMessage,
    DeliveryPlan,
)
from tracelake.delivery.addresses import Allowance, ReceiverAddresses
from tracelake.delivery.http_post import HttpPoster, ReceiverAnswer
from tracelake.delivery.rows import ChainBlocks, RowPlanner, RowPortion
from tracelake.delivery.smtp import Mailer
from tracelake.delivery.targets import TargetParts, judge_answer, open_target, retry_after
from tracelake.domain.buffers import BufferSchema
from tracelake.domain.dag.model import DeliverySpec, WebhookTarget
from tracelake.tokens.named_secrets import SecretProvider

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
    [
        b"Cannot POST /services/T0/XyZ12345abc",
        b"no hook named XyZ12345abc",
        b"<pre>k=q%20secret1</pre>",
        b"no hook named xyz12345ABC",
        b"no hook named XyZ1...",
        b'{"path": "\\/services\\/T0\\/XyZ"}',
        b"unknown: T0",
        b"unknown: q+secret1",
        b"unknown: X-y-Z-1-2",
        b"unknown: %58yZ1",
        b"unknown: &#88;yZ1",
        b"x" * 190 + b" XyZ12345abc",
        "unknown: \uff38\uff59\uff3a\uff11".encode(),
    ],
)
def test_an_answer_that_repeats_the_address_is_not_shown(body: bytes) -> None:
    result = judge_answer(ReceiverAnswer(404, {}, body), "/services/T0/XyZ12345abc?k=q%20secret1")
    assert (result.status, result.result) == (404, "failed")
    assert "XyZ12345abc" not in (result.error or "")
    assert "words are left out" in (result.error or "")
    kept = judge_answer(ReceiverAnswer(404, {}, b"no\nsuch channel"), "/services/T0/XyZ12345abc")
    assert "404: no such channel" in (kept.error or "")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30),
        ("0000000030", 30),
        ("0" * 5000 + "7", 7),
        ("9" * 5000, 3600),
        ("Mon, 01 Jan 99999999999999 00:00:00 GMT", 0),
        ("Mon, 01 Jan 2026 00:00:00 +99999999999999999999", 0),
        ("Fri, 31 Dec 9999 23:59:59 -2359", 3600),
        ("Mon, 01 Jan 0001 00:00:00 +2300", 0),
        ("Thu, 01 Jan 2026 00:00:40 GMT", 40),
        *((odd, 0) for odd in ("", "-5", "30.5", "\u00b2", "x" * 5000, "Mon, 01 Jan 0000 00:00:00 GMT")),
    ],
    ids=lambda value: str(value)[:45],
)
def test_a_retry_after_of_any_text_is_a_time_of_an_hour_at_most(text: str, seconds: float) -> None:
    assert retry_after(text, datetime(2026, 1, 1, tzinfo=UTC)) == seconds
    answer = ReceiverAnswer(429, {"retry-after": text}, b"")
    assert 0 <= judge_answer(answer).hold_seconds <= 3600


async def test_an_answer_that_repeats_a_name_of_the_address_is_not_shown() -> None:
    receiver = Receiver(answer=lambda _: (500, {}, b"the tenant Q7-Zz is unknown"))
    await receiver.open()

    async def loopback(_host: str, _port: int) -> list[str]:
        return ["127.0.0.1"]

    addresses = ReceiverAddresses(Allowance.parse("q7zz.example"), loopback)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    poster = HttpPoster(addresses, tls)
    secrets = SecretProvider({"TRACELAKE_SECRET_HOOK": f"http://q7zz.example:{receiver.port}/"}, None)
    target = open_target(config(), TargetParts(poster, Mailer(addresses, tls), secrets))
    message = DeliveryMessage(1, "r", 1, 1, "row", "k", "{}", None, datetime(2026, 1, 1, tzinfo=UTC), 0, 0)
    result = await target.send(message)
    poster.close()
    await receiver.close()
    assert (result.status, "tenant" in (result.error or "")) == (500, False)
