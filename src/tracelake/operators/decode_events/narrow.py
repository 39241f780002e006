"""Only the logs that may be wanted are read: by their first topic and their contract, where the rows are.

What is read is looked at again by the decoder, so a list that is too long for a condition may be left out of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from tracelake.domain.event_abi.decode_config import DecodeConfig
from tracelake.domain.where import Predicate, all_of, in_list
from tracelake.evm.abi.decode_logs import topic0
from tracelake.operators.inputs import Input

_MOST_VALUES = 200


def narrowed(source: Input, config: DecodeConfig) -> Input:
    hashes = [topic0(event) for event in config.events]
    terms: list[Predicate] = []
    if None not in hashes:
        terms += _one_of("topic0", [each for each in hashes if each is not None])
    terms += _one_of("address", config.addresses)
    return source.narrowed(all_of(terms)) if terms else source


def _one_of(column: str, values: Iterable[bytes]) -> list[Predicate]:
    texts = {"\\x" + value.hex() for value in values}
    return [in_list(column, texts)] if 0 < len(texts) <= _MOST_VALUES else []
