"""The way to a Spark Connect server: address in, authenticated channel out.

A token travels only where nobody else can read it: over TLS, or over the loopback interface to a numeric
address. Names are left to TLS, since ``localhost`` may lead to an address that another program listens on.
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import SplitResult, unquote, urlsplit

import grpc

from tracelake.contracts.operator_protocol import SparkTarget

_LARGEST = 128 * 1024 * 1024
_DEFAULT_PORT = 15002
_SUPERVISED = "supervised"
_OPTIONS = (
    ("grpc.max_send_message_length", _LARGEST),
    ("grpc.max_receive_message_length", _LARGEST),
    # Another channel of this process to the same address must not be shared: it may hold another token.
    ("grpc.use_local_subchannel_pool", 1),
)
# A proxy from the environment has no business between two processes of one machine.
_HERE = (("grpc.enable_http_proxy", 0),)
# A connection that died silently ends its calls instead of leaving them waiting for ever. On one machine no
# connection does, and a server that is merely slow to answer must not lose its work.
_ELSEWHERE = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


def open_channel(target: SparkTarget, *, with_token: bool = True) -> grpc.Channel:
    """Nothing is connected yet; the first call does that."""
    parts = urlsplit(target.url)
    token = target.token if with_token else ""
    options = _OPTIONS + (_HERE if is_loopback(target) else _ELSEWHERE)
    if is_loopback(target) and not _wants_tls(parts):
        credentials = grpc.local_channel_credentials(grpc.LocalConnectionType.LOCAL_TCP)
    elif token or _wants_tls(parts):
        credentials = grpc.ssl_channel_credentials()
    else:
        return grpc.insecure_channel(endpoint(target), options=options)
    if token:
        credentials = grpc.composite_channel_credentials(
            credentials, grpc.access_token_call_credentials(token)
        )
    return grpc.secure_channel(endpoint(target), credentials, options=options)


def endpoint(target: SparkTarget) -> str:
    parts = urlsplit(target.url)
    host = parts.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or _DEFAULT_PORT}"


def is_loopback(target: SparkTarget) -> bool:
    try:
        return ip_address(urlsplit(target.url).hostname or "").is_loopback
    except ValueError:
        return False


def metadata(target: SparkTarget) -> tuple[tuple[str, str], ...]:
    """What else the address carries goes with every call: hosted Sparks route by it."""
    ours = ("use_ssl", _SUPERVISED)
    return tuple(pair for pair in _parameters(urlsplit(target.url)) if pair[0] not in ours)


def supervised(host: str, port: int) -> str:
    """The address of a server that this worker watches over, and that ends with it."""
    return f"sc://{host}:{port}/;{_SUPERVISED}=true"


def is_supervised(target: SparkTarget) -> bool:
    return (_SUPERVISED, "true") in _parameters(urlsplit(target.url))


def _wants_tls(parts: SplitResult) -> bool:
    return ("use_ssl", "true") in [(name, value.lower()) for name, value in _parameters(parts)]


def _parameters(parts: SplitResult) -> list[tuple[str, str]]:
    pairs = (part.partition("=") for part in parts.path.lstrip("/").split(";") if part)
    return [(name, unquote(value)) for name, _, value in pairs]
