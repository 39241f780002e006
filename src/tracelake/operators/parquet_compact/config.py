"""What a compaction's configuration asks for, and whether a range is final enough for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tracelake.domain import compact_config
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Unavailable
from tracelake.operators.job_config import refuse_wrong


@dataclass(frozen=True, slots=True)
class CompactConfig:
    """``verified`` is what the source has checked the rows against; it is written into the files."""

    finality: str | int
    blocks_per_file: int | None
    verified: str | None


def read_config(config: Mapping[str, Any]) -> CompactConfig:
    refuse_wrong("parquet_compact", config, compact_config.KEYS, compact_config.problems(config))
    given = {**compact_config.DEFAULTS, **config}
    return CompactConfig(given["finality"], given.get("blocks_per_file"), given.get("verified"))


def check_final(
    span: BlockRange, finality: str | int, said: Sequence[int | None], highest: int | None
) -> None:
    """``said`` is what the source has called finalized, by output; ``highest`` its highest block.

    A source that says nothing about finality is taken at its word, as by ``range_aggregator``.
    """
    known = [number for number in said if number is not None]
    if finality == "finalized" and known and span.end > max(known):
        raise _not_final(span.end, f"the source says that {max(known)} is")
    if isinstance(finality, int) and (highest is None or span.end > highest - finality):
        raise _not_final(span.end, f"the highest block is {highest}, and finality {finality} blocks below it")


def _not_final(block: int, why: str) -> Unavailable:
    return Unavailable("NotFinal", f"block {block} isn't final yet: {why}")
