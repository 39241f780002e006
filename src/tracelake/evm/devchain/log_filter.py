"""The filter of ``eth_getLogs``: addresses and topics, where a list means any of its members and null anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracelake.evm.devchain.jsonrpc import INVALID_PARAMS, RpcError
from tracelake.evm.devchain.quantities import address_of, hash_of
from tracelake.evm.devchain.seal import LogEntry

_MOST_TOPICS = 4


@dataclass(frozen=True, slots=True)
class LogFilter:
    """An empty set of addresses matches any; so does None in place of a set of topics."""

    addresses: frozenset[str]
    topics: tuple[frozenset[str] | None, ...]

    def matches(self, log: LogEntry) -> bool:
        if self.addresses and log.address not in self.addresses:
            return False
        if len(self.topics) > len(log.topics):
            return False
        return all(
            wanted is None or topic in wanted for wanted, topic in zip(self.topics, log.topics, strict=False)
        )


def parse_filter(given: dict[str, Any]) -> LogFilter:
    addresses, topics = given.get("address"), given.get("topics")
    if topics is not None and (not isinstance(topics, list) or len(topics) > _MOST_TOPICS):
        raise RpcError(INVALID_PARAMS, "topics must be an array of at most four")
    return LogFilter(
        frozenset(map(address_of, _listed(addresses))),
        tuple(frozenset(map(hash_of, each)) if (each := _listed(topic)) else None for topic in topics or ()),
    )


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return given if isinstance(given, list) else [given]
