"""What weighs nothing in Arrow is counted all the same, and shapes that nobody can handle are named."""

from __future__ import annotations

from typing import Any

import duckdb
import pyarrow as pa
import pytest

from tracelake.query.engine.column_types import (
    MOST_COLUMNS,
    MOST_LEVELS,
    cells,
    shape_problem,
    stands_alone,
    weight,
)
from tracelake.query.engine.slot import _decode
from tracelake.query.engine.template import UnexpectedMessage


def column(expression: str) -> pa.Array:
    with duckdb.connect() as connection:
        return connection.sql(f"SELECT {expression} AS x").to_arrow_table().to_batches()[0].column(0)


@pytest.mark.parametrize(
    ("expression", "count"),
    [
        ("NULL", 1),
        ("list_resize([NULL], 1000)", 1 + 1000),
        ("list_resize([true], 1000)", 1 + 1000),
        ("[[NULL, NULL], NULL, [NULL]]", 1 + 3 + 3),
        ("{'a': NULL, 'b': [NULL, NULL]}", 1 + 1 + 1 + 2),
        ("{'a_long_name_of_24_letters': NULL}", 1 + 25 // 8 + 1),
        ("MAP {'k': [NULL, NULL]}", 1 + 1 + 1 + 2),
        ("list_resize([NULL], 1000)::INTEGER[1000]", 1 + 1000),
        ("union_value(n := NULL::INTEGER)", 1 + 1),
        ("'b'::ENUM('a', 'b')", 1),
    ],
)
def test_every_value_counts(expression: str, count: int) -> None:
    assert cells(column(expression)) == count


def test_a_slice_weighs_what_is_in_it() -> None:
    for values in (
        pa.array([[None] * 10, None, [None] * 5]),
        pa.array([[True] * 10, None, [False] * 5]),
        pa.array([{"a": [1] * 10}, None, {"a": [1] * 5}]),
        pa.array([[("k", None)] * 10, None, [("k", None)] * 5], pa.map_(pa.string(), pa.null())),
    ):
        whole = cells(values)
        assert sum(cells(values.slice(at, 1)) for at in range(3)) == whole
        assert cells(values.slice(3)) == 0
    fixed = pa.array([[None] * 4, [None] * 4], pa.list_(pa.null(), 4))
    assert [cells(fixed), cells(fixed.slice(1))] == [10, 5]


def test_names_that_stand_for_long_values_weigh_as_these() -> None:
    names = pa.DictionaryArray.from_arrays(pa.array([0] * 100, pa.int8()), ["x" * 800])
    assert cells(names) > 100 * 100
    batch = pa.record_batch({"a": pa.nulls(10), "b": pa.array(["x" * 1000] * 10)})
    assert weight(batch) >= 10_000


def test_shapes_that_are_too_much_are_named() -> None:
    assert shape_problem(pa.schema([(f"c{n}", pa.int64()) for n in range(MOST_COLUMNS)])) is None
    assert "columns" in (shape_problem(pa.schema([(f"c{n}", pa.null()) for n in range(2001)])) or "")
    wide = pa.struct([(f"f{n}", pa.null()) for n in range(10_001)])
    assert "fields" in (shape_problem(pa.schema([("a", wide)])) or "")
    deep: pa.DataType = pa.null()
    for _ in range(MOST_LEVELS):
        deep = pa.list_(deep)
    assert "levels" in (shape_problem(pa.schema([("a", deep)])) or "")


def test_only_values_with_bytes_of_their_own_are_taken_from_a_slot() -> None:
    assert stands_alone(pa.schema([("a", pa.list_(pa.struct([("b", pa.string())])))]))
    for kind in (
        pa.string_view(),
        pa.list_(pa.binary_view()),
        pa.list_view(pa.null()),
        pa.run_end_encoded(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.string_view()),
    ):
        assert not stands_alone(pa.schema([("a", kind)]))


def sent(*batches: pa.RecordBatch, **options: Any) -> bytearray:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytearray(sink.getvalue())


def test_what_a_slot_sends_is_no_more_than_it_looks() -> None:
    batch = pa.record_batch({"a": [1, 2], "b": pa.array(["x", None]).dictionary_encode()})
    assert _decode(sent(batch), batch.schema, 1000).equals(batch)
    nulls = pa.record_batch({"a": pa.nulls(10_000_000)})
    row = pa.record_batch({"a": pa.array([[None] * 1_000_000], pa.list_(pa.null()))})
    refused = [
        (sent(batch, compression="zstd"), batch.schema),
        (sent(batch, compression="lz4"), batch.schema),
        (sent(batch, metadata_version=pa.ipc.MetadataVersion.V4), batch.schema),
        (sent(batch, batch), batch.schema),
        (sent(batch)[:-200], batch.schema),
        (sent(nulls), nulls.schema),
        (sent(row), row.schema),
        (sent(row), batch.schema),
    ]
    for stream, schema in refused:
        with pytest.raises((UnexpectedMessage, pa.ArrowException)):
            _decode(stream, schema, 100_000)
