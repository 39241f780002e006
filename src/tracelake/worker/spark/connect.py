"""Spark Connect without Spark's client: channels, names of an attempt's work, the wrapper's calls, and a health
probe.

A token is sent only where no other user can read it: over TLS, or over the loopback interface to a numeric
address. Host names need TLS, since ``localhost`` may lead to an address that another program listens on.

The names of an attempt's session, jobs and user follow from the attempt alone, so that the wrapper can stop the
Spark work of an operator process that is gone. The epoch is part of them: after a restore from backup an
attempt's number may occur again, and must not meet the session of the first one.

Importing pyspark's own stubs costs the wrapper 118 MB and most of a second, grpc alone 21 MB and a tenth of that;
so the few request messages are encoded here. Field numbers are those of Spark's ``spark/connect/base.proto``,
which promises not to change them; answers aren't decoded. Calls run in grpc's threads and are awaited in the
caller's event loop.

``interrupt_attempt`` ends an attempt's Spark work from outside its process. Spark finds work by user, session and
tag, whichever process asks. The work is interrupted first, which takes effect within milliseconds; then the
session is released, and from then on its id is refused, also to a process that goes on regardless and to its last
requests. Spark only remembers sessions that existed, so a missing one is made first.
"""

from __future__ import annotations

import asyncio
import contextlib
from ipaddress import ip_address
from urllib.parse import SplitResult, unquote, urlsplit
from uuid import UUID, uuid4, uuid5

import grpc

from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.domain.errors import TracelakeError, Unauthenticated, Unavailable

_LARGEST = 128 * 1024 * 1024
_DEFAULT_PORT = 15002
_SUPERVISED = "supervised"
_OPTIONS = (
    ("grpc.max_send_message_length", _LARGEST),
    ("grpc.max_receive_message_length", _LARGEST),
    # Another channel of this process to the same address must not be shared: it may carry another token.
    ("grpc.use_local_subchannel_pool", 1),
)
# A proxy from the environment must not come between two processes of one machine.
_HERE = (("grpc.enable_http_proxy", 0),)
# A connection that died silently ends its calls instead of leaving them waiting for ever. On one machine no
# connection does, and a server that is merely slow must not lose its work.
_ELSEWHERE = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
SPARK_USER = "tracelake"
_SESSIONS = UUID("5c1f6a52-94a9-5d4f-8a3c-3f6de0f0a7b1")
_SERVICE = "/spark.connect.SparkConnectService/"
_CLIENT = "tracelake-worker"
_INTERRUPT_TAG = 2
_INTERRUPT_SECONDS = 10.0
PROBE_SECONDS = 2.0
_QUERY_EVERY_PROBES = 15


def open_channel(target: SparkTarget, *, with_token: bool = True) -> grpc.Channel:
    """Nothing is connected yet; the first call does that."""
    parts = urlsplit(target.url)
    token = target.token if with_token else ""
    options = _OPTIONS + (_HERE if is_loopback(target) else _ELSEWHERE)
    if is_loopback(target) and not _wants_tls(parts):
        # gRPC sends a token only with channel credentials; these are for the loopback interface.
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
    """The address's other parameters, sent with every call: hosted Sparks route by them."""
    ours = ("use_ssl", _SUPERVISED)
    return tuple(pair for pair in _parameters(urlsplit(target.url)) if pair[0] not in ours)


def supervised(host: str, port: int) -> str:
    """The address of a server that this worker supervises, and that ends with it."""
    return f"sc://{host}:{port}/;{_SUPERVISED}=true"


def is_supervised(target: SparkTarget) -> bool:
    return (_SUPERVISED, "true") in _parameters(urlsplit(target.url))


def _wants_tls(parts: SplitResult) -> bool:
    return ("use_ssl", "true") in [(name, value.lower()) for name, value in _parameters(parts)]


def _parameters(parts: SplitResult) -> list[tuple[str, str]]:
    pairs = (part.partition("=") for part in parts.path.lstrip("/").split(";") if part)
    return [(name, unquote(value)) for name, _, value in pairs]


def session_id(task_id: str, attempt: int, epoch: int) -> str:
    return str(uuid5(_SESSIONS, f"{task_id}/{attempt}/{epoch}"))


def parent_session_id(token: str, age: int) -> str:
    """The session that attempts' sessions are copies of. It differs for each run of a server, as its token does,
    and for each ``age``: a session that was idle for too long is gone, and its id refused from then on."""
    return str(uuid5(_SESSIONS, f"parent/{token}/{age}"))


def tag(task_id: str, attempt: int) -> str:
    return f"tracelake-{task_id}-{attempt}"


