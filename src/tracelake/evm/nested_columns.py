"""Lists in JSON-RPC's objects to Arrow: hashes of blobs and uncles, access lists, authorizations.

Most of them are absent or empty, so they're flattened over a whole column first, and only what's left is
converted.
"""

from __future__ import annotations

from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from tracelake.evm.bad_value import BadValue
from tracelake.evm.columns import ACCESS_LIST, AUTHORIZATIONS, BYTES_LIST
from tracelake.evm.foreign_text import shown
from tracelake.evm.hex_columns import Values, fixed_bytes, integers, numbers, present, validity, wei, words


def hash_lists(values: Values) -> pa.Array:
    """Lists of 32 bytes each."""
    return _lists(values, BYTES_LIST, lambda hashes: fixed_bytes(hashes, 32))


def access_lists(values: Values) -> pa.Array:
    return _lists(values, ACCESS_LIST, _access_entries)


def authorization_lists(values: Values) -> pa.Array:
    return _lists(values, AUTHORIZATIONS, _authorizations)


def must_be_lists(values: Values) -> None:
    if not set(map(type, values)) <= {list}:
        index = next(index for index, value in enumerate(values) if type(value) is not list)
        raise BadValue(index, f"isn't a list: {shown(values[index])}")


def _lists(values: Values, kind: pa.DataType, convert: Any) -> pa.Array:
    there, mask = present(values)
    if not there:
        return pa.nulls(len(values), kind)
    must_be_lists(there)
    lengths = np.zeros(len(values), np.int64)
    lengths[slice(None) if mask is None else mask] = np.fromiter(map(len, there), np.int64, len(there))
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    flat = list(chain.from_iterable(there))
    try:
        elements = convert(flat)
        if elements.null_count:
            raise BadValue(flat.index(None), "has an empty entry")
    except BadValue as bad:
        owner = int(np.searchsorted(np.cumsum([len(value) for value in there]), bad.index, side="right"))
        raise BadValue(owner, f"has an entry that {bad.problem}") from None
    buffers = [validity(mask), pa.py_buffer(offsets)]
    return pa.Array.from_buffers(kind, len(values), buffers, children=[elements])


def _access_entries(entries: list[Any]) -> pa.Array:
    addresses, keys = _parts(entries, "address", "storageKeys")
    return _structs(ACCESS_LIST, fixed_bytes(addresses, 20), hash_lists(keys))


def _authorizations(entries: list[Any]) -> pa.Array:
    chains, addresses, nonces, r, s = _parts(entries, "chainId", "address", "nonce", "r", "s")
    parities = [entry.get("yParity", entry.get("v")) for entry in entries]
    return _structs(
        AUTHORIZATIONS,
        pa.array(list(map(str, numbers(chains))), pa.string()),
        fixed_bytes(addresses, 20),
        wei(nonces),
        integers(parities),
        words(r),
        words(s),
    )


def _parts(entries: list[Any], *names: str) -> list[list[Any]]:
    """The named members of each entry, one list for each name."""
    try:
        parts = [list(map(itemgetter(name), entries)) for name in names]
        if not any(None in part for part in parts):
            return parts
    except (KeyError, TypeError, IndexError):
        pass
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or any(entry.get(name) is None for name in names):
            raise BadValue(index, f"lacks one of {', '.join(names)}: {shown(entry)}")
    raise AssertionError("entries were found to be incomplete and then weren't")


def _structs(of_list: pa.DataType, *members: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays(list(members), fields=list(of_list.value_type))
