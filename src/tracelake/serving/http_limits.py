"""Limits on a listener's unauthenticated clients: how much they send, for how long, on how many connections.

Every listener has one ``ConnectionLimiter``. A connection is unauthenticated until a request on it has shown a
credential. When there is no room for another connection, the oldest unauthenticated one is evicted, so a client
that opens connections and sends nothing only takes room from itself: a caller with a credential is known after its
first request, and known connections stay. A task's credential, which any user's code may hold, doesn't count.
Connections are limited per peer and in total, so that one peer can't take the room of others.
"""

from __future__ import annotations

import ipaddress
import resource
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from tracelake.contracts.problem import PROBLEM_JSON, encode_problem, problem_of
from tracelake.domain.errors import BadRequest, HeadTooLarge, RequestTimeout, TracelakeError, Unavailable
from tracelake.serving.local_sockets import uid_of_loopback_peer
from tracelake.settings import numbers_set

KIB = 1024
_MOST_DESCRIPTORS = 65_536
_SHARE = 3
"""A listener's connections get one in three of the descriptors that the process may open."""
_SLICE = 16 * KIB
CUT_SECONDS = 1.0
"""Time to read the last answer of a connection before it is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """``head_seconds`` is the time for a whole head, counted from the connection or from its first byte. A body may
    pause for ``body_seconds`` and must arrive at ``body_rate`` bytes per second on average."""

    head_bytes: int = 32 * KIB
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    body_rate: int = KIB
    idle_seconds: float = 75.0
    connections: int = 2048
    peer_connections: int = 1024


_BOUNDS: Mapping[str, tuple[float, float]] = {
    "head_bytes": (KIB, 1024 * KIB),
    "head_seconds": (0.1, 3600),
    "body_seconds": (0.1, 3600),
    "idle_seconds": (0.1, 86_400),
    "connections": (1, _MOST_DESCRIPTORS),
    "peer_connections": (1, _MOST_DESCRIPTORS),
}


def tuned(limits: HttpLimits, environment: Mapping[str, str]) -> HttpLimits:
    """The limits with those that the environment sets: ``TRACELAKE_HTTP_HEAD_SECONDS`` and so on."""
    return replace(limits, **numbers_set(limits, _BOUNDS, environment, "TRACELAKE_HTTP"))


def within_descriptors(limits: HttpLimits) -> HttpLimits:
    """The limits, lowered to the number of files that this process may open, after raising that as far as possible:
    a listener without descriptors can't even refuse a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, _MOST_DESCRIPTORS) if hard != resource.RLIM_INFINITY else _MOST_DESCRIPTORS
    # Raising the soft limit up to the hard one needs no privilege.
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    most = _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else max(1, soft // _SHARE)
    connections = min(limits.connections, most)
    return replace(
        limits, connections=connections, peer_connections=min(limits.peer_connections, connections)
    )


class Peer(NamedTuple):
    """The other end of a connection, for counting. Each ``address`` has a limit of its own; ``user`` is set for
    users of this machine, since one user may have many loopback addresses."""

    address: str
    user: int | None = None

    @property
    def group(self) -> str:
        return self.address if self.user is None else f"uid {self.user}"


class LimitedConnection(Protocol):
    """A connection as the limiter sees it."""

    @property
    def peer(self) -> Peer: ...

    @property
    def known(self) -> bool:
        """Whether a request on it has shown a credential."""
        ...

    def evict(self) -> None: ...


class ConnectionLimiter:
    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self._connections: dict[LimitedConnection, None] = {}
        self._unauthenticated: dict[str, dict[LimitedConnection, None]] = {}
        self._of_peer: Counter[Peer] = Counter()

    def __len__(self) -> int:
        return len(self._connections)

    def enter(self, connection: LimitedConnection) -> bool:
        """Returns whether there is room; an unauthenticated connection may be evicted to make it."""
        # A peer at its own limit makes room among its own, also while there is room in all.
        if self._of_peer[connection.peer] >= self.limits.peer_connections:
            victim = self._oldest_of(connection.peer)
        elif len(self._connections) >= self.limits.connections:
            victim = self._oldest_of_largest_group()
        else:
            self._add(connection)
            return True
        if victim is None:
            return False
        # Counted out now: its connection_lost comes later, and the new one needs the room at once.
        self.leave(victim)
        victim.evict()
        self._add(connection)
        return True

    def leave(self, connection: LimitedConnection) -> None:
        """Has no effect for a connection that was never admitted."""
        if connection not in self._connections:
            return
        del self._connections[connection]
        self._of_peer[connection.peer] -= 1
        # Or the counter would keep an entry for every address that ever connected.
        if not self._of_peer[connection.peer]:
            del self._of_peer[connection.peer]
        self._forget_unauthenticated(connection)

    def _add(self, connection: LimitedConnection) -> None:
        self._connections[connection] = None
        self._of_peer[connection.peer] += 1
        self._unauthenticated.setdefault(connection.peer.group, {})[connection] = None

    def _forget_unauthenticated(self, connection: LimitedConnection) -> None:
        found = self._unauthenticated.get(connection.peer.group)
        if found is not None:
            found.pop(connection, None)
            if not found:
                del self._unauthenticated[connection.peer.group]

    def _oldest_of(self, peer: Peer) -> LimitedConnection | None:
        found = self._unauthenticated.get(peer.group, ())
        return next((each for each in found if each.peer == peer and not each.known), None)

    def _oldest_of_largest_group(self) -> LimitedConnection | None:
        """From the group with most unauthenticated connections. Connections that were authenticated since they were
        counted are found here, and no longer counted."""
        while self._unauthenticated:
            # A flood makes the largest group, so it loses its own connections and not those of quiet peers.
            most = max(self._unauthenticated.values(), key=len)
            first = next(iter(most))
            if not first.known:
                return first
            self._forget_unauthenticated(first)
        return None


class RequestMeter:
    """Counts the bytes of heads on one connection, driven by a parser's callbacks. Feed at most ``room`` bytes at a
    time and report them by ``fed``. A head that doesn't end within its limit is ``too_large``; so is the framing of
    a chunked body (lengths, extensions, trailers) that is out of proportion to the body."""

    __slots__ = ("_body", "_done_in_piece", "_framing", "_most", "head", "in_body")

    def __init__(self, head_bytes: int) -> None:
        self._most = head_bytes
        self._framing = 0
        self._body = 0
        self._done_in_piece = False
        self.head = 0
        self.in_body = False

    @property
    def half(self) -> bool:
        """A request has begun and isn't over."""
        return self.in_body or self.head > 0

    @property
    def room(self) -> int:
        return _SLICE if self.in_body else self._most - self.head

    @property
    def too_large(self) -> bool:
        # Chunks of one byte have a few bytes of framing each, which is legal; endless extensions aren't.
        return self.head >= self._most or self._framing > self._most + 16 * self._body

    def headers_complete(self) -> None:
        self.in_body = True
        self.head = self._framing = self._body = 0

    def body(self, size: int) -> None:
        self._body += size

    def message_complete(self) -> None:
        self.in_body = False
        self._done_in_piece = True
        self.head = self._framing = self._body = 0

    def fed(self, size: int, was_in_body: bool) -> None:
        """Call after each piece. A request that begins within a piece is counted from the next piece on."""
        if self.in_body:
            if was_in_body:
                self._framing += size
        # How much of the piece belongs to the next head is unknown, and less than a piece.
        elif not self._done_in_piece:
            self.head += size
        self._done_in_piece = False


def _closing(error: TracelakeError) -> bytes:
    found = problem_of(error)
    body = encode_problem(found)
    head = (
        f"HTTP/1.1 {found.status} {found.title}\r\ncontent-type: {PROBLEM_JSON}\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


# Complete answers to requests that aren't parsed, made once: a flood gets thousands of them.
NOT_HTTP = _closing(BadRequest("NotHttp", "this is no HTTP request"))
LATE = _closing(RequestTimeout("RequestTimeout", "the request didn't come in time"))
HEAD_TOO_LARGE = _closing(HeadTooLarge("HeadTooLarge", "the request's head is too large"))
NO_ROOM = _closing(Unavailable("TooManyConnections", "there are too many connections; try again later"))


def peer_of(address: object, here: object = None) -> Peer:
    """The peer that a connection from ``address`` counts for: an IPv4 address, or an IPv6 network of one
    subscriber. ``here`` is this end's address."""
    return Peer(_address_of(address), uid_of_loopback_peer(address, here))


def _address_of(address: object) -> str:
    if not isinstance(address, tuple) or not address:
        return "local"
    try:
        # A link-local address comes with its interface behind a percent sign.
        found = ipaddress.ip_address(str(address[0]).partition("%")[0])
    except ValueError:
        return str(address[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    # Or an IPv4 client would have two limits, one per form of its address.
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    # A subscriber has at least a /64, so 2^64 addresses to connect from.
    return str(ipaddress.ip_network((found, 64), strict=False))
