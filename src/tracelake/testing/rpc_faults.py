"""What can be wrong with an endpoint, as switches for ``tracelake.testing.faulty_rpc``.

``Fault`` names them all; ``Lie`` is one that is switched on. Here stand those that change an answer; those that
break the connection or the HTTP around it are the server's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from threading import Lock
from typing import Any


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
    """``value`` is the error, if it is to be another than -32603."""
    NO_METHOD = "no_method"
    RANGE_LIMIT = "range_limit"
    """eth_getLogs over at most ``value`` blocks."""
    # What is said about the chain.
    OTHER_CHAIN = "other_chain"
    """``value`` is the chain id."""
    LAG = "lag"
    """The newest ``value`` blocks aren't there yet."""
    AHEAD = "ahead"
    """The head is said to be ``value`` blocks further than it is."""
    # What is said about a block.
    OTHER_RECEIPTS = "other_receipts"
    """Those of the block before."""
    MISSING_LOG = "missing_log"
    DOUBLED_LOG = "doubled_log"
    ALTERED_LOG = "altered_log"
    """One byte of one log's data, which no bloom filter notices."""
    WRONG_BLOOM = "wrong_bloom"
    WRONG_RECEIPTS_ROOT = "wrong_receipts_root"
    WRONG_PARENT = "wrong_parent"


WHOLE_REQUEST = frozenset(list(Fault)[: list(Fault).index(Fault.BATCH_REFUSED)])
ABOUT_CHAIN = frozenset({Fault.OTHER_CHAIN, Fault.LAG, Fault.AHEAD})
_NAMES_BLOCK = ("eth_getBlockByNumber", "eth_getBlockReceipts", "trace_block")
_RECEIPTS = "eth_getBlockReceipts"
_RECEIPT = "eth_getTransactionReceipt"
_BLOCKS = ("eth_getBlockByNumber", "eth_getBlockByHash")
_LOGS = "eth_getLogs"
_MADE_UP = "0x" + "ab" * 32


@dataclass(slots=True)
class Lie:
    """``told`` counts how often it was; with ``times`` it isn't told more often."""

    fault: Fault
    block: int | None = None
    method: str | None = None
    times: int | None = None
    value: Any = None
    told: int = 0
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

    def tell(self) -> bool:
        """Whether it is to be told once more; counts."""
        with self._lock:
            if self.times is not None and self.told >= self.times:
                return False
            self.told += 1
            return True


def changed(lie: Lie, method: str, params: list[Any], result: Any) -> tuple[bool, Any]:
    """Whether the lie changes this result, and into what. Changes ``result`` itself."""
    if not isinstance(result, dict | list):
        return False, result
    if lie.block is not None and method in (_RECEIPT, "eth_getBlockByHash"):
        place = result.get("blockNumber") or result.get("number") if isinstance(result, dict) else None
        if place != hex(lie.block):
            return False, result
    if lie.fault in (Fault.MISSING_LOG, Fault.DOUBLED_LOG, Fault.ALTERED_LOG):
        return any(_change_logs(lie.fault, logs) for logs in _logs_of(method, result)), result
    if (
        method in _BLOCKS
        and isinstance(result, dict)
        and (lied := _about_header(lie.fault, result)) is not None
    ):
        return True, {**result, **lied}
    return False, result


def _about_header(fault: Fault, block: dict[str, Any]) -> dict[str, str] | None:
    match fault:
        case Fault.WRONG_BLOOM:
            return {"logsBloom": "0x" + "00" * 255 + _other(block["logsBloom"][-2:])}
        case Fault.WRONG_RECEIPTS_ROOT:
            return {"receiptsRoot": _MADE_UP}
        case Fault.WRONG_PARENT:
            return {"parentHash": _MADE_UP}
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