class SparkRpc:
    """One channel to one server."""

    def __init__(self, target: SparkTarget, *, with_token: bool = True) -> None:
        self._channel = open_channel(target, with_token=with_token)
        self._metadata = metadata(target)
        # A session of its own: a server that has forgotten it makes it anew, so a check never depends on an
        # earlier one.
        self._session = str(uuid4())

    async def version(self, timeout: float, session_id: str | None = None) -> None:
        """Ask for the server's version: the cheapest question that reaches the session, and makes it."""
        spark_version = _message(10, b"")
        head = self._head(session_id or self._session)
        await self._unary("AnalyzePlan", head + _text(3, _CLIENT) + spark_version, timeout)

    async def select_one(self, timeout: float) -> None:
        """Run a query: planner, scheduler and result path, not just the port."""
        relation = _message(10, _text(1, "SELECT 1"))
        request = self._head(self._session) + _message(3, _message(1, relation)) + _text(4, _CLIENT)
        await asyncio.to_thread(self._drain, "ExecutePlan", request, timeout)

    async def interrupt(self, session_id: str, tag: str, timeout: float) -> None:
        request = self._head(session_id) + _text(3, _CLIENT) + _number(4, _INTERRUPT_TAG) + _text(5, tag)
        await self._unary("Interrupt", request, timeout)

    async def release(self, session_id: str, timeout: float) -> None:
        """End a session and everything that runs in it; its id is refused from then on."""
        await self._unary("ReleaseSession", self._head(session_id) + _text(3, _CLIENT), timeout)

    def close(self) -> None:
        self._channel.close()

    @staticmethod
    def _head(session_id: str) -> bytes:
        return _text(1, session_id) + _message(2, _text(1, SPARK_USER))

    async def _unary(self, method: str, request: bytes, timeout: float) -> None:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(
            _SERVICE + method, _as_is, _as_is
        )
        pending = call.future(request, timeout=timeout, metadata=self._metadata)
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        # grpc calls back in a thread of its own.
        pending.add_done_callback(lambda _: _wake(loop, done))
        try:
            await done.wait()
        except asyncio.CancelledError:
            pending.cancel()
            raise
        if pending.cancelled():
            raise Unavailable("SparkUnavailable", f"Spark's {method}: the channel was closed")
        error = pending.exception()
        if error is not None:
            raise _translated(method, error)

    def _drain(self, method: str, request: bytes, timeout: float) -> None:
        try:
            call: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(
                _SERVICE + method, _as_is, _as_is
            )
            for _ in call(request, timeout=timeout, metadata=self._metadata):
                pass
        except grpc.RpcError as error:
            raise _translated(method, error) from None


def _as_is(message: bytes) -> bytes:
    return message


def _wake(loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(done.set)


def _translated(method: str, error: BaseException) -> Unavailable | Unauthenticated:
    if isinstance(error, grpc.Call):
        code = error.code()
        message = f"Spark's {method}: {code.name}: {(error.details() or '')[:500]}"
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated("SparkRefused", message)
        return Unavailable("SparkUnavailable", message)
    return Unavailable("SparkUnavailable", f"Spark's {method}: {type(error).__name__}")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


async def interrupt_attempt(rpc: SparkRpc, task_id: str, attempt: int, epoch: int) -> bool:
    """End an attempt's work; False if Spark didn't answer. A session that never existed, or is gone, counts as
    ended."""
    session = session_id(task_id, attempt, epoch)
    # Both fail for a session that is gone; the release shows whether Spark answers at all.
    with contextlib.suppress(TracelakeError):
        await rpc.interrupt(session, tag(task_id, attempt), _INTERRUPT_SECONDS)
    with contextlib.suppress(TracelakeError):
        await rpc.version(_INTERRUPT_SECONDS, session)
    try:
        await rpc.release(session, _INTERRUPT_SECONDS)
    except TracelakeError:
        return False
    return True


class HealthProbe:
    """Asks a cheap question every other second, and now and then runs a query. A server under load answers late;
    only one that is silent for ``hangs_after`` seconds has stopped."""

    def __init__(self, rpc: SparkRpc, hangs_after: float) -> None:
        self._rpc = rpc
        self._hangs_after = hangs_after
        self._patience = max(hangs_after / 2, 0.5)

    async def stops(self) -> str:
        """Wait until there has been no answer for too long; the result is the last error."""
        loop = asyncio.get_running_loop()
        count, missed, answered_at = 0, 0, loop.time()
        while True:
            await asyncio.sleep(min(PROBE_SECONDS, self._patience))
            count += 1
            try:
                await self._ask(query=count % _QUERY_EVERY_PROBES == 0)
            except TracelakeError as error:
                # Twice, since a process that was itself stopped for a while finds its clock advanced.
                missed += 1
                silent = loop.time() - answered_at
                if missed > 1 and silent >= self._hangs_after:
                    return f"the Spark server has not answered for {silent:.0f} s: {error}"
            else:
                missed, answered_at = 0, loop.time()

    async def _ask(self, *, query: bool) -> None:
        if query:
            await self._rpc.select_one(self._patience)
        else:
            await self._rpc.version(self._patience)
