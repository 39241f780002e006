"""Which rows become messages: those that are final, if the delivery waits for that; and what a message says."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from uuid import UUID

import msgspec
import pytest

from tests.support.delivery_scene import Receiver
from tracelake.contracts.deliveries import (
    MAX_PRODUCERS,
    DeliveryConfig,
    DeliveryMessage,
    DeliveryPlan,
    MessageKind,
    PlannedRow,
)
from tracelake.delivery.addresses import Allowance, ReceiverAddresses
from tracelake.delivery.http_post import HttpPoster
from tracelake.delivery.rows import MAX_AHEAD, ChainBlocks, RowPlanner, RowPortion, Unreadable
from tracelake.delivery.smtp import Mailer
from tracelake.delivery.targets import TargetParts, open_target
from tracelake.domain.buffers import BufferSchema
from tracelake.domain.dag.model import Column, ColumnType, DeliverySpec, DeliveryTime, SlackTarget
from tracelake.domain.where_parse import parse_where
from tracelake.tokens.named_secrets import SecretProvider

WRITTEN = datetime(2026, 1, 1, tzinfo=UTC)
COLUMNS = (
    Column("key", ColumnType.TEXT),
    Column("block_number", ColumnType.BIGINT),
    Column("note", ColumnType.TEXT),
    Column("payload", ColumnType.JSONB),
)
SCHEMA = BufferSchema(COLUMNS, ("key",))


def config(**more: Any) -> DeliveryConfig:
    spec = DeliverySpec(name="ops", dataset="alerts", to=SlackTarget("CHAT"), **more)
    return DeliveryConfig(UUID(int=1), "dag", UUID(int=2), "", spec, SCHEMA)


def row(position: int, block: int | None, **more: Any) -> dict[str, Any]:
    fields = {"key": f"k{position}", "block_number": block, "note": "", "payload": None}
    platform = {
        "position": position,
        "revision": 1,
        "made_at_revision": 1,
        "scope_end": 99,
        "producer": "dag/work",
        "retracted_at": None,
        "written_at": WRITTEN,
    }
    values = {**fields, **platform, **more}
    # As the reader brings JSON.
    return {
        name: msgspec.Raw(json.dumps(v).encode()) if isinstance(v, dict) else v for name, v in values.items()
    }


def planned(
    finalized: Mapping[str, int], *rows: Mapping[str, Any], heads: Mapping[str, int] = MappingProxyType({})
) -> RowPortion:
    planner, portion = RowPlanner(config(when=DeliveryTime.FINALIZED)), RowPortion(0)
    for each in rows:
        if not planner.add(portion, each, ChainBlocks(finalized, heads)):
            break
    return portion


def waits(portion: RowPortion) -> list[tuple[str, int, int | None]]:
    return [(each.producer, each.position, each.block) for each in portion.waits.values()]


def test_a_row_is_final_with_its_block_or_else_with_the_last_block_of_its_task() -> None:
    rows = (row(1, 10), row(2, 11), row(3, None), row(4, 5))
    for finalized, count, block in ((9, 0, 10), (10, 1, 11), (11, 2, 99), (98, 2, 99), (99, 4, None)):
        portion = planned({"dag/work": finalized}, *rows)
        # One that isn't final holds back those of its producer behind it, whatever their blocks are.
        assert (portion.upto, len(portion.rows)) == (4, count)
        assert waits(portion) == ([] if block is None else [("dag/work", count, block)])


def test_a_row_that_is_not_final_holds_back_no_other_producer() -> None:
    finalized = {"dag/work": 9, "dag/other": 50}
    other = {"producer": "dag/other"}
    portion = planned(finalized, row(3, 10), row(4, 40, **other), row(5, 5), row(7, 60, **other))
    assert [each.revision for each in portion.rows] == [1]
    assert waits(portion) == [("dag/work", 2, 10), ("dag/other", 6, 60)]
    assert portion.upto == 7


def test_the_producers_that_wait_are_bounded() -> None:
    rows = [row(at, 10, producer=f"dag/{at}") for at in range(1, MAX_PRODUCERS + 3)]
    portion = planned({each["producer"]: 0 for each in rows}, *rows)
    assert (len(portion.waits), portion.upto) == (MAX_PRODUCERS, MAX_PRODUCERS)


def test_a_row_beyond_what_its_chain_can_have_reached_is_refused_and_holds_nothing_back() -> None:
    finalized, heads = {"dag/work": 9}, {"dag/work": 20}
    portion = planned(finalized, row(1, 99 + MAX_AHEAD + 1), row(2, 5), row(3, 99 + MAX_AHEAD), heads=heads)
    bad, good = portion.rows
    assert (bad.refused or "").startswith(
        "its block 10100 is far above 20, the head of the chain behind dag/work"
    )
    # Its content stays, so that a person can have it sent.
    assert (json.loads(bad.data)["key"], good.refused) == ("k1", None)
    assert waits(portion) == [("dag/work", 2, 99 + MAX_AHEAD)]
    # While the head isn't known, nothing is refused.
    assert waits(planned(finalized, row(1, 10**15))) == [("dag/work", 0, 10**15)]
    [unscoped] = planned(finalized, row(1, 21 + MAX_AHEAD, scope_end=None), heads=heads).rows
    assert unscoped.refused


def test_before_a_chain_is_known_to_be_final_anywhere_nothing_of_it_is_sent() -> None:
    portion = planned({"dag/work": -1}, row(1, 0))
    assert (portion.rows, waits(portion)) == ([], [("dag/work", 0, 0)])


def test_rows_of_a_producer_without_a_chain_are_sent_at_once_also_with_other_producers_around() -> None:
    portion = planned({"dag/other": -1}, row(1, 10), row(2, None, scope_end=None))
    assert (len(portion.rows), portion.waits) == (2, {})
    assert planned({"dag/work": 0}, row(1, None, scope_end=None)).waits == {}


def test_a_retraction_waits_for_nothing() -> None:
    rows = (row(1, 50, retracted_at=WRITTEN), row(2, 60), row(3, 70, retracted_at=WRITTEN))
    portion = planned({"dag/work": 0}, *rows)
    assert (len(portion.rows), len(portion.gone), waits(portion)) == (0, 2, [("dag/work", 1, 60)])


def alone(spec: DeliveryConfig, *rows: Mapping[str, Any]) -> RowPortion:
    planner, portion = RowPlanner(spec), RowPortion(0)
    for each in rows:
        assert planner.add(portion, each, ChainBlocks())
    return portion


def test_a_row_that_cannot_be_made_a_message_is_a_dead_letter_and_holds_up_no_others() -> None:
    late = Unreadable("infinity", "can't parse timestamptz 'infinity'")
    huge = msgspec.Raw(b'{"n": 1' + b"0" * 5000 + b"}")
    broken = msgspec.Raw(b'{"n": "\xff"}')
    spec = config(template="{{payload.n}}")
    portion = alone(
        spec, row(1, 1, note=late), row(2, 1, payload=huge), row(3, 1, payload=broken), row(4, None)
    )
    assert (portion.upto, [each.refused is None for each in portion.rows]) == (4, [False, True, False, True])
    assert "its note can't be read: can't parse" in (portion.rows[0].refused or "")
    assert "utf-8" in (portion.rows[2].refused or "")
    assert json.loads(portion.rows[1].data, parse_int=len)["payload"]["n"] == 5001
    assert {each.data for each in portion.rows if each.refused} == {""}


def test_a_revision_below_zero_is_one_like_any_other() -> None:
    portion = alone(config(), row(1, 1, revision=-5), row(2, 1, revision=-6, retracted_at=WRITTEN))
    plan = DeliveryPlan(UUID(int=1), 1, UUID(int=1), 0, portion.upto, portion.rows, portion.gone)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=DeliveryPlan) == plan


def test_a_record_whose_key_cannot_be_read_is_known_again() -> None:
    schema = BufferSchema((*COLUMNS, Column("at", ColumnType.TIMESTAMPTZ)), ("key", "at"))
    spec = msgspec.structs.replace(config(), schema=schema)
    late, later = (Unreadable(f"{year}-01-01 04:59:59+00", "too large") for year in (10000, 10001))
    first, other = alone(spec, row(1, 1, key="k", at=late), row(2, 1, key="k", at=later)).rows
    [gone] = alone(spec, row(3, 1, key="k", at=late, retracted_at=WRITTEN)).gone
    assert (first.record_id == gone.record_id, first.record_id == other.record_id) == (True, False)


NUMBERS = (2**255, 2**255 + 1, 2**255 * 10, Decimal("1e131000"), Decimal("1e130999"), Decimal("1e-16383"))


def test_numbers_are_one_key_only_when_they_are_equal() -> None:
    schema = BufferSchema((*COLUMNS, Column("token", ColumnType.NUMERIC)), ("token",))
    spec = msgspec.structs.replace(config(key="token"), schema=schema)
    numbers = [Decimal(each) for each in NUMBERS]
    portion = alone(spec, *(row(place, 1, token=each) for place, each in enumerate(numbers)))
    assert len({each.record_id for each in portion.rows}) == len(NUMBERS)
    longer = [Decimal(f"{each:f}" + ("" if "." in f"{each:f}" else ".") + "00") for each in numbers]
    again = alone(spec, *(row(place, 1, token=each) for place, each in enumerate(longer)))
    assert [each.record_id for each in again.rows] == [each.record_id for each in portion.rows]
    assert [each.order_key for each in again.rows] == [each.order_key for each in portion.rows]


def test_a_row_too_large_to_be_sent_costs_no_text() -> None:
    portion = alone(config(template="{{payload}}"), row(1, 1, payload={"x": "y" * 300_000}))
    [letter] = portion.rows
    assert (letter.text, letter.data) == (None, "")
    assert "a message may have 262,144" in (letter.refused or "")


@pytest.mark.parametrize(
    ("value", "where", "sent"),
    [
        (b'"a"', "payload = 'a'", True),
        (b"1" + b"0" * 5000, "payload > 5", True),
        (b"0.1", "payload = 0.1", True),
        (b"true", "payload = true", True),
        (b'{"a": 1}', "payload = 'a'", False),
        (b'{"a": 1}', "payload IS NOT NULL", True),
        (b'{"n": 1' + b"0" * 5000 + b"}", "payload IS NOT NULL", True),
    ],
    ids=["text", "huge", "decimal", "truth", "object", "object that is there", "huge within"],
)
def test_a_condition_compares_json_that_is_one_value(value: bytes, where: str, sent: bool) -> None:
    portion = alone(config(where=parse_where(where)), row(1, 1, payload=msgspec.Raw(value)))
    assert (len(portion.rows), len(portion.gone)) == ((1, 0) if sent else (0, 1))


def text_of(template: str | None, **values: Any) -> PlannedRow:
    portion = RowPortion(0)
    assert RowPlanner(config(template=template)).add(portion, row(1, 7, **values), ChainBlocks())
    [found] = portion.rows
    return found


@pytest.mark.parametrize("kind", ["row", "retracted"])
@pytest.mark.parametrize("template", ["<https://example.org|open> {{note}} {{payload.to}} {{payload}}", None])
async def test_what_a_channel_receives_calls_nobody_and_links_nowhere(
    template: str | None, kind: MessageKind
) -> None:
    note = "<!channel> & <@U1> <https://evil.example|invoice> &lt;!here&gt;"
    made = text_of(template, note=note, payload={"to": "<!everyone>", "<!here>": "<!subteam^S1>"})
    receiver = Receiver()
    await receiver.open()
    addresses = ReceiverAddresses(Allowance.parse("127.0.0.1"))
    # Plain text, so the system's authorities needn't be loaded.
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    poster = HttpPoster(addresses, tls)
    secrets = SecretProvider({"TRACELAKE_SECRET_CHAT": receiver.url}, None)
    channel = open_target(config(template=template), TargetParts(poster, Mailer(addresses, tls), secrets))
    message = DeliveryMessage(1, "rec_1", 1, 1, kind, "k", made.data, made.text, WRITTEN, 0, 0)
    assert (await channel.send(message)).result == "sent"
    poster.close()
    await receiver.close()
    [received] = receiver.received
    assert set(json.loads(received.body)) == {"text"}
    text = received.json["text"]
    own = "<https://example.org|open>" if template else ""
    # The template's own link is its author's; nothing else is one.
    assert text.count("<") == own.count("<")
    assert own in text
    assert "&lt;!channel&gt; &amp; &lt;@U1&gt;" in text
    assert "&amp;lt;!here&amp;gt;" in text
    assert text.startswith("[retracted] ") is (kind == "retracted")
    # The text is made for the channel; the row itself is kept as it is.
    assert json.loads(made.data)["note"] == note
