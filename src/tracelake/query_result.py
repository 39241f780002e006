"""What a query answered: a ``pyarrow.Table``, and what the service said about it.

    result = client.query("SELECT * FROM transfers WHERE block_number >= ?", [100])
    result.num_rows, result["value"], result.to_pandas()      # as on any pyarrow.Table
    result.to_polars()
    result.truncated                                          # whether there would have been more rows

pyarrow's tables can't be given another class or further methods, so this stands in front of one: everything that a
table has is the table's, ``isinstance(result, pyarrow.Table)`` holds, and whoever takes Arrow data by its protocol
(polars, DuckDB, pandas, ``pyarrow.table``) takes this. Functions of pyarrow that are compiled for the class itself,
such as ``pyarrow.parquet.write_table``, want ``result.to_arrow()``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final
from uuid import UUID

import pyarrow as pa

from tracelake.client_extra import need

if TYPE_CHECKING:
    import polars


class ResultTruncated(UserWarning):
    """A result without a limit of its own was cut at the service's."""

    def __init__(self, rows: int) -> None:
        super().__init__(
            f"the result is cut after {rows:,} rows, which is all that the service gives at once: ask for less, "
            "in parts, or for an export (export_query)"
        )


@final
class QueryResult:
    __slots__ = ("_table", "query_id", "truncated")
    __class__ = property(lambda _: pa.Table)

    def __init__(self, table: pa.Table, *, truncated: bool, query_id: UUID) -> None:
        self._table = table
        self.truncated = truncated
        self.query_id = query_id

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_table"), name)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)

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
        """A ``pandas.DataFrame``, by the options of ``pyarrow.Table.to_pandas``; needs pandas."""
        need("pandas")
        return self._table.to_pandas(**options)

    def to_polars(self) -> polars.DataFrame:
        """Needs polars; the columns aren't copied."""
        need("polars")
        import polars

        return polars.DataFrame(self._table)


def _restored(table: pa.Table, truncated: bool, query_id: UUID) -> QueryResult:
    return QueryResult(table, truncated=truncated, query_id=query_id)
