"""JSON-RPC over HTTP/1.1: one request, one deadline, and one outcome for each call.

Answers of a batch come in any order; some may be missing, doubled or errors of their own. Each call ends with a
result or with an ``RpcProblem``; nothing is guessed. A quantity larger than the database can store is refused:
no height, index or chain id is that large, and Python refuses to print a number that is long enough.

``HttpConnection`` is one kept-alive connection with as little HTTP as JSON-RPC needs. Each ``recv`` waits only
for the rest of the deadline, so an endpoint that sends a byte now and then can't hold a caller longer than a
silent one. ``abort`` may come from another thread and ends every wait.
"""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tracelake.evm.rpc.config import Address
from tracelake.evm.rpc.errors import ProblemKind, RpcProblem, problem_of_error

RpcCall = tuple[str, Sequence[Any]]
RpcOutcome = Any
"""The result as it was received, or an ``RpcProblem``."""
_LONGEST_WAIT = 60.0
MOST_QUANTITY = 2**63 - 1
_DIGITS = re.compile(r"0x[0-9a-fA-F]{1,16}")
_CONNECT_SECONDS = 10.0
MAX_BODY = 128 * 1024 * 1024
"""Several times the largest answer of any node; parsed, it takes up to twenty times as much memory."""
_MAX_HEAD = 64 * 1024
_PIECE = 256 * 1024


def encode(calls: Sequence[RpcCall], first_id: int) -> bytes:
    """Encode calls. A single call isn't wrapped in a batch, since some endpoints accept none."""
    requests = [
        {"jsonrpc": "2.0", "id": first_id + index, "method": method, "params": params}
        for index, (method, params) in enumerate(calls)
    ]
    return orjson.dumps(requests[0] if len(requests) == 1 else requests)


def decode(answer: EndpointResponse, calls: Sequence[RpcCall], first_id: int) -> list[RpcOutcome]:
    """Match an answer to its calls. Raises ``RpcProblem`` when it answers none of them."""
    tree = _parse(answer)
    if answer.status != 200:
        raise _refusal(answer, tree, calls)
    if len(calls) == 1 and isinstance(tree, dict):
        return [_single(tree, calls[0], first_id)]
    if isinstance(tree, dict):
        if tree.get("error") is not None:
            raise _about_batch(tree["error"], calls)
        raise RpcProblem(ProblemKind.GARBLED, "a single response to a batch")
    if not isinstance(tree, list):
        raise RpcProblem(ProblemKind.GARBLED, "the response is not JSON-RPC")
    return _match(tree, calls, first_id)


def _parse(answer: EndpointResponse) -> Any:
    try:
        return orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        if answer.status == 200:
            what = (
                "HTML" if bytes(answer.body[:64]).lstrip()[:1] == b"<" else "not JSON, or only a part of it"
            )
            raise RpcProblem(ProblemKind.GARBLED, f"the answer is {what}") from None
        return None


def _refusal(answer: EndpointResponse, tree: Any, calls: Sequence[RpcCall]) -> RpcProblem:
    """The problem behind an HTTP status. A JSON-RPC error in the body is more exact."""
    status = answer.status
    if status == 429:
        wait = _retry_after(answer.headers.get("retry-after"))
        return RpcProblem(ProblemKind.RATE_LIMITED, "HTTP 429: rate limited", retry_after=wait)
    if isinstance(tree, dict) and isinstance(tree.get("error"), dict):
        about = _about_batch(tree["error"], calls)
        if about.kind is not ProblemKind.SERVER:
            return about
    if status == 413:
        return RpcProblem(
            ProblemKind.BATCH if len(calls) > 1 else ProblemKind.TOO_MUCH, "HTTP 413: too large"
        )
    if status in (401, 402, 403, 404, 405, 407):
        return RpcProblem(ProblemKind.LOCKED_OUT, f"HTTP {status}: the key or the address is refused")
    if 300 <= status < 400:
        return RpcProblem(ProblemKind.LOCKED_OUT, f"HTTP {status}: it has moved to another address")
    if status in (408, 504, 524):
        return RpcProblem(ProblemKind.TIMEOUT, f"HTTP {status}: no answer in time")
    wait = _retry_after(answer.headers.get("retry-after")) if status == 503 else None
    return RpcProblem(ProblemKind.SERVER, f"HTTP {status}", retry_after=wait)


