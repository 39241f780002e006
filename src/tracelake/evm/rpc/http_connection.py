"""One kept-alive HTTP/1.1 connection, as little as JSON-RPC needs and with every wait under one deadline.

Each ``recv`` waits only for what is left of the deadline, so an endpoint that sends a byte now and then can't hold
a caller longer than one that sends nothing. ``abort`` may come from another thread and ends whatever waits.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Mapping

from tracelake.evm.rpc.address import Address
from tracelake.evm.rpc.http_answer import AnswerReader, HttpAnswer, left_until
from tracelake.evm.rpc.problem import Kind, Problem

_CONNECT_SECONDS = 10.0


class HttpConnection:
    def __init__(self, address: Address, headers: Mapping[str, str], tls: ssl.SSLContext | None) -> None:
        self._address = address
        self._tls = tls
        self._socket: socket.socket | None = None
        self._reader: AnswerReader | None = None
        self._aborted = threading.Event()
        self._head = _request_head(address, headers)
        self.used = False

    def post(self, body: bytes, deadline: float) -> HttpAnswer:
        """Raises ``Problem``; the connection can't be used again then."""
        try:
            if self._socket is None or self._reader is None:
                self._socket = self._connect(deadline)
                self._reader = AnswerReader(self._socket)
            self._socket.settimeout(left_until(deadline))
            self._socket.sendall(b"%bContent-Length: %d\r\n\r\n%b" % (self._head, len(body), body))
            answer = self._reader.read(deadline)
        except Problem:
            self.close()
            raise
        except TimeoutError:
            self.close()
            raise Problem(Kind.TIMEOUT, "no answer in time") from None
        except (OSError, ValueError) as error:
            self.close()
            raise Problem(Kind.TRANSPORT, _said(error)) from None
        self.used = True
        if not answer.keeps:
            self.close()
        return answer

    def abort(self) -> None:
        self._aborted.set()
        if (connected := self._socket) is not None:
            try:
                connected.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    def close(self) -> None:
        connected, self._socket, self._reader = self._socket, None, None
        if connected is not None:
            connected.close()

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def _connect(self, deadline: float) -> socket.socket:
        address = self._address
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        last: OSError | None = None
        for family, kind, protocol, _, place in found:
            connecting = self._socket = socket.socket(family, kind, protocol)
            try:
                connecting.settimeout(min(_CONNECT_SECONDS, left_until(deadline)))
                if self._aborted.is_set():
                    raise Problem(Kind.TRANSPORT, "the pool was closed")
                connecting.connect(place)
                connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not address.tls:
                    return connecting
                context = self._tls or ssl.create_default_context()
                return context.wrap_socket(connecting, server_hostname=address.host)
            except OSError as error:
                connecting.close()
                last = error
        raise Problem(Kind.TRANSPORT, f"can't connect: {_said(last)}")


def _request_head(address: Address, headers: Mapping[str, str]) -> bytes:
    given = {
        "Host": address.authority,
        "Content-Type": "application/json",
        "Accept": "application/json",
        "User-Agent": "tracelake",
    }
    if not address.is_loopback:
        # Packing costs more than it saves where nothing has to travel.
        given["Accept-Encoding"] = "gzip"
    if address.authorization is not None:
        given["Authorization"] = address.authorization
    named = {name.lower() for name in headers}
    given = {name: value for name, value in given.items() if name.lower() not in named}
    lines = [
        f"POST {address.target} HTTP/1.1",
        *(f"{key}: {value}" for key, value in (given | dict(headers)).items()),
    ]
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1")


def _said(error: Exception | None) -> str:
    """Without the address: what the system says about it may quote it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate isn't accepted: {error.verify_message}"
    if isinstance(error, socket.gaierror):
        return "its host isn't known"
    if isinstance(error, TimeoutError):
        return "no connection in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return type(error).__name__
