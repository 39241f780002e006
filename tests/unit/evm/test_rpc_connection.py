"""The HTTP that endpoints speak: bodies of every kind of length, packed or not, and every wait with an end."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tracelake.evm.rpc.config import parse_address
from tracelake.evm.rpc.errors import ProblemKind, RpcProblem
from tracelake.evm.rpc.exchange import HttpConnection

PATIENCE = 30.0


class Listener:
    """Answers each request with the next of ``answers``, in pieces; an empty one ends the connection."""

    def __init__(self, *answers: list[bytes]) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._answers = list(answers)
        self._thread = threading.Thread(target=self._serve)
        self.heard: list[bytes] = []
        self.connections = 0
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/path?key=value"

    def _serve(self) -> None:
        while self._answers:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            with connection:
                self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        while self._answers:
            heard = b""
            while b"\r\n\r\nbody" not in heard:
                if not (piece := connection.recv(65536)):
                    return
                heard += piece
            self.heard.append(heard)
            for piece in self._answers.pop(0):
                if not piece:
                    return
                connection.sendall(piece)
        self.ended.wait(PATIENCE)

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@contextmanager
def connection_to(listener: Listener, **headers: str) -> Iterator[HttpConnection]:
    connection = HttpConnection(parse_address(listener.url), headers, None)
    try:
        yield connection
    finally:
        connection.close()


def post(connection: HttpConnection, seconds: float = PATIENCE) -> bytes:
    return bytes(connection.post(b"body", time.monotonic() + seconds).body)


def head(*lines: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", *lines, "", ""]).encode()


PACKED = gzip.compress(b"hello")


@pytest.mark.parametrize(
    "pieces",
    [
        [head("Content-Length: 5") + b"hello"],
        [head("content-length:5"), b"he", b"llo"],
        [head("Transfer-Encoding: chunked"), b"2\r\nhe\r\n", b"3;x=y\r\nllo\r\n0\r\n\r\n"],
        [head("Transfer-Encoding: chunked"), b"5\r\nhel", b"lo\r\n0\r\nTrailer: x\r\n\r\n"],
        [b"HTTP/1.1 100 Continue\r\n\r\n", head("Content-Length: 5") + b"hello"],
        [head(f"Content-Length: {len(PACKED)}", "Content-Encoding: gzip"), PACKED],
    ],
)
def test_a_body_is_read_however_it_comes_and_the_connection_used_again(pieces: list[bytes]) -> None:
    with Listener(pieces, pieces) as listener, connection_to(listener) as connection:
        assert post(connection) == b"hello"
        assert post(connection) == b"hello"
        assert connection.is_open
    assert listener.connections == 1


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    whole = [head("Connection: close"), b"hel", b"lo", b""]
    with Listener([b""], whole) as listener, connection_to(listener) as connection:
        with pytest.raises(RpcProblem, match="the connection was closed"):
            post(connection)
        assert post(connection) == b"hello"
        assert not connection.is_open


def test_a_request_says_what_it_must_and_nothing_of_packing_where_nothing_travels() -> None:
    with (
        Listener([head("Content-Length: 0")]) as listener,
        connection_to(listener, Authorization="Bearer x") as connection,
    ):
        post(connection)
    [heard] = listener.heard
    assert heard.startswith(b"POST /path?key=value HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer x\r\n" in heard
    assert b"\r\nContent-Length: 4\r\n" in heard
    assert b"Accept-Encoding" not in heard
    far = HttpConnection(parse_address("https://far.example/"), {}, None)
    assert b"Accept-Encoding: gzip\r\n" in far._head


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ([b"hello?\r\n\r\n"], ProblemKind.GARBLED),
        ([head("Content-Length: many")], ProblemKind.GARBLED),
        ([head("Content-Length: -1")], ProblemKind.TOO_MUCH),
        ([head("Content-Length: 99999999999")], ProblemKind.TOO_MUCH),
        ([head("Transfer-Encoding: chunked"), b"zz\r\n"], ProblemKind.GARBLED),
        ([head("Content-Length: 3", "Content-Encoding: gzip"), b"abc"], ProblemKind.GARBLED),
        ([head("X: " + "y" * 70_000)[:-4]], ProblemKind.GARBLED),
    ],
)
def test_what_is_no_answer_is_said_to_be_none(pieces: list[bytes], kind: ProblemKind) -> None:
    with Listener(pieces) as listener, connection_to(listener) as connection:
        with pytest.raises(RpcProblem) as failed:
            post(connection)
        assert failed.value.kind is kind
        assert not connection.is_open


@pytest.mark.parametrize("pieces", [[], [b"HTTP/1.1 200"], [head("Content-Length: 5"), b"he"]])
def test_a_wait_ends_with_the_deadline_wherever_the_answer_stops(pieces: list[bytes]) -> None:
    with Listener(pieces) as listener, connection_to(listener) as connection:
        with pytest.raises(RpcProblem) as failed:
            post(connection, 0.05)
        assert failed.value.kind is ProblemKind.TIMEOUT


def test_a_wait_ends_when_another_thread_aborts_it() -> None:
    with Listener([]) as listener, connection_to(listener) as connection:
        failures: list[RpcProblem] = []

        def wait() -> None:
            try:
                post(connection)
            except RpcProblem as problem:
                failures.append(problem)

        waiting = threading.Thread(target=wait)
        waiting.start()
        while not listener.heard:
            time.sleep(0.001)
        connection.abort()
        waiting.join(PATIENCE)
        assert [failure.kind for failure in failures] == [ProblemKind.TRANSPORT]


def test_nobody_there_is_said_without_the_address() -> None:
    with Listener() as listener:
        url = listener.url
    with pytest.raises(RpcProblem, match=r"^can't connect: connection refused$"):
        HttpConnection(parse_address(url), {}, None).post(b"body", time.monotonic() + PATIENCE)
