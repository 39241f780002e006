"""Inputs as Spark DataFrames: native Parquet over the committed files, cut to the scope, filtered by ``where``.

A compacted dataset is one DataFrame: Spark reads the files, executors the hot rows, from the snapshot that the
attempt holds. ``hot_and_cold`` explains what makes the two one table; ``arrow`` what a comparison means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_never
from uuid import UUID

from pyspark.sql import functions

from tracelake.contracts.dispatcher_api import InputFile
from tracelake.domain.errors import Conflict, Invalid
from tracelake.domain.where import And, Compare, CompareColumns, InList, IsNull, Op, Or, Predicate
from tracelake.tables.arrow import (
    MICROSECONDS,
    ConstantComparison,
    Kind,
    StoredColumn,
    align,
    compared,
    decimals,
)
from tracelake.tables.hot_and_cold import (
    blocks_without_files,
    dataframe_of,
    list_after_snapshot,
    scan_of_request,
    split_scan,
)
from tracelake.tables.scope import BLOCK_COLUMN, ReadRequest, check_cut
from tracelake.tables.spark_output import quoted_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

_KINDS: dict[str, Kind] = {
    "boolean": "bool",
    **dict.fromkeys(("byte", "short", "integer", "long"), "integer"),
    **dict.fromkeys(("float", "double"), "float"),
    "decimal": "decimal",
    "string": "text",
    "binary": "bytes",
    **dict.fromkeys(("timestamp", "timestamp_ntz"), "instant"),
    "date": "date",
}


def read_dataframe(request: ReadRequest, spark: SparkSession) -> DataFrame:
    files = request.files()
    if not files:
        raise no_rows_yet(request)
    return read_files_dataframe(request, files, spark)


def no_rows_yet(request: ReadRequest) -> Conflict:
    return Conflict("InputEmpty", f"input {request.name!r} has no files yet, so its columns aren't known")


def read_files_dataframe(request: ReadRequest, files: list[InputFile], spark: SparkSession) -> DataFrame:
    """Read files that the caller has listed, at least one."""
    frame = spark.read.parquet(*(file.location for file in files))
    schema = frame.schema
    if request.scope is not None:
        if BLOCK_COLUMN in schema.names:
            block = functions.col(BLOCK_COLUMN)
            frame = frame.where((block >= request.scope.start) & (block <= request.scope.end))
        else:
            check_cut(files, request.scope, request.name)
    if (predicate := request.predicate) is not None:
        frame = frame.where(where_column(predicate, schema))
    return frame


def where_column(tree: Predicate, schema: StructType) -> Column:
    match tree:
        case Compare(column, op, value):
            return _compare(schema, column, op, value)
        case CompareColumns(column, op, other):
            return _compare_columns(schema, column, op, other)
        case InList(column, values, negated):
            terms = [_compare(schema, column, Op.NE if negated else Op.EQ, value) for value in values]
            return _joined(terms, all_of=negated)
        case IsNull(column, negated):
            if column not in schema.names:
                return functions.lit(not negated)
            field = functions.col(quoted_name(column))
            return field.isNotNull() if negated else field.isNull()
        case And(terms):
            return _joined([where_column(term, schema) for term in terms], all_of=True)
        case Or(terms):
            return _joined([where_column(term, schema) for term in terms], all_of=False)
        case _:
            assert_never(tree)


def _compare(schema: StructType, column: str, op: Op, value: Any) -> Column:
    if column not in schema.names:
        return _unknown()
    field = functions.col(quoted_name(column))
    stored = _stored(schema, column)
    match align(stored, op, value):
        case ConstantComparison.ALWAYS:
            return field.isNotNull()
        case ConstantComparison.NEVER:
            return functions.lit(False)
        case ConstantComparison.UNKNOWN:
            return _unknown()
        case (op, literal):
            return compared(field, op, _literal(schema, column, literal))


def _literal(schema: StructType, column: str, value: Any) -> Column:
    kind = schema[column].dataType
    if _kind(schema, column) == "instant":
        # By its number of microseconds: in UTC it may be in a year that Python doesn't have.
        instant = functions.timestamp_micros(functions.lit(value))
        return instant if kind.typeName() == "timestamp" else instant.cast("timestamp_ntz")
    literal = functions.lit(value)
    return literal.cast(kind) if _kind(schema, column) == "decimal" else literal


def _stored(schema: StructType, column: str) -> StoredColumn:
    from pyspark.sql.types import DecimalType

    kind = schema[column].dataType
    if isinstance(kind, DecimalType):
        return decimals(kind.precision, kind.scale)
    return MICROSECONDS if _kind(schema, column) == "instant" else StoredColumn(_kind(schema, column))


def _compare_columns(schema: StructType, column: str, op: Op, other: str) -> Column:
    if column not in schema.names or other not in schema.names:
        return _unknown()
    kinds = {_kind(schema, column), _kind(schema, other)}
    if "other" in kinds or (len(kinds) > 1 and kinds != {"integer", "decimal"}):
        raise Invalid("InvalidWhere", f"columns {column} and {other} can't be compared here")
    return compared(functions.col(quoted_name(column)), op, functions.col(quoted_name(other)))


def _kind(schema: StructType, column: str) -> Kind:
    return _KINDS.get(schema[column].dataType.typeName(), "other")


def _unknown() -> Column:
    return functions.lit(None).cast("boolean")


def _joined(terms: list[Column], *, all_of: bool) -> Column:
    joined = terms[0]
    for term in terms[1:]:
        joined = joined & term if all_of else joined | term
    return joined


def read_both_dataframe(request: ReadRequest, hot: UUID, spark: SparkSession) -> DataFrame:
    files = list_after_snapshot(request)
    cold = read_files_dataframe(request, files, spark) if files else None
    spans = blocks_without_files(request.scope, files)
    scan = scan_of_request(request, spans, version=hot) if spans else None
    if scan is None:
        if cold is None:
            raise no_rows_yet(request)
        return cold
    rows = dataframe_of(scan, spark, split_scan(scan, request.data.snapshot().connection))
    # Spark joins the columns of a union by position, not by name.
    return rows if cold is None else cold.select(*rows.columns).unionAll(rows)
