"""An endpoint's address, taken apart once: what the socket needs, what the request needs, what may be shown."""

from __future__ import annotations

import base64
import ipaddress
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

_PORTS = {"http": 80, "https": 443}


class AddressProblem(ValueError):
    """Says what is wrong without quoting the address, which may hold a key."""


@dataclass(frozen=True, slots=True)
class Address:
    tls: bool
    host: str
    port: int
    target: str = field(repr=False)
    authorization: str | None = field(repr=False)

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.tls else "http"] else f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(url: str) -> Address:
    if not url or not url.isascii() or any(letter <= " " or letter == "\x7f" for letter in url):
        raise AddressProblem("an address is plain ASCII without spaces")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise AddressProblem("not an address: its host or port can't be read") from None
    if parts.scheme not in _PORTS:
        raise AddressProblem("an address begins with http:// or https://")
    if not parts.hostname:
        raise AddressProblem("an address needs a host, as in https://host/path")
    if parts.fragment:
        raise AddressProblem("an address has no #fragment")
    if port == 0:
        raise AddressProblem("port 0 can't be called")
    login = None
    if parts.username is not None:
        text = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        login = f"Basic {base64.b64encode(text.encode()).decode()}"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Address(parts.scheme == "https", parts.hostname, port or _PORTS[parts.scheme], target, login)


def endpoint_name(url: str) -> str:
    """What an endpoint is called that wasn't given a name: its host, with the port where that tells more."""
    address = parse_address(url)
    host = address.host.replace(":", ".")
    return f"{host}:{address.port}" if address.is_loopback else host
