"""Whether rows come compressed, which slots never send: a few bytes could become any number of them.

Arrow unpacks them before anybody can look, so it is told from the head of each message, a FlatBuffer.
"""

from __future__ import annotations

import struct

import pyarrow as pa

_VERSION, _HEADER_KIND, _HEADER = 0, 1, 2
#: Before it, compression could be told in another place.
_VERSION_5 = 4
_DICTIONARY, _ROWS = 2, 3
_ROWS_OF_DICTIONARY, _COMPRESSION = 1, 3


def has_compressed(stream: pa.Buffer) -> bool:
    """In any message of an IPC stream, or might have. Raises ``struct.error`` or IndexError for what isn't one."""
    reader = pa.ipc.MessageReader.open_stream(stream)
    while (message := next(reader, None)) is not None:
        head = message.metadata.to_pybytes()
        root = _unsigned(head, 0)
        version = _field(head, root, _VERSION)
        if version is None or head[version] != _VERSION_5:
            return True
        kind = _field(head, root, _HEADER_KIND)
        body = _field(head, root, _HEADER)
        if kind is None or body is None or head[kind] not in (_DICTIONARY, _ROWS):
            continue
        rows: int | None = body + _unsigned(head, body)
        if head[kind] == _DICTIONARY:
            inner = _field(head, body + _unsigned(head, body), _ROWS_OF_DICTIONARY)
            rows = None if inner is None else inner + _unsigned(head, inner)
        if rows is not None and _field(head, rows, _COMPRESSION) is not None:
            return True
    return False


def _unsigned(head: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", head, at)[0])


def _field(head: bytes, table: int, number: int) -> int | None:
    """Where a table's field is; None when it has none."""
    vtable = table - int(struct.unpack_from("<i", head, table)[0])
    if vtable < 0 or 4 + 2 * number >= int(struct.unpack_from("<H", head, vtable)[0]):
        return None
    offset = int(struct.unpack_from("<H", head, vtable + 4 + 2 * number)[0])
    return table + offset if offset else None
