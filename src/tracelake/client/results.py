"""``QueryResult``: the answer to a query, a ``pyarrow.Table`` with the service's remarks on it.

    result = client.query("SELECT * FROM transfers WHERE block_number >= ?", [100])
    result.num_rows, result["value"], result.to_pandas()      # as on any pyarrow.Table
    result.to_polars()
    result.truncated                                          # whether there would have been more rows

pyarrow's tables can't be subclassed or given further methods, so this class wraps one: every attribute of a table
is passed on to it, ``isinstance(result, pyarrow.Table)`` holds, and libraries that accept Arrow data by its
protocol (polars, DuckDB, pandas, ``pyarrow.table``) accept this. Functions of pyarrow that are compiled for the
class itself, such as ``pyarrow.parquet.write_table``, need ``result.to_arrow()``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, final
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from tracelake.client.extras import need
from tracelake.contracts.query_api import TYPE_FIELD

if TYPE_CHECKING:
    import polars

#: DuckDB's types of whole numbers that are text where Arrow has no type for them.
_WIDE = frozenset({b"HUGEINT", b"UHUGEINT", b"BIGNUM"})
#: Doubles, which pandas makes of integers beside nulls, hold every whole number up to here.
_EXACT = 2**53


class ResultTruncated(UserWarning):
    """A query without a limit has more rows than the service returns."""

    def __init__(self, rows: int) -> None:
        super().__init__(
            f"the result is cut after {rows:,} rows, the service's maximum: select fewer rows, query in parts, "
            "or export the result (export_query)"
        )


@final
class QueryResult:
    __slots__ = ("_table", "query_id", "truncated")
    # isinstance() asks for ``__class__``; type() still returns this class.
    __class__ = property(lambda _: pa.Table)

    def __init__(self, table: pa.Table, *, truncated: bool, query_id: UUID) -> None:
        self._table = table
        self.truncated = truncated
        self.query_id = query_id

    def __getattr__(self, name: str) -> Any:
        # ``self._table`` would recurse for ever while an unpickled or copied object has none yet.
        return getattr(object.__getattribute__(self, "_table"), name)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)

    # Python's operators look up special methods on the class, where ``__getattr__`` isn't asked.
    def __getitem__(self, key: int | str) -> Any:
        return self._table[key]

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __eq__(self, other: object) -> bool:
        return bool(self._table == (other._table if type(other) is QueryResult else other))

    def __repr__(self) -> str:
        return repr(self._table)

    def __reduce__(self) -> Any:
        return _restored, (self._table, self.truncated, self.query_id)

    def to_arrow(self) -> pa.Table:
        return self._table

    def to_pandas(self, **options: Any) -> Any:
        """A ``pandas.DataFrame``, by the options of ``pyarrow.Table.to_pandas``; needs pandas. Whole numbers of any
        of DuckDB's types are exact: int64 if all of the column fit (Int64 beside nulls), else Python's own."""
        need("pandas")
        columns = [
            _whole_numbers(field, self._table.column(at)) for at, field in enumerate(self._table.schema)
        ]
        frame = pa.table(columns, names=self._table.column_names).to_pandas(**options)
        for at, column in enumerate(columns):
            if (exact := _exact_series(self._table.schema.field(at), column)) is not None:
                frame.isetitem(at, exact)
        return frame

    def to_polars(self) -> polars.DataFrame:
        """Needs polars; the columns aren't copied."""
        need("polars")
        import polars

        return polars.DataFrame(self._table)


def _is_wide(field: pa.Field) -> bool:
    if pa.types.is_decimal(field.type):
        return bool(field.type.scale == 0)
    return (field.metadata or {}).get(TYPE_FIELD.encode()) in _WIDE


def _whole_numbers(field: pa.Field, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column as int64, if it has whole numbers and all of them fit."""
    if _is_wide(field):
        try:
            return pc.cast(column, pa.int64())
        except pa.ArrowInvalid:
            return column
    return column


def _exact_series(field: pa.Field, column: pa.ChunkedArray) -> Any:
    """The numbers as pandas holds them exactly, where pyarrow's own choice would round them or give decimals;
    otherwise None."""
    # Without stubs: the client doesn't depend on pandas.
    pandas: Any = import_module("pandas")
    if pa.types.is_integer(column.type) and column.null_count:
        ends = pc.min_max(column).as_py()
        if not _is_wide(field) and (ends["min"] is None or -_EXACT <= ends["min"] <= ends["max"] <= _EXACT):
            return None
        kind = pandas.UInt64Dtype() if column.type == pa.uint64() else pandas.Int64Dtype()
        return pandas.Series(column.to_pylist(), dtype=kind)
    if _is_wide(field) and not pa.types.is_integer(column.type):
        numbers = [None if value is None else int(value) for value in column.to_pylist()]
        return pandas.Series(numbers, dtype=object)
    return None


def _restored(table: pa.Table, truncated: bool, query_id: UUID) -> QueryResult:
    return QueryResult(table, truncated=truncated, query_id=query_id)
