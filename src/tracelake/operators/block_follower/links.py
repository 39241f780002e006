"""Places of blocks in their chain, as endpoints and tables have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from tracelake.domain.errors import Unavailable
from tracelake.evm.raw_block import RawBlock
from tracelake.operators.block_follower.decide import BlockId, Link

COLUMNS = ("block_number", "block_hash", "parent_hash")


def link_of_block(raw: RawBlock) -> Link:
    return Link(raw.number, raw_bytes(raw.block, "hash"), raw_bytes(raw.block, "parentHash"))


def links_of_rows(rows: pa.Table) -> list[Link]:
    """Of a table with ``COLUMNS``, in the order of the blocks."""
    columns = [rows.column(name).to_pylist() for name in COLUMNS] if rows.num_rows else [[], [], []]
    return sorted((Link(*row) for row in zip(*columns, strict=True)), key=lambda link: link.number)


def hash_of(header: Mapping[str, Any] | None) -> bytes | None:
    return None if header is None else raw_bytes(header, "hash")


def block_id(number: int, hash_text: str) -> BlockId:
    return BlockId(number, bytes.fromhex(hash_text[2:]))


def raw_bytes(header: Mapping[str, Any], field: str) -> bytes:
    try:
        return bytes.fromhex(header[field][2:])
    except (KeyError, TypeError, ValueError):
        raise Unavailable(
            "BadHeader", f"an endpoint answered with a block without a usable {field}"
        ) from None
