"""Call traces of a block in the shape of ``trace_block``, made from its transactions and receipts.

There is no EVM behind them: every transaction has its outer call or creation, a call that made logs has a
delegate call inside, and a failed one was reverted.
"""

from __future__ import annotations

from typing import Any

_STIPEND = 21_000


def traces_of(block: dict[str, Any], receipts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    for transaction, receipt in zip(block["transactions"], receipts, strict=True):
        place = {
            "blockHash": block["hash"],
            "blockNumber": int(block["number"], 16),
            "transactionHash": transaction["hash"],
            "transactionPosition": int(transaction["transactionIndex"], 16),
        }
        inner = [_inner(transaction, receipt)] if receipt["logs"] and transaction["to"] is not None else []
        outer = _outer(transaction, receipt, len(inner))
        traces += [each | place for each in (outer, *inner)]
    if int(block["difficulty"], 16):
        traces.append(_reward(block))
    return traces


def _outer(transaction: dict[str, Any], receipt: dict[str, Any], subtraces: int) -> dict[str, Any]:
    trace: dict[str, Any] = {"subtraces": subtraces, "traceAddress": []}
    shared = {
        "from": transaction["from"],
        "gas": hex(int(transaction["gas"], 16) - _STIPEND),
        "value": transaction["value"],
    }
    used = hex(int(receipt["gasUsed"], 16) - _STIPEND)
    if transaction["to"] is None:
        trace |= {
            "type": "create",
            "action": shared | {"init": transaction["input"], "creationMethod": "create"},
        }
        result = {"address": receipt["contractAddress"], "code": "0x", "gasUsed": used}
    else:
        action = shared | {"to": transaction["to"], "input": transaction["input"], "callType": "call"}
        trace |= {"type": "call", "action": action}
        result = {"gasUsed": used, "output": "0x"}
    if receipt.get("status") == "0x0":
        return trace | {"error": "Reverted", "result": None}
    return trace | {"result": result}


def _inner(transaction: dict[str, Any], receipt: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "call",
        "action": {
            "from": transaction["to"],
            "to": receipt["logs"][0]["address"],
            "gas": hex(int(receipt["gasUsed"], 16) // 2),
            "value": "0x0",
            "input": transaction["input"],
            "callType": "delegatecall",
        },
        "result": {"gasUsed": hex(int(receipt["gasUsed"], 16) // 4), "output": "0x"},
        "subtraces": 0,
        "traceAddress": [0],
    }


def _reward(block: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "reward",
        "action": {"author": block["miner"], "rewardType": "block", "value": hex(5 * 10**18)},
        "result": None,
        "subtraces": 0,
        "traceAddress": [],
        "blockHash": block["hash"],
        "blockNumber": int(block["number"], 16),
        "transactionHash": None,
        "transactionPosition": None,
    }
