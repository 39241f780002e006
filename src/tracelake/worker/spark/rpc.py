"""The few calls that the wrapper makes to a Spark Connect server, without Spark's client.

Importing pyspark's own stubs costs the wrapper 118 MB and most of a second, grpc alone 21 MB and a tenth of
that; so the handful of request messages is encoded here. Field numbers are those of Spark's
``spark/connect/base.proto``, which promises not to change them; answers aren't decoded, an answer is enough.

Calls go through grpc's threads and are awaited in whatever event loop the caller runs.
"""

from __future__ import annotations

import asyncio
from uuid import uuid4

import grpc

from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.domain.errors import Unauthenticated, Unavailable
from tracelake.worker.spark import ids as spark_ids
from tracelake.worker.spark.channel import metadata, open_channel

_SERVICE = "/spark.connect.SparkConnectService/"
_CLIENT = "tracelake-worker"
_INTERRUPT_TAG = 2


class SparkRpc:
    """One channel to one server."""

    def __init__(self, target: SparkTarget, *, with_token: bool = True) -> None:
        self._channel = open_channel(target, with_token=with_token)
        self._metadata = metadata(target)
        # Of its own: a server that has forgotten it makes it anew, so a check never depends on an earlier one.
        self._session = str(uuid4())

    async def version(self, timeout: float, session_id: str | None = None) -> None:
        """Ask for the server's version: the cheapest question that goes all the way in, and makes the session."""
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
        """End a session and whatever runs in it; its id is refused from then on."""
        await self._unary("ReleaseSession", self._head(session_id) + _text(3, _CLIENT), timeout)

    def close(self) -> None:
        self._channel.close()

    @staticmethod
    def _head(session_id: str) -> bytes:
        return _text(1, session_id) + _message(2, _text(1, spark_ids.USER))

    async def _unary(self, method: str, request: bytes, timeout: float) -> None:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(
            _SERVICE + method, _as_is, _as_is
        )
        pending = call.future(request, timeout=timeout, metadata=self._metadata)
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        pending.add_done_callback(lambda _: _tell(loop, done))
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


def _tell(loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
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
