"""Records on their way to a buffered dataset: as JSON has them, and as many at a time as one message takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from tracelake.domain.errors import Invalid

BATCH_BYTES = 8 * 1024 * 1024
"""Half of what a publish may carry: a record that is larger than the rest still goes, alone."""


def record_batches(records: Iterable[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Bytes become ``0x…``; dates, times, decimals and uuids become text."""
    batch: list[dict[str, Any]] = []
    size = 0
    for number, record in enumerate(records):
        plain = _plain(record, number)
        more = len(msgspec.json.encode(plain))
        if batch and size + more > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(plain)
        size += more
    if batch:
        yield batch


def _plain(record: Mapping[str, Any], number: int) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = msgspec.to_builtins(_hex(dict(record)))
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid("InvalidRecord", f"record {number} can't be sent as JSON: {error}") from None
    return plain


def _hex(value: Any) -> Any:
    match value:
        case bytes() | bytearray() | memoryview():
            return "0x" + bytes(value).hex()
        case dict():
            return {name: _hex(each) for name, each in value.items()}
        case list() | tuple():
            return [_hex(each) for each in value]
        case _:
            return value
