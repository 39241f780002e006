"""HTTP servers in one event loop: sockets bound first, so that a taken port is said before anything starts."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
from collections.abc import Generator

import uvicorn
from litestar.types import ASGIApp

from tracelake.domain.errors import Conflict
from tracelake.held_port import inherited, stop_listening
from tracelake.serving.http_limits import HttpLimits, tuned, within_descriptors
from tracelake.serving.http_protocol import bounded

SHUTDOWN_SECONDS = 4


class _Server(uvicorn.Server):
    """Signals belong to whoever runs the process, not to one of its servers. Says when it listens."""

    def __init__(self, config: uvicorn.Config, listening: asyncio.Event, held: socket.socket | None) -> None:
        super().__init__(config)
        self._listening = listening
        self._held = held

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """A socket that the parent holds as well goes on listening when it is closed here."""
        if self._held is not None:
            for server in self.servers:
                server.close()
            stop_listening(self._held)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Listener:
    def __init__(self, what: str, host: str, port: int, limits: HttpLimits | None = None) -> None:
        """``limits`` come from the environment unless they are given."""
        self._limits = limits or tuned(HttpLimits(), os.environ)
        given = inherited(what, host, port, os.environ)
        self._held = None if given is None else given.dup()
        self._socket = given or _bind(what, host, port)
        self._server: _Server | None = None
        self._listening = asyncio.Event()

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://{host}:{port}"

    async def serve(self, app: ASGIApp) -> None:
        limits = within_descriptors(self._limits)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            http=bounded(limits),
            ws="none",
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=math.ceil(limits.idle_seconds),
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            backlog=1024,
        )
        self._server = _Server(config, self._listening, self._held)
        await self._server.serve(sockets=[self._socket])

    async def started(self) -> None:
        await self._listening.wait()

    def stop(self) -> None:
        """Answer what is under way, take nothing new."""
        if self._server is not None:
            self._server.should_exit = True

    def close(self) -> None:
        self._socket.close()
        if self._held is not None:
            self._held.close()


def _bind(what: str, host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise Conflict(
            "PortTaken",
            f"the {what} port {host}:{port} can't be used ({error.strerror}); choose another, or 0",
        ) from None
    return listening
