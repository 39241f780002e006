"""The only way out of a sandbox: a socket that passes ``/v1/task/*`` on, and nothing else.

    /v1/task/query, exports   the Query Service, if there is one
    /v1/task/*                the Dispatcher's internal address
    /2018-06-01/runtime/*     answered by the worker itself (the Lambda Runtime API)
    anything else             404

What a function may do there is decided by its capability token; the worker's own token never comes near. One
gateway serves one function environment: over a Unix socket that is shown inside, over a listening socket in the
sandbox's own network (``SandboxSpec.listen``), or both. Connections, requests under way and bytes are limited, so a
function that floods its gateway starves itself alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

import httpx
import structlog

from tracelake.domain.errors import NotFound, TracelakeError, Unavailable
from tracelake.worker.sandbox.gateway_connection import Budget, GatewayConnection
from tracelake.worker.sandbox.gateway_messages import (
    FORWARDED_HEADERS,
    RETURNED_HEADERS,
    GatewayRequest,
    GatewayResponse,
)

__all__ = ["Gateway", "GatewayLimits", "GatewayRequest", "GatewayResponse", "RuntimeHandler"]

RUNTIME_PREFIX = "/2018-06-01/runtime/"
TASK_PREFIX = "/v1/task/"
QUERY_PATH = "/v1/task/query"
EXPORTS_PATH = "/v1/task/exports"
_MIB = 1024 * 1024
_SOCKET_MODE = 0o666
_QUIET_SECONDS = 10.0

RuntimeHandler = Callable[[GatewayRequest], Coroutine[None, None, GatewayResponse]]
Admit = Callable[[GatewayRequest], None]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """``body_bytes`` has room for the largest publish. Answers are passed on piece by piece and never kept."""

    connections: int = 32
    forwards: int = 8
    head_bytes: int = 16 * 1024
    body_bytes: int = 17 * _MIB
    total_bytes: int = 34 * _MIB
    forward_seconds: float = 300.0


class _Quiet:
    """A log line every few seconds at most: what a sandbox does must not fill the worker's log."""

    def __init__(self) -> None:
        self._next = 0.0
        self._unsaid = 0

    def may_say(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            self._unsaid += 1
            return False
        self._next = now + _QUIET_SECONDS
        return True

    def unsaid(self) -> int:
        """How many lines were left out before this one."""
        unsaid, self._unsaid = self._unsaid, 0
        return unsaid


class Gateway:
    """``admit`` may refuse a request for ``/v1/task/*`` by raising, for instance one with another task's token."""

    def __init__(
        self,
        *,
        dispatcher_url: str,
        query_url: str | None = None,
        runtime: RuntimeHandler,
        admit: Admit | None = None,
        limits: GatewayLimits | None = None,
    ) -> None:
        self._dispatcher_url = dispatcher_url.rstrip("/")
        self._query_url = None if query_url is None else query_url.rstrip("/")
        self._runtime = runtime
        self._admit = admit
        self._limits = limits or GatewayLimits()
        self._budget = Budget(self._limits.body_bytes, self._limits.total_bytes)
        self._forwards = asyncio.Semaphore(self._limits.forwards)
        self._client: httpx.AsyncClient | None = None
        self._quiet = _Quiet()
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, at: Path | socket.socket) -> None:
        """A socket file is open to every user, since the sandbox's isn't known yet: keep its folder private.

        A listening socket stays its owner's to close, at any time.
        """
        # Known before it serves: whoever is canceled on the way can close it.
        if isinstance(at, socket.socket):
            server = await asyncio.start_server(self._accept, sock=_copy(at), start_serving=False)
        else:
            server = await asyncio.start_unix_server(self._accept, at, start_serving=False)
        self._servers.append(server)
        await server.start_serving()
        if not isinstance(at, socket.socket):
            os.chmod(at, _SOCKET_MODE)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for connection in tuple(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= self._limits.connections:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = GatewayConnection(reader, writer, self._budget, self._limits.head_bytes)
        try:
            await connection.serve(self._answer)
        except Exception:
            # Whatever a sandbox says, it must not end the worker; what it found out must not be lost either.
            if self._quiet.may_say():
                log.exception("gateway connection failed", left_out=self._quiet.unsaid())
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, request: GatewayRequest, connection: GatewayConnection) -> None:
        if request.path.startswith(RUNTIME_PREFIX):
            await connection.send(await connection.while_connected(self._runtime(request)))
            return
        upstream = self._upstream(request.path)
        if upstream is None and _is_query(request.path):
            raise NotFound("NotServed", "this worker knows of no Query Service (TRACELAKE_QUERY_URL)")
        if upstream is None:
            raise NotFound("NotFound", "there is nothing here")
        if self._admit is not None:
            self._admit(request)
        async with self._forwards:
            await self._forward(upstream, request, connection)

    def _upstream(self, path: str) -> str | None:
        if _is_query(path):
            return self._query_url
        return self._dispatcher_url if path.startswith(TASK_PREFIX) else None

    async def _forward(self, upstream: str, request: GatewayRequest, connection: GatewayConnection) -> None:
        if self._client is None:
            self._client = httpx.AsyncClient(trust_env=False, follow_redirects=False)
        url = f"{upstream}{request.path}" + (f"?{request.query}" if request.query else "")
        headers = [
            (name.encode(), request.headers[name].encode("latin-1"))
            for name in FORWARDED_HEADERS
            if name in request.headers
        ]
        headers.append((b"accept-encoding", b"identity"))
        try:
            async with asyncio.timeout(self._limits.forward_seconds):
                asked = self._client.stream(
                    request.method, url, headers=headers, content=request.body, timeout=None
                )
                async with asked as answer:
                    given = {
                        name: answer.headers[name] for name in RETURNED_HEADERS if name in answer.headers
                    }
                    if "content-length" in answer.headers:
                        given["content-length"] = answer.headers["content-length"]
                    await connection.send_pieces(answer.status_code, given, answer.aiter_raw())
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            if self._quiet.may_say():
                why, unsaid = str(error) or type(error).__name__, self._quiet.unsaid()
                log.warning(
                    "gateway could not pass a request on", path=request.path, error=why, left_out=unsaid
                )
            raise _unreachable() from error


def _is_query(path: str) -> bool:
    return path in (QUERY_PATH, EXPORTS_PATH)


def _copy(listener: socket.socket) -> socket.socket:
    return listener.dup()


def _unreachable() -> TracelakeError:
    return Unavailable("UpstreamUnavailable", "the service did not answer; try again later")
