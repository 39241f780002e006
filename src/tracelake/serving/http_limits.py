"""What a listener takes from those whom it doesn't know yet: how much, for how long, and how many of them.

Every listener of ours has one ``Door``. A connection is a stranger until a request on it has shown a credential.
When there is no room for one more, the stranger who came first goes, so whoever opens connections and says nothing
only takes room from themselves: a caller with a credential needs no longer than its first request to be known, and
those who are known stay. A task's credential, which anybody's code may hold, makes nobody known. Room is counted by
peer and in all, so that one peer can't take it from the others.
"""

from __future__ import annotations

import ipaddress
import resource
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from tracelake.environment_settings import numbers_set
from tracelake.local_peer import uid_of

KIB = 1024
_MOST_DESCRIPTORS = 65_536
_SHARE = 3
"""Of the descriptors that a process may have, one part in so many is for one listener's connections."""
_SLICE = 16 * KIB
CUT_SECONDS = 1.0
"""How long the last answer of a connection may be read, before it is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """``head_seconds`` is for a whole head, from the connection on or from its first byte; a body must go on after
    ``body_seconds`` at the latest, and on average at ``body_rate`` bytes per second."""

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
    """The limits as far as this process may have open files, of which it takes as many as it can get: a listener
    that runs out of them can't even refuse."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, _MOST_DESCRIPTORS) if hard != resource.RLIM_INFINITY else _MOST_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    most = _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else max(1, soft // _SHARE)
    connections = min(limits.connections, most)
    return replace(
        limits, connections=connections, peer_connections=min(limits.peer_connections, connections)
    )


class Peer(NamedTuple):
    """Whom a connection is counted to: ``address`` has a limit of its own, ``user`` is who is behind it, if that is
    a user of this machine: one user may have many addresses of loopback."""

    address: str
    user: int | None = None

    @property
    def group(self) -> str:
        return self.address if self.user is None else f"uid {self.user}"


class Visitor(Protocol):
    """A connection, as a door sees it."""

    @property
    def peer(self) -> Peer: ...

    @property
    def known(self) -> bool:
        """Whether a credential was shown on it."""
        ...

    def turn_out(self) -> None: ...


class Door:
    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self._inside: dict[Visitor, None] = {}
        self._strangers: dict[str, dict[Visitor, None]] = {}
        self._of_peer: Counter[Peer] = Counter()

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self, visitor: Visitor) -> bool:
        """Whether there is room, which a stranger may have had to make."""
        if self._of_peer[visitor.peer] >= self.limits.peer_connections:
            victim = self._first_stranger(visitor.peer)
        elif len(self._inside) >= self.limits.connections:
            victim = self._first_of_the_most()
        else:
            self._add(visitor)
            return True
        if victim is None:
            return False
        self.leave(victim)
        victim.turn_out()
        self._add(visitor)
        return True

    def leave(self, visitor: Visitor) -> None:
        """Also for one that never got in."""
        if visitor not in self._inside:
            return
        del self._inside[visitor]
        self._of_peer[visitor.peer] -= 1
        if not self._of_peer[visitor.peer]:
            del self._of_peer[visitor.peer]
        self._forget_stranger(visitor)

    def _add(self, visitor: Visitor) -> None:
        self._inside[visitor] = None
        self._of_peer[visitor.peer] += 1
        self._strangers.setdefault(visitor.peer.group, {})[visitor] = None

    def _forget_stranger(self, visitor: Visitor) -> None:
        strangers = self._strangers.get(visitor.peer.group)
        if strangers is not None:
            strangers.pop(visitor, None)
            if not strangers:
                del self._strangers[visitor.peer.group]

    def _first_stranger(self, peer: Peer) -> Visitor | None:
        strangers = self._strangers.get(peer.group, ())
        return next((each for each in strangers if each.peer == peer and not each.known), None)

    def _first_of_the_most(self) -> Visitor | None:
        """Of the group that has most strangers. Those who became known since they came are found here, once."""
        while self._strangers:
            most = max(self._strangers.values(), key=len)
            first = next(iter(most))
            if not first.known:
                return first
            self._forget_stranger(first)
        return None


class RequestMeter:
    """How much of one connection's requests was head, for a parser that calls back. Feed at most ``room`` bytes at
    a time and tell how many; a head that doesn't end within its limit is ``too_large``, as is the framing of a body
    in chunks (their lengths, extensions and trailers) that is more than the body is worth."""

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
        """After a piece. What began behind another request within the same piece is counted from the next on."""
        if self.in_body:
            if was_in_body:
                self._framing += size
        elif not self._done_in_piece:
            self.head += size
        self._done_in_piece = False


_REFUSALS = {
    400: (b"Bad Request", b"NotHttp", b"this is no HTTP request"),
    408: (b"Request Timeout", b"RequestTimeout", b"the request didn't come in time"),
    431: (b"Request Header Fields Too Large", b"HeadTooLarge", b"the request's head is too large"),
    503: (b"Service Unavailable", b"TooManyConnections", b"there are too many connections; try again later"),
}


def refusal(status: int) -> bytes:
    """A whole answer to a request that isn't looked at."""
    phrase, reason, detail = _REFUSALS[status]
    body = b'{"type":"urn:tracelake:problem:%b","title":"%b","status":%d,"detail":"%b","reason":"%b"}' % (
        reason, phrase, status, detail, reason,
    )  # fmt: skip
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/problem+json\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n" % (status, phrase, len(body))
    ) + body


def peer_of(address: object, here: object = None) -> Peer:
    """Whom a connection from ``address`` is counted to: an IPv4 address, an IPv6 network of one subscriber.
    ``here`` is this end's address."""
    return Peer(_address_of(address), uid_of(address, here))


def _address_of(address: object) -> str:
    if not isinstance(address, tuple) or not address:
        return "local"
    try:
        found = ipaddress.ip_address(str(address[0]).partition("%")[0])
    except ValueError:
        return str(address[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))
