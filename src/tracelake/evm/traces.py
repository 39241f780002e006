"""Verification of traces: that they are those of the block's transactions, as far as the rest of the block shows.

No root covers traces, so what they say about inner calls is the endpoint's word. Everything that the block, its
transactions and their receipts determine is checked. Every trace names the block and its transaction. Every
transaction has its traces, in the order of the transactions: first the outer call or creation, with the sender,
recipient, value and data of the transaction, then the calls inside, as many as the traces above them count, each
before its own. The outer one failed if the receipt says so, and created the receipt's contract.

Gas is bounded rather than derived, since refunds don't show: clients report it before refunds, with or without
the gas that a transaction costs before its code runs. The bounds are those of Ethereum's transaction types up to
Osaka. Amsterdam splits gas in two (EIP-8037), and other chains add their own; there gas is the endpoint's word.

Traces have the shape of OpenEthereum's ``trace_block``. Rewards have no transaction and come last. Calls of
precompiled contracts may be left out, and aren't counted then. A result beside an error is what reverted calls
have in some clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracelake.evm.consensus import contract_address, type_of
from tracelake.evm.forks import Contradiction
from tracelake.evm.profiles.profile import ETHEREUM, ChainProfile
from tracelake.evm.raw_block import same_number, same_text, shown

_Json = dict[str, Any]
_ETHEREUM_TYPES = frozenset({"0x0", "0x1", "0x2", "0x3", "0x4"})
# Mined blocks of these chains pay their miner; on other chains it depends on the consensus engine.
_PAYS_MINERS = frozenset({1})
_BASE_GAS = 21_000
_FLOOR_PER_TOKEN = 10


def check_traces(
    block: _Json,
    receipts: Sequence[_Json] | None,
    traces: Sequence[_Json],
    chain_id: int | None,
    *,
    gas: bool,
    profile: ChainProfile = ETHEREUM,
) -> None:
    """Raises ``Contradiction``. ``receipts`` are those of the transactions, in their order; without them outcomes
    aren't checked. ``gas``: check the bounds of gas, too. What a transaction of the chain's own does isn't always
    traced, and has no form that is known here: of such a one, only the places of its traces are checked."""
    _check_block(block, traces)
    receipt_of = {receipt["transactionHash"].lower(): receipt for receipt in receipts or ()}
    outside = profile.places_outside_roots(block)
    gas = gas and block.get("blockAccessListHash") is None
    end = 0
    for place, tx in enumerate(block["transactions"]):
        chains_own = place in outside or type_of(tx) in profile.types or profile.is_system(tx)
        start, end = end, _end_of(traces, end, tx["hash"])
        if start == end:
            if chains_own:
                continue
            raise Contradiction(_missing(traces, start, place))
        own = traces[start:end]
        _check_places(own, start, place)
        _check_tree(own, place)
        if chains_own:
            continue
        _check_outer(own[0], tx, place)
        if (receipt := receipt_of.get(tx["hash"].lower())) is not None:
            _check_outcome(own[0], tx, receipt, place)
            if gas and type_of(tx) in _ETHEREUM_TYPES:
                _check_gas(own[0], tx, receipt, place, _refund_part(block))
    _check_rewards(block, traces[end:], end, chain_id)


def is_of_block(trace: _Json, block_hash: str) -> bool:
    """Whether a trace doesn't name another block."""
    given = trace.get("blockHash")
    return given is None or given == block_hash or (isinstance(given, str) and same_text(given, block_hash))


def _check_block(block: _Json, traces: Sequence[_Json]) -> None:
    block_hash, number = block["hash"], int(block["number"], 16)
    for index, trace in enumerate(traces):
        if trace["blockHash"] != block_hash and not same_text(trace["blockHash"], block_hash):
            raise Contradiction(f"trace {index} is of block {trace['blockHash']}, not {block_hash}")
        # A JSON number here, in contrast to all other parts of a block.
        if trace["blockNumber"] != number:
            raise Contradiction(f"trace {index} is of block number {shown(trace['blockNumber'])}")