def _about_batch(error: Any, calls: Sequence[RpcCall]) -> RpcProblem:
    methods = {method for method, _ in calls}
    problem = problem_of_error(methods.pop() if len(methods) == 1 else "", error)
    if len(calls) > 1 and problem.kind in (ProblemKind.REFUSED, ProblemKind.TOO_MUCH, ProblemKind.NO_METHOD):
        # One error for the whole batch is about its size; otherwise the calls fail again one by one.
        return RpcProblem(ProblemKind.BATCH, problem.text, code=problem.code)
    return problem


def _single(item: dict[str, Any], call: RpcCall, expected: int) -> RpcOutcome:
    # Before the id: an error may come without one.
    if item.get("error") is not None:
        return problem_of_error(call[0], item["error"])
    if item.get("id") != expected:
        raise RpcProblem(ProblemKind.GARBLED, "the response id does not match the request")
    return _result(item)


def _match(items: list[Any], calls: Sequence[RpcCall], first_id: int) -> list[RpcOutcome]:
    missing = RpcProblem(ProblemKind.GARBLED, "the batch response has no entry for this call")
    outcomes: list[RpcOutcome] = [missing] * len(calls)
    for item in items:
        # ``type`` and not ``isinstance``: true would pass for the id 1.
        if type(item) is not dict or type(number := item.get("id")) is not int:
            continue
        index = number - first_id
        if not 0 <= index < len(calls):
            continue
        if (error := item.get("error")) is not None:
            outcome: RpcOutcome = problem_of_error(calls[index][0], error)
        else:
            outcome = _result(item)
        # The same answer twice is harmless; two different ones can't be trusted.
        if outcomes[index] is not missing and not _equal(outcomes[index], outcome):
            outcome = RpcProblem(ProblemKind.GARBLED, "two different answers to one call")
        outcomes[index] = outcome
    if len(calls) > 1 and all(outcome is missing for outcome in outcomes):
        # Some endpoints refuse a batch with a list of one error that has no id.
        for item in items:
            if isinstance(item, dict) and item.get("error") is not None:
                raise _about_batch(item["error"], calls)
    return outcomes


def _equal(one: RpcOutcome, other: RpcOutcome) -> bool:
    """Compare two results as JSON text. ``==`` would recurse, and how deep it may go is the process's own
    setting: orjson refuses any nesting beyond 254 levels, and no chain has results that deep."""
    try:
        first, second = (orjson.dumps(value, option=orjson.OPT_SORT_KEYS) for value in (one, other))
        return first == second
    except TypeError:
        return False


def _result(item: dict[str, Any]) -> RpcOutcome:
    try:
        return item["result"]
    except KeyError:
        return RpcProblem(ProblemKind.GARBLED, "an answer without a result")


def _retry_after(text: str | None) -> float | None:
    """Seconds to wait. A date is ignored, since clocks differ."""
    # isdigit() alone accepts characters like ² that float() refuses.
    if text is None or not (text.isascii() and text.strip().isdigit()):
        return None
    return min(float(text), _LONGEST_WAIT)


def read_quantity(value: Any) -> int | None:
    """A number from 0 to ``MOST_QUANTITY``; None for anything else."""
    if not isinstance(value, str) or _DIGITS.fullmatch(value) is None:
        return None
    number = int(value, 16)
    return number if number <= MOST_QUANTITY else None


