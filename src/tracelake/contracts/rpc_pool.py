"""A pool of JSON-RPC endpoints of one chain, as the wrapper sends it to an operator and Spark to its executors.

An address may contain a key, and a header usually is one: ``repr`` hides them, and ``secrets`` lists the texts that
must not be printed. Logs and errors call an endpoint by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

MAX_BATCH = 100
MAX_CONCURRENCY = 8
TIMEOUT_SECONDS = 20.0
DEADLINE_SECONDS = 60.0

_SHORTEST_KEY = 8


class EndpointConfig(Struct, frozen=True, kw_only=True):
    """``requests_per_second`` counts calls, those in a batch one by one, as providers do; None is no limit."""

    name: str
    url: str
    headers: dict[str, str] = {}
    requests_per_second: float | None = None
    max_batch: int = MAX_BATCH
    max_concurrency: int = MAX_CONCURRENCY
    timeout_seconds: float = TIMEOUT_SECONDS

    def secrets(self) -> Iterator[str]:
        """The texts that must not be printed, with every part that could be quoted on its own."""
        parts = urlsplit(self.url)
        # An address without any of these has no room for a key.
        if parts.path.strip("/") or parts.query or parts.password:
            yield self.url
        if parts.password:
            # Libraries may quote it decoded in their errors.
            yield unquote(parts.password)
        if len(parts.path) > _SHORTEST_KEY:
            yield parts.path
        yield from (segment for segment in parts.path.split("/") if _like_a_key(segment))
        if parts.query:
            yield parts.query
            yield from (value for _, value in parse_qsl(parts.query))
        for value in self.headers.values():
            yield value
            # Of ``Bearer KEY``, the key alone may be quoted.
            yield value.rpartition(" ")[2]

    def __repr__(self) -> str:
        return f"EndpointConfig({self.name!r}, …)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("name", self.name)]


class PoolConfig(Struct, frozen=True, kw_only=True):
    """``chain_id`` is checked if it is given. ``chain`` names the chain profile; without it the chain's id decides.
    ``deadline_seconds`` limits one request to the pool, with all its retries on all endpoints. ``quorum`` is the
    number of endpoints that must agree on a block before it is believed."""

    name: str
    endpoints: tuple[EndpointConfig, ...]
    chain_id: int | None = None
    chain: str | None = None
    deadline_seconds: float = DEADLINE_SECONDS
    quorum: int = 1

    def secrets(self) -> list[str]:
        return [secret for endpoint in self.endpoints for secret in endpoint.secrets()]


def _like_a_key(segment: str) -> bool:
    """Whether a path segment may be a key. Words such as ``ethereum`` aren't: masking them would hide nothing."""
    plain = segment.isalpha() and segment.islower()
    return len(segment) >= _SHORTEST_KEY and not plain
