"""``FaultyRpc``: a JSON-RPC endpoint that misbehaves on demand, in front of one that doesn't.

    with FaultyRpc(node.url) as faulty:
        faulty.lie(Fault.ALTERED_LOG, block=7)            # from now on
        faulty.lie(Fault.TOO_MANY_REQUESTS, times=2, value=1)
        faulty.lie(Fault.NULL, method="eth_getBlockReceipts")
        Pool(pool_of(faulty.url, other.url))
        faulty.honest()

It passes requests on to ``upstream``, an address or a mapping of methods to answers (or to functions of the
parameters), and changes the answers. ``Fault`` names all faults; ``Lie`` is one that is switched on. Some
change an answer, others break the connection or the HTTP around it. It listens on loopback, in threads of the
test's own process.
"""

from __future__ import annotations

import copy
import random
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from threading import Lock
from typing import Any, Self

import orjson

from tracelake.evm.rpc.config import parse_address
from tracelake.evm.rpc.errors import RpcProblem
from tracelake.evm.rpc.exchange import HttpConnection

_NAMES_BLOCK = ("eth_getBlockByNumber", "eth_getBlockReceipts", "trace_block")
_RECEIPTS = "eth_getBlockReceipts"
_RECEIPT = "eth_getTransactionReceipt"
_BLOCKS = ("eth_getBlockByNumber", "eth_getBlockByHash")
_LOGS = "eth_getLogs"
_MADE_UP = "0x" + "ab" * 32
Canned = Mapping[str, Any | Callable[[list[Any]], Any]]
Item = dict[str, Any]
_UPSTREAM_SECONDS = 30.0


class Fault(StrEnum):
    # The request as a whole.
    TOO_MANY_REQUESTS = "too_many_requests"
    """429; ``value`` is the Retry-After, if there is to be one."""
    SERVER_ERROR = "server_error"
    UNAVAILABLE = "unavailable"
    FORBIDDEN = "forbidden"
    HANG = "hang"
    """No answer, until the connection ends."""
    CLOSE = "close"
    CUT = "cut"
    """The connection ends in the middle of the body."""
    TRUNCATED = "truncated"
    """A whole answer as far as HTTP goes, but half of the JSON."""
    HTML = "html"
    # A batch.
    BATCH_REFUSED = "batch_refused"
    MAX_BATCH = "max_batch"
    """At most ``value`` calls at once."""
    SHUFFLED = "shuffled"
    MISSING_ITEM = "missing_item"
    DOUBLED_ITEM = "doubled_item"
    WRONG_ID = "wrong_id"
    # One call.
    NULL = "null"
    EMPTY = "empty"
    ITEM_ERROR = "item_error"
    """``value`` is the error, by default -32603."""
    NO_METHOD = "no_method"
    RANGE_LIMIT = "range_limit"
    """eth_getLogs over at most ``value`` blocks."""
    # Wrong answers about the chain.
    OTHER_CHAIN = "other_chain"
    """``value`` is the chain id."""
    LAG = "lag"
    """The newest ``value`` blocks aren't there yet."""
    AHEAD = "ahead"
    """The reported head is ``value`` blocks beyond the real one."""
    # Wrong answers about a block.
    OTHER_RECEIPTS = "other_receipts"
    """The receipts of the block before."""
    MISSING_LOG = "missing_log"
    DOUBLED_LOG = "doubled_log"
    ALTERED_LOG = "altered_log"
    """One byte of one log's data, which no bloom filter notices."""
    WRONG_BLOOM = "wrong_bloom"
    WRONG_RECEIPTS_ROOT = "wrong_receipts_root"
    WRONG_PARENT = "wrong_parent"
    FORGED = "forged"
    """``value`` is the block and its receipts, whole."""
    WRONG_SIZE = "wrong_size"
    """A value that no hash covers."""
    NO_SIZE = "no_size"
    OTHER_TYPE = "other_type"
    """The first transaction is of type ``value``."""
    FIELD_GONE = "field_gone"
    """The header lacks the field ``value``."""


