"""Where deliveries may connect to: public addresses over TLS, and hosts that the installation allows by name.

A DAG's author chooses the receiver, and this process stands inside of the installation's network. So a name is
resolved here, once per connection; each of its addresses is judged; and the connection is made to an address that
was judged, never to the name, which could lead elsewhere a moment later. What isn't plainly public is refused:
private, loopback, link-local (where clouds answer with credentials), multicast, reserved, and the same addresses
wrapped into IPv6.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from tracelake.domain.errors import Invalid

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]
MAX_URL_CHARS = 2048
MAX_ADDRESSES = 8
MAX_QUESTIONS = 32
UNKNOWN_SECONDS = 5.0
_DEFAULT_PORTS = {"https": 443, "http": 80, "smtps": 465, "smtp": 587}
_REMEDY = "TRACELAKE_DELIVERY_ALLOW of the delivery process names hosts that may be reached all the same"
_NOT_PUBLIC = f"the host's address is no public one; {_REMEDY}"
_VISIBLE = re.compile(r"[\x21-\x7e]+\Z")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\Z")
#: Such a last label makes resolvers read a name as an IPv4 address in one of its odd spellings.
_NUMERIC = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)\Z")
_BRACKETED = re.compile(r"\[[^][]*\](?::[0-9]*)?\Z")
_WRAPPED = tuple(
    ipaddress.IPv6Network(each)
    for each in (
        "::/96",  # IPv4-compatible
        "64:ff9b::/96",  # NAT64
        "64:ff9b:1::/48",  # NAT64, local use
        "2001::/32",  # Teredo
        "2002::/16",  # 6to4
        "fec0::/10",  # site-local
        "100::/64",  # discard
        "5f00::/16",  # segment routing
        "3fff::/20",  # documentation
    )
)
_METADATA = frozenset(
    ipaddress.ip_address(each)
    for each in ("169.254.169.254", "168.63.129.16", "192.0.0.192", "100.100.100.200", "fd00:ec2::254")
)


class Blocked(Exception):
    """The address isn't one that deliveries may connect to; the message says why and names no secret."""


@dataclass(frozen=True, slots=True)
class ReceiverEndpoint:
    """A receiver's server. ``host`` is as TLS verifies it; an IPv6 address has no brackets."""

    scheme: str
    host: str
    port: int

    @property
    def is_tls(self) -> bool:
        return self.scheme in ("https", "smtps")

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Allowance:
    """Hosts, with a port or without, that may be reached in plain text and at any address."""

    hosts: frozenset[tuple[str, int | None]] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Allowance:
        """``host``, ``host:port`` or ``[ipv6]:port``, separated by commas. Raises ``Invalid``."""
        found: set[tuple[str, int | None]] = set()
        for entry in filter(None, (part.strip() for part in text.split(","))):
            try:
                parts = urlsplit(f"//{entry}")
                if parts.path or parts.query or "@" in entry or not parts.hostname:
                    raise ValueError
                found.add((_host(parts.hostname), parts.port))
            except (ValueError, Blocked):
                raise Invalid(
                    "InvalidSetting", f"TRACELAKE_DELIVERY_ALLOW: {entry[:80]!r} is not host or host:port"
                ) from None
        return cls(frozenset(found))

    def covers(self, host: str, port: int) -> bool:
        return bool(self.hosts & {(host, port), (host, None)})


def read_url(url: str, schemes: Iterable[str], allowance: Allowance) -> tuple[ReceiverEndpoint, str]:
    """The server and the path of an address. ``Blocked`` without the address, which is a secret."""
    if len(url) > MAX_URL_CHARS or not _VISIBLE.match(url) or "\\" in url:
        raise Blocked("the address isn't a URL of visible ASCII characters")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise Blocked("the address isn't a URL") from None
    schemes = tuple(schemes)
    if parts.scheme not in schemes or not parts.hostname:
        raise Blocked(f"the address must begin with {' or '.join(f'{each}://' for each in schemes)}")
    if parts.scheme in ("https", "http") and "@" in parts.netloc:
        raise Blocked("the address holds a user or a password")
    server = parts.netloc.rpartition("@")[2]
    if port == 0 or ("[" in server and not _BRACKETED.match(server)):
        raise Blocked("the address has no port that can be reached, or more than its host and port")
    host = _host(parts.hostname)
    endpoint = ReceiverEndpoint(parts.scheme, host, port or _DEFAULT_PORTS[parts.scheme])
    if parts.scheme == "http" and not allowance.covers(endpoint.host, endpoint.port):
        raise Blocked(f"the address is http, which the installation doesn't allow for this host; {_REMEDY}")
    path = parts.path or "/"
    return endpoint, f"{path}?{parts.query}" if parts.query else path


