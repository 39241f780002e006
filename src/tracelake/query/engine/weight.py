"""How much a piece of a result is to those who handle it, whatever it takes in Arrow.

Bytes alone say too little: a column of nulls has none, twenty million of them in a list have five, and truth values
are bits. In a message, in JSON and in memory each of them is a value. So values are counted, null ones and those
within others included, and names of a struct's fields with every struct, since JSON repeats them.

The shape of a result is bounded too: a column costs something even when it is empty.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as is_

VALUE_BYTES = 8
_SMALL = 16 * 1024
MOST_COLUMNS = 2_000
#: Columns, and fields within them.
MOST_FIELDS = 10_000
#: Arrow's own limit for what is sent is 64.
MOST_LEVELS = 50


def weight(batch: pa.RecordBatch) -> int:
    """In bytes, never less than it has in Arrow. What a slice has is looked at only where it matters: that takes as
    long as a small query's rows take to be sent."""
    stored: int = batch.get_total_buffer_size()
    if stored > _SMALL:
        stored = batch.nbytes
    return max(stored, VALUE_BYTES * sum(cells(batch.column(at)) for at in range(batch.num_columns)))


def cells(array: pa.Array) -> int:
    """Values in it, those within its values included."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return cells(array.storage)
    if is_.is_dictionary(kind):
        return len(array) * _longest(array.dictionary)
    if kind.num_fields == 0:
        return len(array)
    if is_.is_list(kind) or is_.is_large_list(kind) or is_.is_map(kind):
        return len(array) + _items(array)
    if is_.is_fixed_size_list(kind):
        size = kind.list_size
        return len(array) + cells(array.values.slice(array.offset * size, len(array) * size))
    children = sum(cells(array.field(at)) for at in range(kind.num_fields))
    return len(array) * (1 + _names(kind)) + children


def _items(array: pa.ListArray | pa.LargeListArray | pa.MapArray) -> int:
    if len(array) == 0:
        return 0
    first, last = array.offsets[0].as_py(), array.offsets[len(array)].as_py()
    if not is_.is_map(array.type):
        return cells(array.values.slice(first, last - first))
    return sum(cells(each.slice(first, last - first)) for each in (array.keys, array.items))


def _names(kind: pa.DataType) -> int:
    return sum(len(kind.field(at).name) for at in range(kind.num_fields)) // VALUE_BYTES


def _longest(dictionary: pa.Array) -> int:
    """What a value may be that stands for one of these."""
    if len(dictionary) == 0:
        return 1
    if not (is_.is_string(dictionary.type) or is_.is_large_string(dictionary.type)):
        return cells(dictionary)
    return 1 + (pc.max(pc.binary_length(dictionary)).as_py() or 0) // VALUE_BYTES


def shape_problem(schema: pa.Schema) -> str | None:
    """Why a result of these columns is refused."""
    if len(schema) > MOST_COLUMNS:
        return f"the result has {len(schema)} columns; {MOST_COLUMNS} at most"
    pending = [(kind, 1) for kind in schema.types]
    seen = 0
    while pending:
        kind, level = pending.pop()
        seen += 1
        if level > MOST_LEVELS:
            return f"the result's values are nested more than {MOST_LEVELS} levels deep"
        if seen > MOST_FIELDS:
            return f"the result has more than {MOST_FIELDS} columns and fields"
        pending += [(kind.field(at).type, level + 1) for at in range(kind.num_fields)]
    return None


def stands_alone(schema: pa.Schema) -> bool:
    """Whether each value has its own bytes: with views and runs a few bytes can stand for any number of values."""
    pending = list(schema.types)
    while pending:
        kind = pending.pop()
        if isinstance(kind, pa.BaseExtensionType):
            pending.append(kind.storage_type)
        elif is_.is_dictionary(kind):
            pending.append(kind.value_type)
        elif _shares(kind):
            return False
        else:
            pending += [kind.field(at).type for at in range(kind.num_fields)]
    return True


def _shares(kind: pa.DataType) -> bool:
    return bool(
        is_.is_string_view(kind)
        or is_.is_binary_view(kind)
        or is_.is_list_view(kind)
        or is_.is_large_list_view(kind)
        or is_.is_run_end_encoded(kind)
    )
