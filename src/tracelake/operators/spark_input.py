"""Inputs as Spark DataFrames: native Parquet over the committed files, cut to the scope, filtered by ``where``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_never

from pyspark.sql import functions

from tracelake.contracts.dispatcher_api import InputFile
from tracelake.domain.errors import Conflict, Invalid
from tracelake.domain.where import And, Compare, CompareColumns, InList, IsNull, Op, Or, Predicate
from tracelake.operators.inputs import BLOCK_COLUMN, Input, check_cut
from tracelake.operators.spark_names import quoted
from tracelake.operators.where_literal import MICROSECONDS, Kind, Stored, Verdict, align, compared, decimals

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


def read_dataframe(source: Input, spark: SparkSession) -> DataFrame:
    files = source.files()
    if not files:
        raise no_rows_yet(source)
    return read_files(source, files, spark)


def no_rows_yet(source: Input) -> Conflict:
    return Conflict("InputEmpty", f"input {source.name!r} has no files yet, so its columns aren't known")


def read_files(source: Input, files: list[InputFile], spark: SparkSession) -> DataFrame:
    """Of files that were listed already, one at least."""
    frame = spark.read.parquet(*(file.location for file in files))
    schema = frame.schema
    if source.scope is not None:
        if BLOCK_COLUMN in schema.names:
            block = functions.col(BLOCK_COLUMN)
            frame = frame.where((block >= source.scope.start) & (block <= source.scope.end))
        else:
            check_cut(files, source.scope, source.name)
    if (predicate := source.predicate) is not None:
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
            field = functions.col(quoted(column))
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
    field = functions.col(quoted(column))
    stored = _stored(schema, column)
    match align(stored, op, value):
        case Verdict.ALWAYS:
            return field.isNotNull()
        case Verdict.NEVER:
            return functions.lit(False)
        case Verdict.UNKNOWN:
            return _unknown()
        case (op, literal):
            return compared(field, op, _literal(schema, column, literal))


def _literal(schema: StructType, column: str, value: Any) -> Column:
    kind = schema[column].dataType
    if _kind(schema, column) == "instant":
        # Of its number: in UTC it may be in a year that Python has not.
        instant = functions.timestamp_micros(functions.lit(value))
        return instant if kind.typeName() == "timestamp" else instant.cast("timestamp_ntz")
    literal = functions.lit(value)
    return literal.cast(kind) if _kind(schema, column) == "decimal" else literal


def _stored(schema: StructType, column: str) -> Stored:
    from pyspark.sql.types import DecimalType

    kind = schema[column].dataType
    if isinstance(kind, DecimalType):
        return decimals(kind.precision, kind.scale)
    return MICROSECONDS if _kind(schema, column) == "instant" else Stored(_kind(schema, column))


def _compare_columns(schema: StructType, column: str, op: Op, other: str) -> Column:
    if column not in schema.names or other not in schema.names:
        return _unknown()
    kinds = {_kind(schema, column), _kind(schema, other)}
    if "other" in kinds or (len(kinds) > 1 and kinds != {"integer", "decimal"}):
        raise Invalid("InvalidWhere", f"columns {column} and {other} can't be compared here")
    return compared(functions.col(quoted(column)), op, functions.col(quoted(other)))


def _kind(schema: StructType, column: str) -> Kind:
    return _KINDS.get(schema[column].dataType.typeName(), "other")


def _unknown() -> Column:
    return functions.lit(None).cast("boolean")


def _joined(terms: list[Column], *, all_of: bool) -> Column:
    joined = terms[0]
    for term in terms[1:]:
        joined = joined & term if all_of else joined | term
    return joined
