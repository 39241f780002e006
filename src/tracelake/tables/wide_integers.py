"""Integers that no type of Arrow holds, such as a uint256: how they are stored, and the one column that SQL sees.

In files such an integer is several columns, ``X_binary``, ``X_string``, ``X_f64`` and its digits in pieces
(``evm.digit_columns``); in a hot table it is one ``numeric`` of more than 38 digits, which is read as decimal
text. Whichever it is, a query sees one column ``X`` of the type BIGNUM beside the first three: a number without a
limit, so that it compares, sums and sorts as one. The digits are for sums alone (``query.engine.digit_sums``).

``WIDE_INTEGER`` is the type of that column in a schema: decimal text by its storage, a number by its meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa

from tracelake.evm.columns import UINT256_ARROW, UINT256_PARTS
from tracelake.evm.digit_columns import DIGIT_ARROW, DIGIT_PARTS

WIDE_INTEGER = pa.opaque(pa.string(), "bignum", "tracelake")
_BINARY, _STRING, _F64 = _SHOWN = UINT256_PARTS[:3]
_LARGE = {pa.large_binary(): pa.binary(), pa.large_string(): pa.string()}


def text_columns(stored: pa.Schema) -> Mapping[str, str]:
    """For each integer that is stored in several columns its name and the column with its exact text. A column that
    has the integer's name already stays what it is."""
    types = {field.name: _LARGE.get(field.type, field.type) for field in stored}
    # The engine ignores case in names.
    taken = {name.lower() for name in types}
    found = {}
    for name in types:
        base = name.removesuffix(_BINARY)
        parts = [types.get(base + part) for part in _SHOWN]
        if (
            base
            and base != name
            and base.lower() not in taken
            and parts == list(UINT256_ARROW[: len(_SHOWN)])
        ):
            found[base] = base + _STRING
    return found


def integers_with_digits(stored: pa.Schema) -> list[str]:
    """Those integers whose digits are stored too; files of earlier versions, and hot rows, have none."""
    types = {field.name: _LARGE.get(field.type, field.type) for field in stored}
    return [
        base
        for base in text_columns(stored)
        if [types.get(base + part) for part in DIGIT_PARTS] == list(DIGIT_ARROW)
    ]


def visible_columns(stored: pa.Schema) -> pa.Schema:
    """The columns that SQL sees: each integer stands before its columns, but for its digits."""
    computed = text_columns(stored)
    hidden = {base + part for base in integers_with_digits(stored) for part in DIGIT_PARTS}
    fields = []
    for field in stored:
        if field.name in hidden:
            continue
        base = field.name.removesuffix(_BINARY)
        if base != field.name and base in computed:
            fields.append(pa.field(base, WIDE_INTEGER))
        fields.append(field)
    return pa.schema(fields)


def as_wide_integers(columns: pa.Schema, names: Iterable[str]) -> pa.Schema:
    """The same columns; those of ``names`` that are text are integers."""
    wide = set(names)
    return pa.schema(
        [
            pa.field(field.name, WIDE_INTEGER) if field.name in wide and field.type == pa.string() else field
            for field in columns
        ]
    )


def storage_of(kind: pa.DataType) -> pa.DataType:
    """The type of the values as they are stored and sent."""
    return kind.storage_type if kind == WIDE_INTEGER else kind