def _end_of(traces: Sequence[_Json], start: int, tx_hash: str) -> int:
    end = start
    while end < len(traces) and (own := traces[end].get("transactionHash")) is not None:
        if own != tx_hash and not same_text(own, tx_hash):
            break
        end += 1
    return end


def _missing(traces: Sequence[_Json], index: int, place: int) -> str:
    if index == len(traces) or (other := traces[index].get("transactionHash")) is None:
        return f"transaction {place} has no traces"
    return f"trace {index} is of transaction {other}, and traces of transaction {place} were due"


def _check_places(own: Sequence[_Json], start: int, place: int) -> None:
    for index, trace in enumerate(own, start):
        if trace["transactionPosition"] != place:
            position = shown(trace["transactionPosition"])
            raise Contradiction(f"trace {index} is of transaction {place}, and has the position {position}")
        if trace["type"] == "reward":
            raise Contradiction(f"trace {index} is a reward, and has a transaction")


def _check_tree(own: Sequence[_Json], place: int) -> None:
    """Each trace comes right after the one above it and all that is inside of those before it."""
    # From the outer trace down to the last one: the number of calls inside that are complete, and of all inside.
    path: list[tuple[int, int]] = []
    for index, trace in enumerate(own):
        if index and not path:
            raise Contradiction(f"transaction {place} has more traces than it counts: one is double")
        address = trace["traceAddress"]
        if address != (expected := [complete for complete, _ in path]):
            raise Contradiction(
                f"transaction {place} has the trace {shown(address)} where {expected} is due: "
                "one is missing, double or out of order"
            )
        path.append((0, trace["subtraces"]))
        while path and path[-1][0] == path[-1][1]:
            path.pop()
            if path:
                complete, count = path[-1]
                path[-1] = complete + 1, count
    if path:
        raise Contradiction(f"transaction {place} lacks some of the traces that it counts")


def _check_outer(outer: _Json, tx: _Json, place: int) -> None:
    """The outer call or creation is the transaction itself."""
    action, to = outer["action"], tx.get("to")
    kind, data = ("create", "init") if to is None else ("call", "input")
    if outer["type"] != kind:
        raise Contradiction(f"transaction {place} is a {kind}, and its trace a {shown(outer['type'])}")
    if action.get("callType", "call") != "call":
        raise Contradiction(f"the trace of transaction {place} is a {shown(action['callType'])}")
    if not same_text(action["from"], tx["from"]):
        raise Contradiction(f"the trace of transaction {place} has another sender")
    if to is not None and not same_text(action["to"], to):
        raise Contradiction(f"the trace of transaction {place} has another recipient")
    if not same_number(action["value"], tx["value"]):
        raise Contradiction(f"the trace of transaction {place} has another value")
    if not same_text(action[data], tx["input"]):
        raise Contradiction(f"the trace of transaction {place} has other data")


def _check_outcome(outer: _Json, tx: _Json, receipt: _Json, place: int) -> None:
    error, result = outer.get("error"), outer.get("result")
    status = receipt.get("status")
    # Receipts from before Byzantium don't have the status.
    if status is not None and same_number(status, "0x1") is bool(error):
        outcome = "failed" if error else "succeeded"
        raise Contradiction(
            f"receipt {place} has the status {status}, and the transaction {outcome} in its traces"
        )
    if not error and not isinstance(result, dict):
        raise Contradiction(f"the trace of transaction {place} has neither a result nor an error")
    made = (result or {}).get("address")
    if tx.get("to") is not None:
        if made is not None:
            raise Contradiction(f"transaction {place} has a recipient, and creates a contract in its traces")
        return
    # A creation that failed may have the address that the contract would have got.
    if error and made is None:
        return
    # Clients leave it out of receipts of creations that failed.
    expected = receipt.get("contractAddress") or contract_address(tx["from"], tx["nonce"])
    if made is None or not same_text(made, expected):
        raise Contradiction(
            f"transaction {place} creates the contract {shown(made)} in its traces, and {expected} by its receipt"
        )