def _host(text: str) -> str:
    """A host name in its one spelling; ``Blocked`` for any that software reads in different ways."""
    text = text.lower()
    if ":" in text:
        if "%" in text:
            raise Blocked("the host is an address with a zone")
        try:
            return str(ipaddress.IPv6Address(text))
        except ValueError:
            raise Blocked("the host isn't a name or an address") from None
    labels = text.removesuffix(".").split(".")
    if _NUMERIC.match(labels[-1]):
        try:
            return str(ipaddress.IPv4Address(text))
        except ValueError:
            raise Blocked("the host is an odd spelling of an address") from None
    if len(text) > 253 or not all(_LABEL.match(label) for label in labels):
        raise Blocked("the host isn't a name or an address")
    return ".".join(labels)


def judge(address: str) -> IpAddress:
    """The address, if it is public; ``Blocked`` otherwise."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            # Connecting to it is connecting to the inner one.
            judge(str(found.ipv4_mapped))
            return found
        if any(found in network for network in _WRAPPED):
            raise Blocked(_NOT_PUBLIC)
    if (
        not found.is_global
        or found.is_multicast
        or found.is_reserved
        or found.is_loopback
        or found.is_link_local
        or found.is_unspecified
        or found.is_private
        or found in _METADATA
        or "%" in address
    ):
        raise Blocked(_NOT_PUBLIC)
    return found


class ReceiverAddresses:
    """Resolves and judges. Tests bring answers of their own."""

    def __init__(self, allowance: Allowance, resolve: Resolve | None = None) -> None:
        self.allowance = allowance
        self._resolve = resolve or SystemNames()
        self._preferred: dict[ReceiverEndpoint, str] = {}

    def prefer(self, endpoint: ReceiverEndpoint, address: str) -> None:
        """Others of the host weren't reached: this is the first one next time, if the host still has it."""
        self._preferred[endpoint] = address

    async def of(self, endpoint: ReceiverEndpoint) -> list[str]:
        """Where to connect. ``Blocked`` if any of the host's is refused: one that is mixed with public
        ones is the mark of a trick. ``OSError`` when the name can't be resolved."""
        found = await self._resolve(endpoint.host, endpoint.port)
        if not found:
            raise OSError("the host has no address")
        addresses = list(dict.fromkeys(found))[:MAX_ADDRESSES]
        if not self.allowance.covers(endpoint.host, endpoint.port):
            for address in found:
                judge(address)
        preferred = self._preferred.get(endpoint)
        return sorted(addresses, key=lambda address: address != preferred)


class SystemNames:
    """The system's resolver, which blocks a thread for as long as a name server lets it wait.

    A name takes one thread, however many tries wait for it, and one that couldn't be resolved isn't asked for again
    for a few seconds: so a receiver whose name server hangs keeps no other receiver from being found.
    """

    def __init__(self) -> None:
        # Not the loop's own threads, which are few and serve others too.
        self._threads = ThreadPoolExecutor(MAX_QUESTIONS, thread_name_prefix="resolve")
        self._asked: dict[tuple[str, int], asyncio.Future[list[str]]] = {}
        self._unknown: dict[tuple[str, int], float] = {}

    async def __call__(self, host: str, port: int) -> list[str]:
        try:
            # An address needs no question.
            return [str(ipaddress.ip_address(host))]
        except ValueError:
            pass
        name = (host, port)
        if self._unknown.get(name, 0.0) > time.monotonic():
            raise OSError("the host's name can't be resolved")
        question = self._asked.get(name)
        if question is None:
            question = asyncio.get_running_loop().run_in_executor(self._threads, _look_up, host, port)
            self._asked[name] = question
            question.add_done_callback(lambda answered: self._answered(name, answered))
        # A try that is given up mustn't take the answer from the others.
        return await asyncio.shield(question)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _answered(self, name: tuple[str, int], question: asyncio.Future[list[str]]) -> None:
        del self._asked[name]
        now = time.monotonic()
        self._unknown = {each: until for each, until in self._unknown.items() if until > now}
        if not question.cancelled() and question.exception() is not None:
            self._unknown[name] = now + UNKNOWN_SECONDS


def _look_up(host: str, port: int) -> list[str]:
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise OSError("the host's name can't be resolved") from None
    return [str(answer[4][0]) for answer in answers]
