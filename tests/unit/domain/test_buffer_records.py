"""Records of a buffered dataset: what fits a schema and what doesn't, and when a schema is the same."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracelake.domain.buffers import MAX_PROBLEMS, BadRecords, BufferSchema, additive_problems
from tracelake.domain.dag.model import Column, ColumnType

ORG = "00000000-0000-0000-0000-0000000000aa"
TYPES = {
    "org_id": "uuid",
    "key": "text",
    "class": "text",
    "block_number": "bigint",
    "small": "integer",
    "amount": "numeric",
    "flag": "boolean",
    "at": "timestamptz",
    "data": "jsonb",
    "raw": "bytea",
    "share": "double",
    "id": "uuid",
}


def schema(types: dict[str, str], *unique: str) -> BufferSchema:
    return BufferSchema(tuple(Column(name, ColumnType(kind)) for name, kind in types.items()), unique)


ALL = schema(TYPES, "org_id", "key")


def row(**fields: Any) -> dict[str, Any]:
    [found] = ALL.decoder(ORG).rows(json.dumps([{"key": "k", **fields}]))
    return dict(zip(ALL.names, found, strict=True))


def test_every_type_is_read_exactly() -> None:
    found = row(
        block_number=2**63 - 1,
        small=-(2**31),
        amount="123456789012345678901234567890.000000001",
        flag=False,
        at="2024-02-29T23:59:59.123456+02:00",
        data={"a": [1, None]},
        raw="0x00fF",
        share=0.5,
        id="6b8b4567-327b-23c6-643c-986966334873",
    )
    assert found.pop("at").astimezone(UTC) == datetime(2024, 2, 29, 21, 59, 59, 123456, UTC)
    assert json.loads(found.pop("data")) == {"a": [1, None]}
    assert found == {
        "org_id": UUID(ORG),
        "key": "k",
        "class": None,
        "block_number": 2**63 - 1,
        "small": -(2**31),
        "amount": Decimal("123456789012345678901234567890.000000001"),
        "flag": False,
        "raw": "0x00fF",
        "share": 0.5,
        "id": UUID("6b8b4567-327b-23c6-643c-986966334873"),
    }


def test_what_a_record_leaves_out_or_calls_null_is_null_and_the_org_is_filled_in() -> None:
    assert row() == row(org_id=ORG, **{"class": None}, data=None, amount=None)
    assert row()["org_id"] == UUID(ORG)


def test_a_number_keeps_its_digits() -> None:
    [found] = ALL.decoder(ORG).rows('[{"key":"k","amount":0.12345678901234567890123,"data":{"n":1.10}}]')
    fields = dict(zip(ALL.names, found, strict=True))
    assert (fields["amount"], fields["data"]) == (Decimal("0.12345678901234567890123"), '{"n":1.10}')


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"key": 1}, "key", "must be a string"),
        ({"key": None}, "key", "must be a string"),
        ({"key": "k" * 601}, "key", "at most 600 characters"),
        ({"nope": 1}, "nope", "is not in the schema"),
        ({"org_id": "6b8b4567-327b-23c6-643c-986966334873"}, "org_id", "filled in by the platform"),
        ({"block_number": 2**63}, "block_number", "64 bits"),
        ({"block_number": 1.5}, "block_number", "64 bits"),
        ({"block_number": "1"}, "block_number", "64 bits"),
        ({"block_number": True}, "block_number", "64 bits"),
        ({"small": 2**31}, "small", "32 bits"),
        ({"amount": "many"}, "amount", "must be a number"),
        ({"amount": "NaN"}, "amount", "finite"),
        ({"amount": "1e131073"}, "amount", "finite number that Postgres can hold"),
        ({"flag": 0}, "flag", "true or false"),
        ({"at": "2024-01-01T00:00:00"}, "at", "with its zone"),
        ({"at": 17}, "at", "with its zone"),
        ({"raw": "00ff"}, "raw", "0x"),
        ({"raw": "0x0"}, "raw", "0x"),
        ({"share": "1"}, "share", "finite number"),
        ({"id": "x"}, "id", "must be a uuid"),
        ({"class": "a\0b"}, "class", "NUL"),
        ({"data": {"deep": [{"\0": 1}]}}, "data", "NUL"),
    ],
)
def test_what_does_not_fit_is_named_by_record_and_field(
    fields: dict[str, Any], field: str, message: str
) -> None:
    records = [{"key": "good"}, {"key": "k", **fields}]
    with pytest.raises(BadRecords) as refused:
        ALL.decoder(ORG).check(json.dumps(records))
    [problem] = refused.value.problems
    assert (problem.record, problem.field) == (1, field)
    assert message in problem.message
    assert refused.value.message.startswith(f"record 1, field {field}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "array of objects"),
        ("null", "array of objects"),
        ("[1]", "record 0: must be an object"),
        ('[{"key":"k"', "can't be read"),
        ('[{"key":"\\ud800"}]', "can't be read"),
        ('[{"key":"k","data":' + "[" * 50_000 + "]" * 50_000 + "}]", "can't be read"),
        ("[{}]", "field key: is required"),
    ],
)
def test_what_is_no_array_of_records_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadRecords, match=message):
        ALL.decoder(ORG).check(text)


def test_of_many_problems_the_first_are_told() -> None:
    with pytest.raises(BadRecords) as refused:
        ALL.decoder(ORG).check(json.dumps([{"key": 1}] * 1000))
    assert [problem.record for problem in refused.value.problems] == list(range(MAX_PROBLEMS))


def test_a_large_batch_is_checked_in_portions_with_the_same_result() -> None:
    records: list[dict[str, Any]] = [{"key": f"k{n}", "data": {"n": n}} for n in range(25)]
    decoder = ALL.decoder(ORG)
    assert list(decoder.check_in_portions(json.dumps(records), 10)) == [10, 10, 5]
    records[23]["key"] = 7
    for wrong in (json.dumps(records), "{}", "[", "[1]"):
        with pytest.raises(BadRecords) as whole:
            decoder.check(wrong)
        with pytest.raises(BadRecords) as portions:
            list(decoder.check_in_portions(wrong, 10))
        assert portions.value.problems == whole.value.problems


def test_an_escaped_backslash_is_no_nul() -> None:
    assert ALL.decoder(ORG).check(json.dumps([{"key": "\\u0000", "data": "\\u0000"}])) == 1


@given(
    st.lists(st.text(), max_size=5),
    st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5),
)
def test_what_json_can_say_is_checked_without_a_crash(keys: list[str], data: Any) -> None:
    records = [{"key": key, "data": data} for key in keys]
    text = json.dumps(records, ensure_ascii=False).encode("utf-8", "replace").decode()
    try:
        rows = ALL.decoder(ORG).rows(text)
    except BadRecords:
        return
    assert [found[1] for found in rows] == [record["key"] for record in json.loads(text)]


def test_the_order_of_columns_and_of_the_key_is_no_part_of_a_schema() -> None:
    one = schema({"a": "text", "b": "bigint"}, "a", "b")
    other = schema({"b": "bigint", "a": "text"}, "b", "a")
    assert one.hash == other.hash
    assert not list(additive_problems(one, other))
    assert one.hash == "sha256:a32cba008242b12a97c88ae1c5bf5bd0844c0383fc211576523ae8f1cecd7089"
    assert (
        len({one.hash, schema({"a": "text", "b": "text"}, "a", "b").hash, schema({"a": "text"}, "a").hash})
        == 3
    )


def test_the_org_may_be_text_too() -> None:
    text = schema({"org_id": "text", "a": "text"}, "org_id", "a")
    assert text.decoder(ORG).rows('[{"a":"x"}]') == [(ORG, "x")]


def test_a_revision_can_not_come_later() -> None:
    old, new = schema({"a": "text"}, "a"), schema({"a": "text", "revision": "bigint"}, "a")
    assert [path for path, _ in additive_problems(old, new)] == [("columns", "revision")]


def test_a_deep_value_is_looked_through_to_its_end() -> None:
    for levels in (100, 480, 700):
        deep = "[" * levels + r'"\u0000"' + "]" * levels
        with pytest.raises(BadRecords, match="NUL"):
            ALL.decoder(ORG).check('[{"key": "k", "data": ' + deep + "}]")
