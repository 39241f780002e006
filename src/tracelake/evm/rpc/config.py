"""``rpc.toml``: the named pools of JSON-RPC endpoints of a worker.

    [pools.main]
    chain_id = 143                     # optional; every endpoint is checked against it
    chain = "base"                     # optional; the chain profile, from the chain's id otherwise
    deadline_seconds = 60              # optional; one question with all its retries
    quorum = 2                         # optional; endpoints that must agree on a block, 1 otherwise

    [[pools.main.endpoints]]
    name = "alpha"                     # optional; from the host otherwise
    url = "https://…/KEY"              # or url_env = "ALPHA_URL"
    headers = { Authorization = "…" }  # all optional
    requests_per_second = 50           # calls, those in a batch counted one by one
    max_batch = 100
    max_concurrency = 8
    timeout_seconds = 20

A DAG only names a pool. Errors name the field and never quote its value, which may be a key.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Meta, Struct

from tracelake.contracts.rpc_pool import (
    DEADLINE_SECONDS,
    MAX_BATCH,
    MAX_CONCURRENCY,
    TIMEOUT_SECONDS,
    EndpointConfig,
    PoolConfig,
)
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.profiles.registry import PROFILES

__all__ = [
    "Address",
    "AddressProblem",
    "EndpointConfig",
    "PoolConfig",
    "endpoint_name",
    "load_pools",
    "parse_address",
    "parse_pools",
    "pool_of",
]

_RESERVED = ("host", "content-length", "content-type", "transfer-encoding", "connection", "accept-encoding")
_PORTS = {"http": 80, "https": 443}

_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:\-]{0,63}\Z")]
_HeaderName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~\-]+\Z")]

_HeaderValue = Annotated[str, Meta(pattern=r"^[\t\x20-\x7e\x80-\xff]*\Z")]

_Seconds = Annotated[float, Meta(gt=0, le=3600)]


class _Endpoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: _Name | None = None
    url: str | None = None
    url_env: Annotated[str, Meta(min_length=1)] | None = None
    headers: dict[_HeaderName, _HeaderValue] = {}
    requests_per_second: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None
    max_batch: Annotated[int, Meta(ge=1, le=10_000)] = MAX_BATCH
    max_concurrency: Annotated[int, Meta(ge=1, le=256)] = MAX_CONCURRENCY
    timeout_seconds: _Seconds = TIMEOUT_SECONDS


class _Pool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    endpoints: list[_Endpoint] = []
    chain_id: Annotated[int, Meta(ge=1, le=2**62)] | None = None
    chain: str | None = None
    deadline_seconds: _Seconds = DEADLINE_SECONDS
    quorum: Annotated[int, Meta(ge=1, le=100)] = 1


def load_pools(path: Path | str, environment: Mapping[str, str] | None = None) -> dict[str, PoolConfig]:
    """Read every pool of a file. ``url_env`` is looked up in ``environment``, by default the process's own."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Unavailable("RpcPoolsUnreadable", f"can't read {path}: {error.strerror}") from None
    return parse_pools(content, str(path), os.environ if environment is None else environment)