WHOLE_REQUEST = frozenset(list(Fault)[: list(Fault).index(Fault.BATCH_REFUSED)])
ABOUT_CHAIN = frozenset({Fault.OTHER_CHAIN, Fault.LAG, Fault.AHEAD})
_REARRANGED = (Fault.SHUFFLED, Fault.MISSING_ITEM, Fault.DOUBLED_ITEM, Fault.WRONG_ID)


@dataclass(slots=True)
class Lie:
    """A fault that is switched on. ``applied`` counts the answers that it changed, at most ``times``."""

    fault: Fault
    block: int | None = None
    method: str | None = None
    times: int | None = None
    value: Any = None
    applied: int = 0
    _lock: Lock = field(default_factory=Lock)

    def concerns(self, method: str, params: list[Any]) -> bool:
        if self.method is not None and self.method != method:
            return False
        if self.block is None:
            return True
        if method == _LOGS:
            return int(params[0]["fromBlock"], 16) <= self.block <= int(params[0]["toBlock"], 16)
        if method in (_RECEIPT, "eth_getBlockByHash"):
            return True
        return method in _NAMES_BLOCK and bool(params) and params[0] == hex(self.block)

    def apply(self) -> bool:
        """Count another use; False if there were as many as there may be."""
        with self._lock:
            if self.times is not None and self.applied >= self.times:
                return False
            self.applied += 1
            return True


def changed(lie: Lie, method: str, params: list[Any], result: Any) -> tuple[bool, Any]:
    """Whether the lie changes this result, and into what. Changes ``result`` itself."""
    if not isinstance(result, dict | list):
        return False, result
    if lie.block is not None and method in (_RECEIPT, "eth_getBlockByHash"):
        place = result.get("blockNumber") or result.get("number") if isinstance(result, dict) else None
        if place != hex(lie.block):
            return False, result
    if lie.fault is Fault.FORGED and method in (_BLOCKS[0], _RECEIPTS):
        return True, lie.value[method == _RECEIPTS]
    if lie.fault in (Fault.MISSING_LOG, Fault.DOUBLED_LOG, Fault.ALTERED_LOG):
        return any(_change_logs(lie.fault, logs) for logs in _logs_of(method, result)), result
    if lie.fault in (Fault.OTHER_TYPE, Fault.FIELD_GONE):
        return method in _BLOCKS and isinstance(result, dict) and _change_block(lie, result), result
    if (
        method in _BLOCKS
        and isinstance(result, dict)
        and (lied := _about_header(lie.fault, result)) is not None
    ):
        return True, {**result, **lied}
    return False, result


def _change_block(lie: Lie, block: dict[str, Any]) -> bool:
    if lie.fault is Fault.FIELD_GONE:
        return block.pop(lie.value, None) is not None
    whole = [tx for tx in block["transactions"] if isinstance(tx, dict)]
    if whole:
        whole[0]["type"] = lie.value
    return bool(whole)


def _about_header(fault: Fault, block: dict[str, Any]) -> dict[str, str | None] | None:
    match fault:
        case Fault.WRONG_BLOOM:
            return {"logsBloom": "0x" + "00" * 255 + _other(block["logsBloom"][-2:])}
        case Fault.WRONG_RECEIPTS_ROOT:
            return {"receiptsRoot": _MADE_UP}
        case Fault.WRONG_PARENT:
            return {"parentHash": _MADE_UP}
        case Fault.WRONG_SIZE:
            return {"size": hex(int(block["size"], 16) + 1)}
        case Fault.NO_SIZE:
            return {"size": None}
        case _:
            return None


def _logs_of(method: str, result: Any) -> list[list[dict[str, Any]]]:
    if method == _LOGS:
        return [result]
    if method == _RECEIPTS:
        return [receipt["logs"] for receipt in result]
    return [result["logs"]] if method == _RECEIPT else []


def _change_logs(fault: Fault, logs: list[dict[str, Any]]) -> bool:
    """The first log that lends itself to it."""
    for index, log in enumerate(logs):
        if fault is Fault.MISSING_LOG:
            del logs[index]
            return True
        if fault is Fault.DOUBLED_LOG:
            logs.insert(index, dict(log))
            return True
        if len(log["data"]) >= 4:
            log["data"] = log["data"][:-2] + _other(log["data"][-2:])
            return True
    return False


