"""The HTTP side of ``tracelake.testing.faulty_rpc``: a small server that can hang, cut and fall silent."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from tracelake.evm.rpc.http_connection import HttpConnection
from tracelake.evm.rpc.problem import Problem
from tracelake.testing.rpc_faults import Fault


class FaultyAnswer:
    def __init__(
        self,
        body: bytes,
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        kind: str = "application/json",
        how: Fault | None = None,
    ) -> None:
        if how is Fault.TRUNCATED:
            body = body[: len(body) // 2]
        given = {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        self.how = how
        self.sent = f"HTTP/1.1 {status} -\r\n{head}\r\n".encode() + body
        if how is Fault.CUT:
            self.sent = self.sent[: len(self.sent) - len(body) // 2 - 1]


class FaultyServer(socketserver.ThreadingTCPServer):
    """``connect`` gives each connection its own way upstream; ``answer`` is asked with it for each request."""

    daemon_threads = False
    block_on_close = True

    def __init__(
        self,
        connect: Callable[[], HttpConnection | None],
        answer: Callable[[bytes, HttpConnection | None], FaultyAnswer],
    ) -> None:
        self.connect = connect
        self.answer = answer
        self.stopping = threading.Event()
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def wait_for_end(self, connection: socket.socket) -> None:
        """Until the other side hangs up, or this server ends."""
        connection.settimeout(0.02)
        while not self.stopping.is_set():
            try:
                if not connection.recv(1):
                    return
            except TimeoutError:
                continue

    def server_close(self) -> None:
        self.stopping.set()
        for connection in tuple(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()


class _Handler(socketserver.StreamRequestHandler):
    server: FaultyServer
    disable_nagle_algorithm = True

    def handle(self) -> None:
        self.server.connections.add(self.connection)
        upstream = self.server.connect()
        try:
            while (body := self._request()) is not None:
                answer = self.server.answer(body, upstream)
                if answer.how is Fault.HANG:
                    self.server.wait_for_end(self.connection)
                    return
                if answer.how is Fault.CLOSE:
                    return
                self.wfile.write(answer.sent)
                if answer.how is Fault.CUT:
                    return
        except (OSError, Problem):
            return
        finally:
            self.server.connections.discard(self.connection)
            if upstream is not None:
                upstream.close()

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()

    def _request(self) -> bytes | None:
        length = 0
        if not self.rfile.readline():
            return None
        while line := self.rfile.readline().strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return self.rfile.read(length)
