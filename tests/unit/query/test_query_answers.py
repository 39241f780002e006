"""Values in JSON by DuckDB type, exactly as the contract says; and which form an Accept header asks for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from tracelake.contracts.query_api import ARROW_STREAM
from tracelake.query.answers import JsonResultWriter, encode_rows, wants_arrow
from tracelake.query.engine.column_types import ResultColumnType, ResultFormat, carried, column_types

BIGINT = [ResultColumnType("BIGINT", "bigint")]


def in_json(expression: str) -> Any:
    """The value as a caller reads it, beside a NULL of the same type, which must stay one."""
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        value = connection.sql("SELECT 1").project(f"{expression} AS x")
        found = value.union(connection.sql("SELECT NULL AS x")).order("x NULLS LAST")
        columns = column_types(found)
        batches = carried(found, ResultFormat.JSON).to_arrow_table().to_batches()
    rows = [row for batch in batches for row in json.loads(b"[" + encode_rows(batch, columns) + b"]")]
    assert rows[-1] == [None]
    return rows[0][0]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("true", True),
        ("127::TINYINT", 127),
        ("18446744073709551615::UBIGINT", 18446744073709551615),
        ("170141183460469231731687303715884105727::HUGEINT", 170141183460469231731687303715884105727),
        ("(-5)::HUGEINT", -5),
        ("12.50::DECIMAL(10,2)", "12.50"),
        ("7::DECIMAL(38,0)", "7"),
        ("0::DECIMAL(38,20)", "0." + "0" * 20),
        ("-0.0000000001::DECIMAL(20,10)", "-0.0000000001"),
        ("[0.0000001::DECIMAL(38,30)]", ["0.0000001" + "0" * 23]),
        ("1.5::DOUBLE", 1.5),
        ("'nan'::DOUBLE", None),
        ("'-inf'::FLOAT", None),
        ("'a\"b\u00e9'", 'a"b\u00e9'),
        (r"'\xDE\xAD'::BLOB", "0xdead"),
        ("DATE '2026-11-02'", "2026-11-02"),
        ("TIME '10:00:00'", "10:00:00"),
        ("TIME '10:00:00.25'", "10:00:00.250000"),
        ("TIMESTAMP '2026-11-02 10:00:00'", "2026-11-02T10:00:00"),
        ("TIMESTAMPTZ '2026-11-02 12:00:00.123456+02'", "2026-11-02T10:00:00.123456Z"),
        ("TIMESTAMP_NS '2026-11-02 10:00:00.123456789'", "2026-11-02T10:00:00.123456789"),
        ("TIMESTAMP '30000-01-01'", "30000-01-01T00:00:00"),
        ("'infinity'::TIMESTAMP", "infinity"),
        ("'-infinity'::DATE", "-infinity"),
        ("'0b0e3a3c-95a5-4a4e-a6ab-5a6d9bca0a0b'::UUID", "0b0e3a3c-95a5-4a4e-a6ab-5a6d9bca0a0b"),
        ("'b'::ENUM('a', 'b')", "b"),
        ("[1::HUGEINT, NULL, 2]", [1, None, 2]),
        ("[[1.5], NULL, []]", [["1.5"], None, []]),
        ("[1, 2]::INTEGER[2]", [1, 2]),
        (r"{'a': 1, 'b': ['\x01'::BLOB]}", {"a": 1, "b": ["0x01"]}),
        ("MAP {'k': DATE '2026-11-02'}", [["k", "2026-11-02"]]),
        ("union_value(n := 5)", 5),
    ],
)
def test_values_are_written_as_the_contract_says(expression: str, value: Any) -> None:
    assert in_json(expression) == value


@pytest.mark.parametrize(
    "interval",
    ["1 year 2 months 3 days 04:05:06.5", "-1 months", "00:00:00", "25:00:00", "-00:00:01.25", "2 years"],
)
def test_intervals_are_written_as_the_engine_does(interval: str) -> None:
    with duckdb.connect() as connection:
        row = connection.execute("SELECT ?::INTERVAL::VARCHAR", [interval]).fetchone()
    assert row is not None
    assert in_json(f"INTERVAL '{interval}'") == row[0]


@pytest.mark.parametrize(
    ("accept", "arrow"),
    [
        (None, False),
        ("*/*", False),
        ("application/json", False),
        (ARROW_STREAM, True),
        (ARROW_STREAM.upper(), True),
        (f"application/json, {ARROW_STREAM}", True),
        (f"application/json, {ARROW_STREAM};q=0.5", False),
        (f"application/json;q=0.5, {ARROW_STREAM}; q=0.9", True),
        (f"{ARROW_STREAM};q=0", False),
        (f"{ARROW_STREAM};q=x", False),
        (",;,q=1", False),
    ],
)
def test_arrow_is_for_those_who_ask_for_it(accept: str | None, arrow: bool) -> None:
    assert wants_arrow(accept) is arrow


@pytest.mark.parametrize("expression", ["list_resize([NULL], 1000000)", "list_resize([true], 1000000)"])
async def test_many_values_in_few_bytes_are_encoded_while_others_are_served(expression: str) -> None:
    with duckdb.connect() as connection:
        found = connection.sql(f"SELECT {expression} AS x")
        columns = column_types(found)
        [batch] = found.to_arrow_table().to_batches()
    form = JsonResultWriter(64 * 1024 * 1024)
    await form.begin(batch.schema, columns)
    adding = asyncio.create_task(form.add(batch))
    turns = 0
    while not adding.done():
        await asyncio.sleep(0)
        turns += 1
    # Encoded on the loop, it would be done after the first turn.
    assert turns > 2
    assert (form.rows, form.full) == (1, False)


async def test_rows_beyond_the_bytes_are_left_out_wherever_they_are_in_a_batch() -> None:
    batch = pa.record_batch({"x": pa.array(range(10_000))})
    whole = encode_rows(batch, BIGINT)
    for most in (50, 20_000, len(whole) - 1, len(whole) + 8):
        form = JsonResultWriter(most)
        await form.begin(batch.schema, BIGINT)
        await form.add(batch)
        await form.seal()
        assert form.full == (most < len(whole))
        assert len(encode_rows(batch.slice(0, form.rows), BIGINT)) <= most
        assert form.rows == 10_000 or len(encode_rows(batch.slice(0, form.rows + 1), BIGINT)) > most - 8