def parse_pools(content: bytes, where: str, environment: Mapping[str, str]) -> dict[str, PoolConfig]:
    try:
        tree = tomllib.loads(content.decode())
    except UnicodeDecodeError:
        raise Invalid("RpcPoolsInvalid", f"{where} isn't UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise Invalid("RpcPoolsInvalid", f"{where} isn't TOML: {error}") from None
    for key in tree:
        if key != "pools":
            _refuse(where, key, "unknown; pools are written as [pools.NAME]")
    pools = tree.get("pools", {})
    if not isinstance(pools, dict) or not all(isinstance(each, dict) for each in pools.values()):
        _refuse(where, "pools", "pools are written as [pools.NAME]")
    return {name: _pool(name, fields, where, environment) for name, fields in pools.items()}


def pool_of(
    *urls: str, name: str = "pool", chain_id: int | None = None, chain: str | None = None, **options: Any
) -> PoolConfig:
    """A pool without a file, for notebooks and tests. ``options`` apply to every endpoint, ``deadline_seconds`` and
    ``quorum`` to the pool."""
    fields: dict[str, Any] = {"endpoints": [{"url": url, **options} for url in urls]}
    if chain_id is not None:
        fields["chain_id"] = chain_id
    if chain is not None:
        fields["chain"] = chain
    for endpoint in fields["endpoints"]:
        for option in ("deadline_seconds", "quorum"):
            if option in endpoint:
                fields[option] = endpoint.pop(option)
    return _pool(name, fields, "the pool", {})


def _pool(name: str, fields: dict[str, Any], where: str, environment: Mapping[str, str]) -> PoolConfig:
    field = f"pools.{name}"
    try:
        msgspec.convert(name, _Name)
    except msgspec.ValidationError:
        _refuse(where, field, "a pool's name is letters, digits, _ . : and -, at most 64 of them")
    try:
        pool = msgspec.convert(fields, _Pool)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        _refuse(where, f"{field}{place.rstrip('`').replace('[...]', '')}", problem)
    if not pool.endpoints:
        _refuse(where, f"{field}.endpoints", "a pool needs at least one endpoint, [[pools.NAME.endpoints]]")
    if pool.quorum > len(pool.endpoints):
        _refuse(
            where,
            f"{field}.quorum",
            f"{pool.quorum} endpoints can't agree in a pool of {len(pool.endpoints)}",
        )
    if pool.chain is not None and pool.chain not in PROFILES:
        _refuse(where, f"{field}.chain", f"no such chain profile; there are {', '.join(PROFILES)}")
    endpoints = list(_endpoints(pool.endpoints, f"{field}.endpoints", where, environment))
    return PoolConfig(
        name=name,
        chain_id=pool.chain_id,
        chain=pool.chain,
        deadline_seconds=pool.deadline_seconds,
        quorum=pool.quorum,
        endpoints=tuple(endpoints),
    )


def _endpoints(
    given: list[_Endpoint], field: str, where: str, environment: Mapping[str, str]
) -> Iterable[EndpointConfig]:
    names = {each.name for each in given if each.name is not None}
    seen: dict[str, int] = {}
    urls: dict[tuple[str, str], int] = {}
    for index, endpoint in enumerate(given):
        place = f"{field}[{index}]"
        url = _url(endpoint, place, where, environment)
        for header in endpoint.headers:
            # The client sets these itself; a second one would make the request ambiguous.
            if header.lower() in _RESERVED:
                _refuse(where, f"{place}.headers", f"{header} is set by the client itself")
        # Headers count too: two keys of one provider are two endpoints.
        same = (url, msgspec.json.encode(endpoint.headers, order="sorted").decode())
        if same in urls:
            _refuse(where, f"{place}.url", f"the same as that of endpoint {urls[same]}: each one once")
        urls[same] = index
        name = endpoint.name
        if name is None:
            # Names that people gave come first, also those of endpoints further down.
            name = _unused(endpoint_name(url), {*names, *seen})
        elif name in seen:
            _refuse(where, f"{place}.name", f"{name!r} is the name of endpoint {seen[name]} already")
        seen[name] = index
        yield EndpointConfig(
            name=name,
            url=url,
            headers=endpoint.headers,
            requests_per_second=endpoint.requests_per_second,
            max_batch=endpoint.max_batch,
            max_concurrency=endpoint.max_concurrency,
            timeout_seconds=endpoint.timeout_seconds,
        )


def _url(endpoint: _Endpoint, place: str, where: str, environment: Mapping[str, str]) -> str:
    if (endpoint.url is None) == (endpoint.url_env is None):
        _refuse(where, f"{place}.url", "give url, or url_env with the name of a variable")
    field, url = f"{place}.url", endpoint.url
    if url is None:
        field, url = f"{place}.url_env", environment.get(endpoint.url_env or "")
        if not url:
            _refuse(where, field, f"the variable {endpoint.url_env} isn't set")
    try:
        parse_address(url)
    except AddressProblem as problem:
        _refuse(where, field, str(problem))
    return url


def _unused(name: str, taken: set[str]) -> str:
    if name not in taken:
        return name
    return next(f"{name}-{number}" for number in range(2, len(taken) + 3) if f"{name}-{number}" not in taken)


def _refuse(where: str, field: str, why: str) -> NoReturn:
    raise Invalid("RpcPoolsInvalid", f"{where}: {field}: {why}")


class AddressProblem(ValueError):
    """An invalid address. The text never quotes the address, which may hold a key."""


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL. Its ``repr`` leaves out the parts that may hold a key."""

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
    # Control characters in the request line would end it early.
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
    """The default name of an endpoint: its host, with the port on loopback, where the host is always the same."""
    address = parse_address(url)
    host = address.host.replace(":", ".")
    return f"{host}:{address.port}" if address.is_loopback else host
