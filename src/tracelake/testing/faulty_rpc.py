"""A JSON-RPC endpoint that misbehaves on demand, in front of one that doesn't.

    with FaultyRpc(node.url) as faulty:
        faulty.lie(Fault.ALTERED_LOG, block=7)            # from now on
        faulty.lie(Fault.TOO_MANY_REQUESTS, times=2, value=1)
        faulty.lie(Fault.NULL, method="eth_getBlockReceipts")
        Pool(pool_of(faulty.url, other.url))
        faulty.honest()

It passes everything on to ``upstream``, an address or a mapping of methods to answers (or to functions of the
parameters), and changes what comes back. It listens on loopback, in threads of the test's own process.
"""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import orjson

from tracelake.evm.rpc.address import parse_address
from tracelake.evm.rpc.http_connection import HttpConnection
from tracelake.testing.faulty_http import FaultyAnswer, FaultyServer
from tracelake.testing.rpc_faults import ABOUT_CHAIN, WHOLE_REQUEST, Fault, Lie, changed

__all__ = ["Fault", "FaultyRpc", "Lie"]

Canned = Mapping[str, Any | Callable[[list[Any]], Any]]
Item = dict[str, Any]

_UPSTREAM_SECONDS = 30.0
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
        """From now on, about one block or method or all of them, so many times or for good."""
        lie = Lie(Fault(fault), block, method, times, value)
        with self._lock:
            self._lies.append(lie)
        return lie

    def honest(self) -> None:
        """Not a lie from now on."""
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
        """What to send for a request."""
        tree = orjson.loads(body)
        items: list[Item] = tree if isinstance(tree, list) else [tree]
        with self._lock:
            self.requests += 1
            self.asked += items
            lies = list(self._lies)
        for lie in lies:
            if lie.fault in WHOLE_REQUEST and _about(lie, items) and lie.tell():
                if lie.fault in _STATUS:
                    wait = {} if lie.value is None else {"Retry-After": str(lie.value)}
                    return FaultyAnswer(b"sorry", status=_STATUS[lie.fault], headers=wait)
                if lie.fault is Fault.HTML:
                    return FaultyAnswer(b"<html>Bad Gateway</html>", kind="text/html")
                return FaultyAnswer(self._said(tree, items, lies, upstream), how=lie.fault)
        return FaultyAnswer(self._said(tree, items, lies, upstream))

    def _said(self, tree: Any, items: list[Item], lies: list[Lie], upstream: HttpConnection | None) -> bytes:
        batch = isinstance(tree, list)
        if batch and (refusal := _refusal(lies, len(items))) is not None:
            return orjson.dumps(refusal)
        answers = [self._item(item, lies, upstream) for item in items]
        for lie in lies:
            if batch and len(answers) > 1 and lie.fault in _REARRANGED and _about(lie, items) and lie.tell():
                self._rearrange(lie.fault, answers)
            elif not batch and lie.fault is Fault.WRONG_ID and _about(lie, items) and lie.tell():
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
                case Fault.NULL if lie.tell():
                    return {**head, "result": None}
                case Fault.EMPTY if lie.tell():
                    return {**head, "result": []}
                case Fault.ITEM_ERROR if lie.tell():
                    return {**head, "error": lie.value or {"code": -32603, "message": "internal error"}}
                case Fault.NO_METHOD if lie.tell():
                    return {
                        **head,
                        "error": {"code": -32601, "message": f"the method {method} does not exist"},
                    }
                case Fault.RANGE_LIMIT if (
                    method == "eth_getLogs" and _span(params) > lie.value and lie.tell()
                ):
                    text = f"block range is too wide, maximum is {lie.value}"
                    return {**head, "error": {"code": -32602, "message": text}}
                case Fault.OTHER_RECEIPTS if method == "eth_getBlockReceipts" and lie.tell():
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
        return other if would and lie.tell() else result

    def _other_view(
        self, lie: Lie, method: str, params: list[Any], result: Any, upstream: HttpConnection | None
    ) -> Any:
        if lie.fault is Fault.OTHER_CHAIN:
            return hex(lie.value) if method == "eth_chainId" and lie.tell() else result
        by = -lie.value if lie.fault is Fault.LAG else lie.value
        if method == "eth_blockNumber" and lie.tell():
            return hex(int(result, 16) + by)
        if method not in ("eth_getBlockByNumber", "eth_getBlockReceipts", "trace_block") or result is None:
            return result
        head = int(self._ask("eth_blockNumber", [], upstream)["result"], 16) + by
        if params[0] == "latest" and lie.tell():
            if lie.fault is Fault.AHEAD:
                return {**result, "number": hex(head)}
            return self._ask(method, [hex(max(0, head)), *params[1:]], upstream)["result"]
        beyond = params[0].startswith("0x") and int(params[0], 16) > head
        return None if beyond and lie.tell() else result

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


_REARRANGED = (Fault.SHUFFLED, Fault.MISSING_ITEM, Fault.DOUBLED_ITEM, Fault.WRONG_ID)


def _about(lie: Lie, items: list[Item]) -> bool:
    return any(lie.concerns(item["method"], item.get("params") or []) for item in items)


def _refusal(lies: list[Lie], calls: int) -> Item | None:
    for lie in lies:
        if lie.fault is Fault.BATCH_REFUSED and lie.tell():
            return {
                "jsonrpc": "2.0",
                "id": None,
                "error": {"code": -32600, "message": "batch requests are disabled"},
            }
        if lie.fault is Fault.MAX_BATCH and calls > lie.value and lie.tell():
            text = f"batch limit {lie.value} exceeded"
            return {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": text}}
    return None


def _span(params: list[Any]) -> int:
    wanted = params[0]
    return int(wanted["toBlock"], 16) - int(wanted["fromBlock"], 16) + 1
