"""Inputs as Arrow tables: committed files, cut to the scope, filtered by ``where`` as Postgres would."""

from __future__ import annotations

from typing import Any, assert_never

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from tracelake.contracts.dispatcher_api import InputFile
from tracelake.domain.errors import Invalid
from tracelake.domain.where import And, Compare, CompareColumns, InList, IsNull, Op, Or, Predicate
from tracelake.objects.prefix import ObjectLocation
from tracelake.operators.inputs import BLOCK_COLUMN, Input, check_cut
from tracelake.operators.parquet_file import local_path
from tracelake.operators.where_literal import Kind, Stored, Verdict, align, compared, decimals

_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def read_arrow(source: Input) -> pa.Table:
    return read_files(source, source.files())


def read_files(source: Input, files: list[InputFile]) -> pa.Table:
    """Of files that were listed already."""
    if not files:
        return pa.table({})
    paths = [str(local_path(ObjectLocation.parse(file.location))) for file in files]
    dataset = pads.dataset(paths, format="parquet")
    filters = []
    if source.scope is not None:
        if BLOCK_COLUMN in dataset.schema.names:
            block = pc.field(BLOCK_COLUMN)
            filters.append((block >= source.scope.start) & (block <= source.scope.end))
        else:
            check_cut(files, source.scope, source.name)
    if (predicate := source.predicate) is not None:
        filters.append(where_expression(predicate, dataset.schema))
    combined = None
    for condition in filters:
        combined = condition if combined is None else combined & condition
    return dataset.to_table(filter=combined)


def where_expression(tree: Predicate, schema: pa.Schema) -> Any:
    """An Arrow expression; unknown is null, which a filter leaves out."""
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
                return pc.scalar(not negated)
            return pc.field(column).is_valid() if negated else pc.field(column).is_null()
        case And(terms):
            return _joined([where_expression(term, schema) for term in terms], all_of=True)
        case Or(terms):
            return _joined([where_expression(term, schema) for term in terms], all_of=False)
        case _:
            assert_never(tree)


def kind_of(type_: pa.DataType) -> Kind:
    tests: list[tuple[Kind, Any]] = [
        ("bool", pa.types.is_boolean),
        ("integer", pa.types.is_integer),
        ("float", pa.types.is_floating),
        ("decimal", pa.types.is_decimal),
        ("text", lambda t: pa.types.is_string(t) or pa.types.is_large_string(t)),
        ("bytes", lambda t: any(is_(t) for is_ in _BYTES)),
        ("instant", pa.types.is_timestamp),
        ("date", pa.types.is_date),
    ]
    return next((kind for kind, is_kind in tests if is_kind(type_)), "other")


def stored_as(type_: pa.DataType) -> Stored:
    match kind := kind_of(type_):
        case "integer" if type_ == pa.uint64():
            return Stored(kind, low=0, high=2**64 - 1)
        case "decimal":
            return decimals(type_.precision, type_.scale)
        case "instant":
            return Stored(kind, _PER_SECOND[type_.unit])
        case _:
            return Stored(kind)


def _compare(schema: pa.Schema, column: str, op: Op, value: Any) -> Any:
    if column not in schema.names:
        return _unknown()
    type_ = schema.field(column).type
    stored = stored_as(type_)
    kind = stored.kind
    field = pc.field(column)
    if pa.types.is_fixed_size_binary(type_):
        field = field.cast(pa.binary())
    aligned = align(stored, op, value)
    if isinstance(aligned, Verdict):
        return _constant(field, aligned)
    op, literal = aligned
    if kind in ("instant", "decimal") or type_ == pa.uint64():
        literal = pa.scalar(literal, type=type_)
    expression = compared(field, op, pc.scalar(literal))
    if kind == "float" and op in (Op.GT, Op.GE):
        return expression | pc.is_nan(field)
    return expression


def _compare_columns(schema: pa.Schema, column: str, op: Op, other: str) -> Any:
    if column not in schema.names or other not in schema.names:
        return _unknown()
    types = [schema.field(name).type for name in (column, other)]
    kinds = {kind_of(type_) for type_ in types}
    if kinds & {"other", "float"} or (len(kinds) > 1 and kinds != {"integer", "decimal"}):
        raise Invalid("InvalidWhere", f"columns {column} and {other} can't be compared here")
    common = _common_type(types)
    fields = [pc.field(name) if common is None else pc.field(name).cast(common) for name in (column, other)]
    return compared(fields[0], op, fields[1])


def _common_type(types: list[pa.DataType]) -> pa.DataType | None:
    """The type to compare two columns in, where Arrow finds none that holds both; None: it does."""
    if types[0] == types[1]:
        return None
    if any(map(pa.types.is_fixed_size_binary, types)):
        return pa.binary()
    if all(map(pa.types.is_timestamp, types)) and all(type_.unit != "ns" for type_ in types):
        return pa.timestamp("us", "UTC")
    if any(map(pa.types.is_decimal, types)) or pa.uint64() in types:
        sizes = [(t.precision, t.scale) if pa.types.is_decimal(t) else (20, 0) for t in types]
        scale = max(scale for _, scale in sizes)
        precision = scale + max(precision - scale for precision, scale in sizes)
        return (
            pa.decimal128(precision, scale) if precision <= 38 else pa.decimal256(min(precision, 76), scale)
        )
    return None


def _constant(field: Any, verdict: Verdict) -> Any:
    match verdict:
        case Verdict.ALWAYS:
            return field.is_valid()
        case Verdict.NEVER:
            return pc.scalar(False)
        case Verdict.UNKNOWN:
            return _unknown()
        case _:
            assert_never(verdict)


def _unknown() -> Any:
    return pc.scalar(pa.scalar(None, pa.bool_()))


def _joined(terms: list[Any], *, all_of: bool) -> Any:
    """Three-valued: ``&`` and ``|`` of expressions are Kleene's."""
    joined = terms[0]
    for term in terms[1:]:
        joined = joined & term if all_of else joined | term
    return joined