def _refund_part(block: _Json) -> int:
    """At most this part of the used gas is refunded: a fifth since London, which brought base fees."""
    return 2 if block.get("baseFeePerGas") is None else 5


def _check_gas(outer: _Json, tx: _Json, receipt: _Json, place: int, refund_part: int) -> None:
    limit, charged = int(tx["gas"], 16), int(receipt["gasUsed"], 16)
    given = int(outer["action"]["gas"], 16)
    before = limit - given
    # Some clients give the outer call all the gas of the transaction.
    if before and not _BASE_GAS <= before <= _most_before(tx):
        raise Contradiction(
            f"the trace of transaction {place} begins with {given} gas, and the transaction has {limit}"
        )
    if (result := outer.get("result")) is None:
        return
    used = int(result["gasUsed"], 16)
    most = before + used
    least = most - most // refund_part
    if used > given or least > charged:
        raise Contradiction(
            f"transaction {place} used {used} gas in its traces, more than its receipt's {charged} allow"
        )
    if used + (before or _most_before(tx)) < charged and charged > _floor(tx):
        raise Contradiction(
            f"transaction {place} used {used} gas in its traces, less than its receipt's {charged} demand"
        )


def _most_before(tx: _Json) -> int:
    """The most gas that a transaction may cost before its code runs, in any fork."""
    size = len(tx["input"]) // 2
    listed = tx.get("accessList") or ()
    keys = sum(len(each["storageKeys"]) for each in listed)
    return (
        _BASE_GAS
        + 68 * size
        + (0 if tx.get("to") is not None else 32_000 + 2 * (size // 32 + 1))
        + 2_400 * len(listed)
        + 1_900 * keys
        + 25_000 * len(tx.get("authorizationList") or ())
    )


def _floor(tx: _Json) -> int:
    """What a transaction with much data costs at least (EIP-7623)."""
    data = bytes.fromhex(tx["input"][2:])
    zeros = data.count(0)
    return _BASE_GAS + _FLOOR_PER_TOKEN * (zeros + 4 * (len(data) - zeros))


def _check_rewards(block: _Json, rewards: Sequence[_Json], start: int, chain_id: int | None) -> None:
    kinds: list[Any] = []
    for index, trace in enumerate(rewards, start):
        if trace.get("transactionHash") is not None or trace["type"] != "reward":
            raise Contradiction(
                f"trace {index} is of transaction {trace.get('transactionHash')}, "
                "which isn't in the block or has its traces already"
            )
        if trace.get("transactionPosition") is not None or trace["traceAddress"] or trace["subtraces"]:
            raise Contradiction(f"trace {index} is a reward, and has a place in a transaction")
        kinds.append(kind := trace["action"]["rewardType"])
        own = kind != "block" or same_text(trace["action"]["author"], block["miner"])
        if chain_id in _PAYS_MINERS and not own:
            raise Contradiction(f"trace {index} is the reward of another miner")
    mined, uncles = kinds.count("block"), len(block.get("uncles") or ())
    due = 1 if mined else 0
    # Nobody mined the genesis block; whether a client has a reward for it is its own choice.
    if chain_id in _PAYS_MINERS and int(block["number"], 16):
        # Since the merge validators propose blocks, without difficulty, and are paid elsewhere.
        due = 1 if int(block["difficulty"], 16) else 0
        if not due and kinds:
            raise Contradiction(f"there are {len(kinds)} rewards, and the block wasn't mined")
    if mined != due:
        raise Contradiction(f"there are {mined} rewards for the block")
    if kinds.count("uncle") != due * uncles:
        raise Contradiction(f"there are rewards for {kinds.count('uncle')} uncles, of {uncles}")
