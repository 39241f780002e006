"""Results as frames: whole numbers stay exact, and are integers of pandas where they fit."""

from __future__ import annotations

from decimal import Decimal
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest

from tracelake.client.results import QueryResult
from tracelake.contracts.query_api import TYPE_FIELD

MOST = 2**256 - 1
HUGE, BIG = pa.decimal128(38, 0), pa.string()


def frame(kind: pa.DataType, values: list[Any], engine_type: str = "") -> Any:
    field = pa.field("n", kind, metadata={TYPE_FIELD: engine_type})
    table = pa.table([pa.array(values, kind)], schema=pa.schema([field]))
    return QueryResult(table, truncated=False, query_id=uuid4()).to_pandas()


@pytest.mark.parametrize(
    ("kind", "values", "engine_type", "dtype"),
    [
        (HUGE, [Decimal(5), Decimal(2**63 - 1)], "HUGEINT", "int64"),
        (HUGE, [Decimal(2**63 - 1), None], "HUGEINT", "Int64"),
        (HUGE, [Decimal(2**63)], "HUGEINT", "object"),
        (BIG, ["5", str(-(2**63))], "BIGNUM", "int64"),
        (BIG, [str(MOST), "-1", None], "BIGNUM", "object"),
        (BIG, [str(2**128 - 1)], "UHUGEINT", "object"),
        (pa.int64(), [2**53 + 1, None], "BIGINT", "Int64"),
        (pa.uint64(), [2**64 - 1, None], "UBIGINT", "UInt64"),
    ],
)
def test_whole_numbers_are_exact_and_integers_where_they_fit(
    kind: pa.DataType, values: list[Any], engine_type: str, dtype: str
) -> None:
    series = frame(kind, values, engine_type)["n"]
    assert str(series.dtype) == dtype
    missing = [value is None for value in values]
    assert series.isna().tolist() == missing
    found = [value for value, absent in zip(series.tolist(), missing, strict=True) if not absent]
    assert found == [int(value) for value in values if value is not None]
    assert {type(value) for value in found} == {int}


def test_other_columns_are_what_pyarrow_makes_of_them() -> None:
    assert str(frame(pa.int64(), [1, None])["n"].dtype) == "float64"
    assert frame(pa.decimal128(10, 2), [Decimal("1.50")])["n"].tolist() == [Decimal("1.50")]
    assert frame(BIG, ["5"], "VARCHAR")["n"].tolist() == ["5"]
    table = pa.table([pa.array([1]), pa.array([Decimal(2)], HUGE)], names=["same", "same"])
    twice = QueryResult(table, truncated=False, query_id=uuid4()).to_pandas()
    assert [str(kind) for kind in twice.dtypes] == ["int64", "int64"], "columns of one name stay apart"
