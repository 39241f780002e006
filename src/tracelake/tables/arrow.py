"""Committed files as Arrow tables, cut to the scope and filtered by ``where``; and what a comparison means.

``where`` must keep the same rows on every engine. Engines differ in how they compare a literal with a column, so
``align`` settles that here, once per column type instead of per value, by the rules of ``domain.where``: a
string takes the column's type, values without a common order make the comparison unknown, and a literal that the
column can't hold is replaced by one that it can hold and that gives the same answer. A column of integers,
decimals or instants holds whole numbers of some unit within bounds, so one rule decides on all of them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeVar, assert_never

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from tracelake.contracts.dispatcher_api import InputFile
from tracelake.domain.errors import Invalid
from tracelake.domain.literals import read_boolean, read_double, read_integer, read_numeric
from tracelake.domain.where import And, Compare, CompareColumns, InList, IsNull, Op, Or, Predicate, WhereValue
from tracelake.objects.base import ObjectLocation
from tracelake.tables.parquet import local_path
from tracelake.tables.scope import BLOCK_COLUMN, ReadRequest, check_cut

_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
Kind = Literal["bool", "integer", "float", "decimal", "text", "bytes", "instant", "date", "other"]
T = TypeVar("T")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_COMPARISONS: Mapping[Op, Callable[[Any, Any], Any]] = {
    Op.EQ: operator.eq,
    Op.NE: operator.ne,
    Op.LT: operator.lt,
    Op.LE: operator.le,
    Op.GT: operator.gt,
    Op.GE: operator.ge,
}


def read_arrow(request: ReadRequest) -> pa.Table:
    return read_files(request, request.files())


def read_files(request: ReadRequest, files: list[InputFile]) -> pa.Table:
    """Read files that the caller has listed."""
    if not files:
        return pa.table({})
    paths = [str(local_path(ObjectLocation.parse(file.location))) for file in files]
    dataset = pads.dataset(paths, format="parquet")
    filters = []
    if request.scope is not None:
        if BLOCK_COLUMN in dataset.schema.names:
            block = pc.field(BLOCK_COLUMN)
            filters.append((block >= request.scope.start) & (block <= request.scope.end))
        else:
            check_cut(files, request.scope, request.name)
    if (predicate := request.predicate) is not None:
        filters.append(where_expression(predicate, dataset.schema))
    combined = None
    for condition in filters:
        combined = condition if combined is None else combined & condition
    return dataset.to_table(filter=combined)


def where_expression(tree: Predicate, schema: pa.Schema) -> Any:
    """A predicate as an Arrow expression. Unknown is null, and a filter drops those rows."""
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
                # A column that the files don't have is null in every row.
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


def stored_as(type_: pa.DataType) -> StoredColumn:
    match kind := kind_of(type_):
        case "integer" if type_ == pa.uint64():
            return StoredColumn(kind, low=0, high=2**64 - 1)
        case "decimal":
            return decimals(type_.precision, type_.scale)
        case "instant":
            return StoredColumn(kind, _PER_SECOND[type_.unit])
        case _:
            return StoredColumn(kind)


def _compare(schema: pa.Schema, column: str, op: Op, value: Any) -> Any:
    if column not in schema.names:
        return _unknown()
    type_ = schema.field(column).type
    stored = stored_as(type_)
    kind = stored.kind
    field = pc.field(column)
    if pa.types.is_fixed_size_binary(type_):
        # Arrow compares these only with literals of the same length.
        field = field.cast(pa.binary())
    aligned = align(stored, op, value)
    if isinstance(aligned, ConstantComparison):
        return _constant(field, aligned)
    op, literal = aligned
    # Without its type Arrow would guess one for the literal, and cast the column to a common type.
    if kind in ("instant", "decimal") or type_ == pa.uint64():
        literal = pa.scalar(literal, type=type_)
    if kind == "float" and literal != literal:
        return _compare_nan(field, op)
    expression = compared(field, op, pc.scalar(literal))
    if kind == "float" and op in (Op.GT, Op.GE):
        # SQL orders NaN above all numbers; Arrow takes every comparison with it for false.
        return expression | pc.is_nan(field)
    return expression


def _compare_nan(field: Any, op: Op) -> Any:
    """Against NaN, which equals itself and is above every number."""
    match op:
        case Op.EQ | Op.GE:
            return pc.is_nan(field)
        case Op.NE | Op.LT:
            return ~pc.is_nan(field)
        case Op.LE:
            return _constant(field, ConstantComparison.ALWAYS)
        case Op.GT:
            return _constant(field, ConstantComparison.NEVER)
        case _:
            assert_never(op)


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
        # An integer of 64 bits has at most 20 digits.
        sizes = [(t.precision, t.scale) if pa.types.is_decimal(t) else (20, 0) for t in types]
        scale = max(scale for _, scale in sizes)
        precision = scale + max(precision - scale for precision, scale in sizes)
        return (
            pa.decimal128(precision, scale) if precision <= 38 else pa.decimal256(min(precision, 76), scale)
        )
    return None


def _constant(field: Any, verdict: ConstantComparison) -> Any:
    match verdict:
        case ConstantComparison.ALWAYS:
            return field.is_valid()
        case ConstantComparison.NEVER:
            return pc.scalar(False)
        case ConstantComparison.UNKNOWN:
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


class ConstantComparison(Enum):
    """A comparison that is the same for every value: always true, never, or unknown; NULL stays unknown."""

    ALWAYS = "always"
    NEVER = "never"
    UNKNOWN = "unknown"


class StoredColumn(NamedTuple):
    """The values that a column can hold. Integers, decimals and instants are whole numbers from ``low`` to
    ``high``; ``units`` of them make one. For decimals that is a power of ten, for instants, which count from 1970
    in UTC, the number in a second."""

    kind: Kind
    units: int = 1
    low: int = -(2**63)
    high: int = 2**63 - 1


_LITERALS: Mapping[Kind, Callable[[str], bool | int | float | None]] = {
    "bool": read_boolean,
    "integer": read_integer,
    "float": read_double,
}
MICROSECONDS = StoredColumn("instant", 10**6)


def decimals(precision: int, scale: int) -> StoredColumn:
    most = 10**precision - 1
    return StoredColumn("decimal", 10**scale, -most, most)


def compared(left: T, op: Op, right: T) -> T:
    """The comparison as an expression of the engine that the operands belong to."""
    expression: T = _COMPARISONS[op](left, right)
    return expression


def align(column: StoredColumn, op: Op, value: WhereValue) -> tuple[Op, Any] | ConstantComparison:
    """The comparison to make against such a column. An instant is its number of units."""
    kind = column.kind
    if isinstance(value, str) and kind == "decimal":
        number = read_numeric(value)
        return ConstantComparison.UNKNOWN if number is None else _against_decimal(column, op, number)
    if isinstance(value, str) and (reads := _LITERALS.get(kind)) is not None:
        read = reads(value)
        if read is None:
            return ConstantComparison.UNKNOWN
        value = read
    match kind, value:
        case "bool", bool():
            return op, value
        # Before the numbers: Python's bool is an int, and SQL's boolean isn't.
        case _, bool():
            return ConstantComparison.UNKNOWN
        case "integer", int() | float():
            return _against_whole(column, op, Fraction(value))
        case "float", int() | float():
            return op, float(value)
        case "decimal", int() | float():
            # By its shortest decimal text, as the DAG file has it: 0.1 means a tenth, not the float next to it.
            return _against_decimal(column, op, Decimal(repr(value)))
        case "text", str():
            return op, value
        case "instant", str():
            seconds = _seconds(value)
            return ConstantComparison.UNKNOWN if seconds is None else _against_whole(column, op, seconds)
        case (("date" | "bytes"), str()):
            parsed = _parsed(kind, value)
            return ConstantComparison.UNKNOWN if parsed is None else (op, parsed)
        case _:
            return ConstantComparison.UNKNOWN


def _against_whole(column: StoredColumn, op: Op, value: Fraction) -> tuple[Op, int] | ConstantComparison:
    exact = value * column.units
    whole = math.floor(exact)
    # The literal lies between two values that the column can hold.
    if whole != exact:
        match op:
            case Op.EQ:
                return ConstantComparison.NEVER
            case Op.NE:
                return ConstantComparison.ALWAYS
            case Op.LT | Op.LE:
                op = Op.LE
            case Op.GT | Op.GE:
                op, whole = Op.GE, whole + 1
    if column.low <= whole <= column.high:
        return op, whole
    return _beyond(op, above=whole > column.high)


def _beyond(op: Op, *, above: bool) -> ConstantComparison:
    """Against a literal above, or below, all values that the column can hold."""
    true = (op is Op.NE) or (op in (Op.LT, Op.LE) if above else op in (Op.GT, Op.GE))
    return ConstantComparison.ALWAYS if true else ConstantComparison.NEVER


def _against_decimal(column: StoredColumn, op: Op, value: Decimal) -> tuple[Op, Decimal] | ConstantComparison:
    if not value.is_finite():
        return _beyond(op, above=value.is_nan() or value > 0)
    aligned = _against_whole(column, op, Fraction(value))
    if isinstance(aligned, ConstantComparison):
        return aligned
    return aligned[0], _decimal(aligned[1], column.units)


def _decimal(whole: int, units: int) -> Decimal:
    """With all digits: the decimal context would round it."""
    sign, digits, _ = Decimal(whole).as_tuple()
    return Decimal((sign, digits, 1 - len(str(units))))


def _seconds(text: str) -> Fraction | None:
    """Seconds since 1970 in UTC, as a difference: the instant in UTC may be in a year that Python doesn't have."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    since = (at if at.tzinfo else at.replace(tzinfo=UTC)) - _EPOCH
    return Fraction(since // _MICROSECOND, 10**6)


def _parsed(kind: Kind, text: str) -> date | bytes | None:
    try:
        if kind == "date":
            return date.fromisoformat(text)
        # Postgres' own spelling of bytea.
        return bytes.fromhex(text[2:]) if text.startswith("\\x") else None
    except ValueError:
        return None