class HttpConnection:
    def __init__(self, address: Address, headers: Mapping[str, str], tls: ssl.SSLContext | None) -> None:
        self._address = address
        self._tls = tls
        self._socket: socket.socket | None = None
        self._reader: ResponseReader | None = None
        self._aborted = threading.Event()
        self._head = _request_head(address, headers)
        self.used = False

    def post(self, body: bytes, deadline: float) -> EndpointResponse:
        """Send a request and read its answer. After an ``RpcProblem`` the connection can't be used again."""
        try:
            if self._socket is None or self._reader is None:
                self._socket = self._connect(deadline)
                self._reader = ResponseReader(self._socket)
            self._socket.settimeout(left_until(deadline))
            self._socket.sendall(b"%bContent-Length: %d\r\n\r\n%b" % (self._head, len(body), body))
            answer = self._reader.read(deadline)
        except RpcProblem:
            self.close()
            raise
        except TimeoutError:
            self.close()
            raise RpcProblem(ProblemKind.TIMEOUT, "no answer in time") from None
        except (OSError, ValueError) as error:
            self.close()
            raise RpcProblem(ProblemKind.TRANSPORT, _reason(error)) from None
        self.used = True
        if not answer.keeps:
            self.close()
        return answer

    def abort(self) -> None:
        self._aborted.set()
        if (connected := self._socket) is not None:
            try:
                # Not ``close``: it wouldn't wake a thread in ``recv``,
                # and its number might become another file's.
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
            # Set before it is connected, so that ``abort`` reaches it.
            connecting = self._socket = socket.socket(family, kind, protocol)
            try:
                connecting.settimeout(min(_CONNECT_SECONDS, left_until(deadline)))
                # An abort that came before the socket existed has only set this.
                if self._aborted.is_set():
                    raise RpcProblem(ProblemKind.TRANSPORT, "the pool was closed")
                connecting.connect(place)
                # Requests are small and wait for their answer: the
                # kernel must not hold them back to fill a packet.
                connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not address.tls:
                    return connecting
                context = self._tls or ssl.create_default_context()
                return context.wrap_socket(connecting, server_hostname=address.host)
            except OSError as error:
                connecting.close()
                last = error
        raise RpcProblem(ProblemKind.TRANSPORT, f"can't connect: {_reason(last)}")


def _request_head(address: Address, headers: Mapping[str, str]) -> bytes:
    given = {
        "Host": address.authority,
        "Content-Type": "application/json",
        "Accept": "application/json",
        "User-Agent": "tracelake",
    }
    if not address.is_loopback:
        # On loopback, compression costs more than it saves.
        given["Accept-Encoding"] = "gzip"
    if address.authorization is not None:
        given["Authorization"] = address.authorization
    named = {name.lower() for name in headers}
    # A header of the configuration replaces ours, however it is written.
    given = {name: value for name, value in given.items() if name.lower() not in named}
    lines = [
        f"POST {address.target} HTTP/1.1",
        *(f"{key}: {value}" for key, value in (given | dict(headers)).items()),
    ]
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1")


