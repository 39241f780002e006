"""The only way out of a sandbox: a socket that forwards ``/v1/task/*``, and nothing else.

    /v1/task/query, exports   the Query Service, if there is one
    /v1/task/*                the Dispatcher's internal address
    /2018-06-01/runtime/*     answered by the worker itself (the Lambda Runtime API)
    anything else             404

A function's capability token decides what it may do there; the worker's own token is never involved. One gateway
serves one function environment: over a Unix socket that is shown inside, over a listening socket in the sandbox's
own network (``SandboxSpec.listen``), or both. Connections, concurrent requests and bytes are limited, so a
function that floods its gateway starves only itself.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

import httpx
import structlog

from tracelake.contracts.dispatcher_api import TASK_PREFIX
from tracelake.contracts.query_api import TASK_EXPORTS_PATH, TASK_QUERY_PATH
from tracelake.domain.errors import NotFound, TracelakeError, Unavailable
from tracelake.sandbox.gateway_connection import (
    FORWARDED_HEADERS,
    RETURNED_HEADERS,
    Budget,
    GatewayConnection,
)
from tracelake.serving.small_http import ServedRequest, ServedResponse, SmallHttpServer

RUNTIME_PREFIX = "/2018-06-01/runtime/"
_MIB = 1024 * 1024
_SOCKET_MODE = 0o666
_QUIET_SECONDS = 10.0

RuntimeHandler = Callable[[ServedRequest], Coroutine[None, None, ServedResponse]]
Admit = Callable[[ServedRequest], None]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """``body_bytes`` has room for the largest publish. Answers are forwarded in pieces and never stored."""

    connections: int = 32
    forwards: int = 8
    head_bytes: int = 16 * 1024
    body_bytes: int = 17 * _MIB
    total_bytes: int = 34 * _MIB
    forward_seconds: float = 300.0


class _Quiet:
    """Limits log lines to one every few seconds: a sandbox must not fill the worker's log."""

    def __init__(self) -> None:
        self._next = 0.0
        self._left_out = 0

    def may_log(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            self._left_out += 1
            return False
        self._next = now + _QUIET_SECONDS
        return True

    def left_out(self) -> int:
        """The number of lines that were left out before this one."""
        left_out, self._left_out = self._left_out, 0
        return left_out


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
        self._server = SmallHttpServer(self._accept, self._failed)

    async def listen(self, at: Path | socket.socket) -> None:
        """Serve at a socket file or a listening socket.

        A socket file is open to every user, since the sandbox's isn't known yet: keep its folder private. A
        listening socket is closed by its owner, at any time.
        """
        if isinstance(at, socket.socket):
            await self._server.listen(_copy(at))
        else:
            await self._server.listen(at)
            os.chmod(at, _SOCKET_MODE)

    async def close(self) -> None:
        await self._server.close()
        if self._client is not None:
            await self._client.aclose()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> GatewayConnection | None:
        if len(self._server) >= self._limits.connections:
            writer.transport.abort()
            return None
        return GatewayConnection(reader, writer, self._budget, self._limits.head_bytes, self._answer)

    def _failed(self) -> None:
        if self._quiet.may_log():
            log.exception("gateway connection failed", left_out=self._quiet.left_out())

    async def _answer(self, request: ServedRequest, connection: GatewayConnection) -> None:
        if request.path.startswith(RUNTIME_PREFIX):
            await connection.send(await connection.while_connected(self._runtime(request)))
            return
        upstream = self._upstream(request.path)
        if upstream is None and _is_query(request.path):
            raise NotFound(
                "NotServed", "no Query Service is configured for this worker (TRACELAKE_QUERY_URL)"
            )
        if upstream is None:
            raise NotFound("NotFound", "the gateway has no such path")
        if self._admit is not None:
            self._admit(request)
        # After `admit`: a request that is refused takes no place.
        async with self._forwards:
            await self._forward(upstream, request, connection)

    def _upstream(self, path: str) -> str | None:
        if _is_query(path):
            return self._query_url
        return self._dispatcher_url if path.startswith(TASK_PREFIX) else None

    async def _forward(self, upstream: str, request: ServedRequest, connection: GatewayConnection) -> None:
        if self._client is None:
            # Proxies of the environment, or a redirect, would lead requests elsewhere than upstream.
            self._client = httpx.AsyncClient(trust_env=False, follow_redirects=False)
        url = f"{upstream}{request.path}" + (f"?{request.query}" if request.query else "")
        headers = [
            (name.encode(), request.headers[name].encode("latin-1"))
            for name in FORWARDED_HEADERS
            if name in request.headers
        ]
        # `content-encoding` isn't returned, so a compressed answer couldn't be read inside.
        headers.append((b"accept-encoding", b"identity"))
        try:
            async with asyncio.timeout(self._limits.forward_seconds):
                # Without httpx' own timeout, which begins anew with
                # each piece: the one above bounds the whole exchange.
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
            if self._quiet.may_log():
                why, left_out = str(error) or type(error).__name__, self._quiet.left_out()
                log.warning(
                    "gateway could not pass a request on", path=request.path, error=why, left_out=left_out
                )
            raise _unreachable() from error


def _is_query(path: str) -> bool:
    return path in (TASK_QUERY_PATH, TASK_EXPORTS_PATH)


def _copy(listener: socket.socket) -> socket.socket:
    # The owner closes its own at any time, which must not pull the descriptor away from the server.
    return listener.dup()


def _unreachable() -> TracelakeError:
    return Unavailable("UpstreamUnavailable", "the service did not answer; try again later")