def _other(byte: str) -> str:
    return f"{int(byte, 16) ^ 1:02x}"


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
        except (OSError, RpcProblem):
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


__all__ = ["Fault", "FaultyRpc", "Lie"]


_STATUS = {
    Fault.TOO_MANY_REQUESTS: 429,
    Fault.SERVER_ERROR: 500,
    Fault.UNAVAILABLE: 503,
    Fault.FORBIDDEN: 403,
}


class FaultyRpc:
    def __init__(self, upstream: str | Canned) -> None:
        self._upstream = upstream
        self._lies: list[Lie] = []
        self._lock = threading.Lock()
        self._random = random.Random(0)
        self._server = FaultyServer(self._connect, self._answer)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="faulty-rpc")
        self.asked: list[Item] = []
        """Every call so far, as it was asked."""
        self.requests = 0

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    @property
    def name(self) -> str:
        """What a pool calls it, unless it is given another name."""
        return self.url.removeprefix("http://")

    def lie(
        self,
        fault: Fault | str,
        *,
        block: int | None = None,
        method: str | None = None,
        times: int | None = None,
        value: Any = None,
    ) -> Lie:
        """Switch a fault on, for one block or method or for all, ``times`` times or for good."""
        lie = Lie(Fault(fault), block, method, times, value)
        with self._lock:
            self._lies.append(lie)
        return lie

    def honest(self) -> None:
        """Switch all faults off."""
        with self._lock:
            self._lies.clear()

    def calls(self, method: str) -> int:
        with self._lock:
            return sum(item.get("method") == method for item in self.asked)

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _answer(self, body: bytes, upstream: HttpConnection | None) -> FaultyAnswer:
        """The answer to a request."""
        tree = orjson.loads(body)
        items: list[Item] = tree if isinstance(tree, list) else [tree]
        with self._lock:
            self.requests += 1
            self.asked += items
            lies = list(self._lies)
        for lie in lies:
            if lie.fault in WHOLE_REQUEST and _about(lie, items) and lie.apply():
                if lie.fault in _STATUS:
                    wait = {} if lie.value is None else {"Retry-After": str(lie.value)}
                    return FaultyAnswer(b"sorry", status=_STATUS[lie.fault], headers=wait)
                if lie.fault is Fault.HTML:
                    return FaultyAnswer(b"<html>Bad Gateway</html>", kind="text/html")
                return FaultyAnswer(self._answers(tree, items, lies, upstream), how=lie.fault)
        return FaultyAnswer(self._answers(tree, items, lies, upstream))

    def _answers(
        self, tree: Any, items: list[Item], lies: list[Lie], upstream: HttpConnection | None
    ) -> bytes:
        batch = isinstance(tree, list)
        if batch and (refusal := _refusal(lies, len(items))) is not None:
            return orjson.dumps(refusal)
        answers = [self._item(item, lies, upstream) for item in items]
        for lie in lies:
            if batch and len(answers) > 1 and lie.fault in _REARRANGED and _about(lie, items) and lie.apply():
                self._rearrange(lie.fault, answers)
            elif not batch and lie.fault is Fault.WRONG_ID and _about(lie, items) and lie.apply():
                answers[0]["id"] = 987_654_321
        return orjson.dumps(answers if batch else answers[0])

    def _rearrange(self, fault: Fault, answers: list[Item]) -> None:
        if fault is Fault.SHUFFLED:
            self._random.shuffle(answers)
        elif fault is Fault.MISSING_ITEM:
            del answers[len(answers) // 2]
        elif fault is Fault.DOUBLED_ITEM:
            answers.append({**answers[0], "result": None})
        else:
            answers[-1]["id"] = 987_654_321

    def _item(self, item: Item, lies: list[Lie], upstream: HttpConnection | None) -> Item:
        method, params = item["method"], item.get("params") or []
        about = [lie for lie in lies if lie.concerns(method, params)]
        head = {"jsonrpc": "2.0", "id": item.get("id")}
        for lie in about:
            match lie.fault:
                case Fault.NULL if lie.apply():
                    return {**head, "result": None}
                case Fault.EMPTY if lie.apply():
                    return {**head, "result": []}
                case Fault.ITEM_ERROR if lie.apply():
                    return {**head, "error": lie.value or {"code": -32603, "message": "internal error"}}
                case Fault.NO_METHOD if lie.apply():
                    return {
                        **head,
                        "error": {"code": -32601, "message": f"the method {method} does not exist"},
                    }
                case Fault.RANGE_LIMIT if (
                    method == "eth_getLogs" and _span(params) > lie.value and lie.apply()
                ):
                    text = f"block range is too wide, maximum is {lie.value}"
                    return {**head, "error": {"code": -32602, "message": text}}
                case Fault.OTHER_RECEIPTS if method == "eth_getBlockReceipts" and lie.apply():
                    before = [hex(max(0, int(params[0], 16) - 1))]
                    return {**head, "result": self._ask(method, before, upstream)["result"]}
                case _:
                    continue
        answer = {**self._ask(method, params, upstream), **head}
        for lie in about:
            if "result" in answer:
                answer["result"] = self._bent(lie, method, params, answer["result"], upstream)
        return answer

    def _bent(
        self, lie: Lie, method: str, params: list[Any], result: Any, upstream: HttpConnection | None
    ) -> Any:
        if lie.fault in ABOUT_CHAIN:
            return self._other_view(lie, method, params, result, upstream)
        would, other = changed(lie, method, params, copy.deepcopy(result))
        return other if would and lie.apply() else result

    def _other_view(
        self, lie: Lie, method: str, params: list[Any], result: Any, upstream: HttpConnection | None
    ) -> Any:
        if lie.fault is Fault.OTHER_CHAIN:
            return hex(lie.value) if method == "eth_chainId" and lie.apply() else result
        by = -lie.value if lie.fault is Fault.LAG else lie.value
        if method == "eth_blockNumber" and lie.apply():
            return hex(int(result, 16) + by)
        if method not in ("eth_getBlockByNumber", "eth_getBlockReceipts", "trace_block") or result is None:
            return result
        head = int(self._ask("eth_blockNumber", [], upstream)["result"], 16) + by
        if params[0] == "latest" and lie.apply():
            if lie.fault is Fault.AHEAD:
                return {**result, "number": hex(head)}
            return self._ask(method, [hex(max(0, head)), *params[1:]], upstream)["result"]
        beyond = params[0].startswith("0x") and int(params[0], 16) > head
        return None if beyond and lie.apply() else result

    def _ask(self, method: str, params: list[Any], upstream: HttpConnection | None) -> Item:
        if not isinstance(self._upstream, str):
            if method not in self._upstream:
                return {"error": {"code": -32601, "message": f"the method {method} does not exist"}}
            canned = self._upstream[method]
            return {"result": canned(params) if callable(canned) else canned}
        assert upstream is not None
        body = orjson.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        answer: Item = orjson.loads(upstream.post(body, time.monotonic() + _UPSTREAM_SECONDS).body)
        return answer

    def _connect(self) -> HttpConnection | None:
        if isinstance(self._upstream, str):
            return HttpConnection(parse_address(self._upstream), {}, None)
        return None


def _about(lie: Lie, items: list[Item]) -> bool:
    return any(lie.concerns(item["method"], item.get("params") or []) for item in items)


def _refusal(lies: list[Lie], calls: int) -> Item | None:
    for lie in lies:
        if lie.fault is Fault.BATCH_REFUSED and lie.apply():
            return {
                "jsonrpc": "2.0",
                "id": None,
                "error": {"code": -32600, "message": "batch requests are disabled"},
            }
        if lie.fault is Fault.MAX_BATCH and calls > lie.value and lie.apply():
            text = f"batch limit {lie.value} exceeded"
            return {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": text}}
    return None


def _span(params: list[Any]) -> int:
    wanted = params[0]
    return int(wanted["toBlock"], 16) - int(wanted["fromBlock"], 16) + 1