def _reason(error: Exception | None) -> str:
    """A description without the address, which the system's own message may quote."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate isn't accepted: {error.verify_message}"
    if isinstance(error, socket.gaierror):
        return "its host isn't known"
    if isinstance(error, TimeoutError):
        return "no connection in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return type(error).__name__


@dataclass(frozen=True, slots=True)
class EndpointResponse:
    """``keeps``: the connection can be used for another request."""

    status: int
    headers: Mapping[str, str]
    body: bytes | bytearray
    keeps: bool = True


class ResponseReader:
    """Reads HTTP answers from one connection. Bytes beyond an answer are kept for the next."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._unread = b""

    def read(self, deadline: float) -> EndpointResponse:
        while True:
            status, headers = self._read_head(deadline)
            # 1xx answers announce the real one.
            if status >= 200:
                break
        body: bytes | bytearray
        sized = True
        if "chunked" in headers.get("transfer-encoding", "").lower():
            body = self._read_chunks(deadline)
        elif (length := headers.get("content-length")) is not None:
            body = self._read_exactly(_size(length), deadline)
        else:
            # Without a length the end of the connection ends the body.
            body, sized = self._read_to_end(deadline), False
        if headers.get("content-encoding", "").lower() in ("gzip", "x-gzip"):
            body = _unzip(body)
        keeps = sized and headers.get("connection", "").lower() != "close"
        return EndpointResponse(status, headers, body, keeps)

    def _receive(self, deadline: float) -> bytes:
        self._socket.settimeout(left_until(deadline))
        return self._socket.recv(_PIECE)

    def _read_head(self, deadline: float) -> tuple[int, dict[str, str]]:
        head = self._unread
        while (end := head.find(b"\r\n\r\n")) < 0:
            if len(head) > _MAX_HEAD:
                raise RpcProblem(ProblemKind.GARBLED, "HTTP headers too large")
            if not (piece := self._receive(deadline)):
                raise RpcProblem(
                    ProblemKind.TRANSPORT, "the connection was cut" if head else "the connection was closed"
                )
            head += piece
        self._unread = head[end + 4 :]
        first, *lines = head[:end].decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise RpcProblem(ProblemKind.GARBLED, "the response is not HTTP")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        return int(rest[:3]), headers

    def _read_exactly(self, size: int, deadline: float) -> bytearray | bytes:
        held = self._unread
        if len(held) >= size:
            self._unread = held[size:]
            return held[:size]
        body = bytearray(size)
        body[: len(held)] = held
        self._unread = b""
        filled = len(held)
        with memoryview(body) as view:
            while filled < size:
                self._socket.settimeout(left_until(deadline))
                if not (count := self._socket.recv_into(view[filled:], min(size - filled, _PIECE * 4))):
                    raise RpcProblem(
                        ProblemKind.TRANSPORT, f"the connection was cut after {filled} of {size} bytes"
                    )
                filled += count
        return body

    def _read_chunks(self, deadline: float) -> bytearray:
        body = bytearray()
        while True:
            size = _size(self._read_line(deadline).partition(b";")[0].strip().decode("latin-1"), 16)
            if size == 0:
                break
            if len(body) + size > MAX_BODY:
                raise RpcProblem(ProblemKind.TOO_MUCH, f"the response exceeds {MAX_BODY} bytes")
            body += self._read_exactly(size, deadline)
            self._read_line(deadline)
        # Trailers after the last chunk would otherwise be the head of the next answer.
        while self._read_line(deadline):
            pass
        return body

    def _read_line(self, deadline: float) -> bytes:
        while (end := self._unread.find(b"\r\n")) < 0:
            if len(self._unread) > _MAX_HEAD:
                raise RpcProblem(ProblemKind.GARBLED, "a chunk header without an end")
            if not (piece := self._receive(deadline)):
                raise RpcProblem(ProblemKind.TRANSPORT, "the connection was cut within a chunk")
            self._unread += piece
        line, self._unread = self._unread[:end], self._unread[end + 2 :]
        return line

    def _read_to_end(self, deadline: float) -> bytearray:
        body = bytearray(self._unread)
        self._unread = b""
        while piece := self._receive(deadline):
            body += piece
            if len(body) > MAX_BODY:
                raise RpcProblem(ProblemKind.TOO_MUCH, f"the response exceeds {MAX_BODY} bytes")
        return body


def left_until(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _size(text: str, base: int = 10) -> int:
    try:
        size = int(text, base)
    except ValueError:
        raise RpcProblem(ProblemKind.GARBLED, "invalid Content-Length or chunk size") from None
    # Before anything is allocated: the endpoint chooses this number.
    if not 0 <= size <= MAX_BODY:
        raise RpcProblem(ProblemKind.TOO_MUCH, f"the response exceeds {MAX_BODY} bytes")
    return size


def _unzip(body: bytes | bytearray) -> bytes:
    # With a limit: a small answer must not unpack to more than a large one may have.
    unpacking = zlib.decompressobj(31)
    try:
        plain = unpacking.decompress(body, MAX_BODY)
    except zlib.error:
        raise RpcProblem(ProblemKind.GARBLED, "invalid gzip data") from None
    if unpacking.unconsumed_tail or not unpacking.eof:
        raise RpcProblem(ProblemKind.GARBLED, "gzip data is incomplete or too large")
    return plain
