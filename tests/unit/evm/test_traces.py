"""Traces are tied to their block, its transactions and its receipts: honest ones of every client are accepted, and
each lie is refused, alone and together with any other."""

import contextlib
import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import evm_encoding
from tests.support.evm_blocks import CHAIN_ID, made_block, seal
from tracelake.evm.forks import Contradiction
from tracelake.evm.raw_block import (
    BlockMalformed,
    BlockMismatch,
    ChainTable,
    RawBlock,
    Verify,
    need_receipts,
)
from tracelake.evm.traces import check_traces
from tracelake.evm.verify import check_block

Json = dict[str, Any]
CALL, CREATION, FAILURE = 0, 1, 2
BEFORE = 21_000
MINER = "0x" + "ab" * 20


def made() -> RawBlock:
    """Five transactions: a call with calls inside, a creation, a failure, and two plain ones."""
    raw = made_block(random.Random(5), 41, transactions=5, logs=1, kinds=("0x2",))
    creation = raw.block["transactions"][CREATION]
    creation["to"] = (raw.receipts or [])[CREATION]["to"] = None
    for place, (tx, receipt) in enumerate(zip(raw.block["transactions"], raw.receipts or [], strict=True)):
        if place != CREATION:
            tx["to"] = receipt["to"] = tx["to"] or MINER
        tx["gas"], receipt["gasUsed"] = hex(900_000), hex(100_000 + place)
        receipt["status"] = hex(place != FAILURE)
        receipt["contractAddress"] = None
    (raw.receipts or [])[CREATION]["contractAddress"] = created(creation)
    seal(raw)
    return RawBlock(raw.number, raw.block, raw.receipts, traces_of(raw), "made")


def created(tx: Json) -> str:
    return evm_encoding.created_address(tx["from"], tx["nonce"])


def traces_of(raw: RawBlock) -> list[Json]:
    found: list[Json] = []
    for place, (tx, receipt) in enumerate(zip(raw.block["transactions"], raw.receipts or [], strict=True)):
        found += [
            trace | of_block(raw) | {"transactionHash": tx["hash"], "transactionPosition": place}
            for trace in (outer(tx, receipt), *(INSIDE if place == CALL else ()))
        ]
        if place == CALL:
            found[-len(INSIDE) - 1]["subtraces"] = 3
    return found


def of_block(raw: RawBlock) -> Json:
    return {"blockHash": raw.block["hash"], "blockNumber": raw.number}


def outer(tx: Json, receipt: Json) -> Json:
    action: Json = {"from": tx["from"], "value": tx["value"], "gas": hex(int(tx["gas"], 16) - BEFORE)}
    result: Json = {"gasUsed": hex(int(receipt["gasUsed"], 16) - BEFORE)}
    if tx["to"] is None:
        action |= {"init": tx["input"]}
        result |= {"address": receipt["contractAddress"], "code": "0x00"}
    else:
        action |= {"to": tx["to"], "input": tx["input"], "callType": "call"}
        result |= {"output": "0x"}
    trace: Json = {"action": action, "subtraces": 0, "traceAddress": []}
    trace["type"] = "create" if tx["to"] is None else "call"
    return trace | ({"result": result} if receipt["status"] == "0x1" else {"error": "Reverted"})


def inner(kind: str, address: list[int], subtraces: int = 0, **fields: Any) -> Json:
    action = {"from": MINER, "to": MINER, "gas": "0x10", "input": "0x", "value": "0x0", "callType": "call"}
    return {
        "type": kind,
        "action": action | fields,
        "result": {"gasUsed": "0x1", "output": "0x"},
        "subtraces": subtraces,
        "traceAddress": address,
    }


INSIDE = (
    inner("call", [0], 2),
    inner("create", [0, 0], result={"address": MINER, "code": "0x", "gasUsed": "0x1"}),
    inner("suicide", [0, 1]),
    inner("call", [1], callType="delegatecall"),
    inner("call", [2], 1),
    inner("call", [2, 0]),
)


def reward(raw: RawBlock, kind: str = "block", author: str | None = None) -> Json:
    return of_block(raw) | {
        "type": "reward",
        "action": {"author": author or raw.block["miner"], "rewardType": kind, "value": "0x1"},
        "result": None,
        "subtraces": 0,
        "traceAddress": [],
        "transactionHash": None,
        "transactionPosition": None,
    }


def traces(raw: RawBlock) -> list[Json]:
    assert raw.traces is not None
    return raw.traces


def root(raw: RawBlock, place: int) -> Json:
    return next(
        each for each in traces(raw) if each["transactionPosition"] == place and not each["traceAddress"]
    )


def at(raw: RawBlock, *address: int) -> Json:
    """A trace inside of the first transaction."""
    return next(each for each in traces(raw) if each["traceAddress"] == list(address))


def shift(raw: RawBlock) -> None:
    """The traces of the first transaction come after those of the second."""
    own = [each for each in traces(raw) if each["transactionPosition"] == CALL]
    traces(raw)[:] = [*traces(raw)[len(own) : len(own) + 1], *own, *traces(raw)[len(own) + 1 :]]


def exchange(raw: RawBlock) -> None:
    """The names of two transactions are exchanged in their traces."""
    one, two = root(raw, 3), root(raw, 4)
    for key in ("transactionHash", "transactionPosition"):
        one[key], two[key] = two[key], one[key]


LIES: dict[str, tuple[Callable[[RawBlock], object], str]] = {
    "none": (lambda raw: traces(raw).clear(), "transaction 0 has no traces"),
    "half": (
        lambda raw: traces(raw).__delitem__(slice(len(traces(raw)) // 2, None)),
        "transaction 0 lacks some",
    ),
    "the last missing": (lambda raw: traces(raw).pop(), "transaction 4 has no traces"),
    "the first missing": (lambda raw: traces(raw).pop(0), "trace \\[0\\] where \\[\\] is due"),
    "one inside missing": (lambda raw: traces(raw).remove(at(raw, 1)), "trace \\[2\\] where \\[1\\] is due"),
    "the last inside missing": (lambda raw: traces(raw).remove(at(raw, 2, 0)), "transaction 0 lacks some"),
    "one inside double": (
        lambda raw: traces(raw).insert(2, copy.deepcopy(at(raw, 0))),
        "trace \\[0\\] where \\[0, 0\\] is due",
    ),
    "an outer one double": (
        lambda raw: traces(raw).append(copy.deepcopy(root(raw, 4))),
        "transaction 4 has more traces than it counts",
    ),
    "all double": (
        lambda raw: traces(raw).extend(copy.deepcopy(traces(raw))),
        "which isn't in the block or has its traces already",
    ),
    "those inside out of order": (
        lambda raw: traces(raw).sort(
            key=lambda each: (each["transactionPosition"], len(each["traceAddress"]))
        ),
        "where \\[0, 0\\] is due",
    ),
    "transactions out of order": (shift, "traces of transaction 0 were due"),
    "backwards": (lambda raw: traces(raw).reverse(), "traces of transaction 0 were due"),
    "names of two transactions exchanged": (exchange, "traces of transaction 3 were due"),
    "of another block": (
        lambda raw: [each.update(blockHash="0x" + "11" * 32) for each in traces(raw)],
        "trace 0 is of block 0x1111",
    ),
    "one of another block": (
        lambda raw: traces(raw)[3].update(blockHash="0x" + "11" * 32),
        "trace 3 is of block 0x1111",
    ),
    "of another block number": (
        lambda raw: traces(raw)[3].update(blockNumber=7),
        "trace 3 is of block number 7",
    ),
    "of another transaction": (
        lambda raw: traces(raw)[3].update(transactionHash="0x" + "22" * 32),
        "transaction 0 lacks some",
    ),
    "of another position": (
        lambda raw: traces(raw)[3].update(transactionPosition=1),
        "trace 3 is of transaction 0, and has the position 1",
    ),
    "a failure that succeeded": (
        lambda raw: [
            root(raw, FAILURE).pop("error"),
            root(raw, FAILURE).update(result={"gasUsed": "0x134b2"}),
        ],
        "receipt 2 has the status 0x0, and the transaction succeeded",
    ),
    "a success that failed": (
        lambda raw: root(raw, 3).update(error="Reverted"),
        "receipt 3 has the status 0x1, and the transaction failed",
    ),
    "no result": (lambda raw: root(raw, 3).update(result=None), "neither a result nor an error"),
    "another contract": (
        lambda raw: root(raw, CREATION)["result"].update(address=MINER),
        "transaction 1 creates the contract '0xabab",
    ),
    "no contract": (
        lambda raw: root(raw, CREATION)["result"].update(address=None),
        "transaction 1 creates the contract None",
    ),
    "a contract of a call": (
        lambda raw: root(raw, 3)["result"].update(address=MINER),
        "transaction 3 has a recipient, and creates a contract",
    ),
    "a creation that is a call": (
        lambda raw: root(raw, CREATION).update(type="call"),
        "transaction 1 is a create, and its trace a 'call'",
    ),
    "a delegate call": (
        lambda raw: root(raw, 3)["action"].update(callType="delegatecall"),
        "is a 'delegatecall'",
    ),
    "another sender": (lambda raw: root(raw, 3)["action"].update({"from": MINER}), "has another sender"),
    "another recipient": (lambda raw: root(raw, 3)["action"].update(to="0x" + "0" * 40), "another recipient"),
    "another value": (lambda raw: root(raw, 3)["action"].update(value="0x7"), "has another value"),
    "other data": (lambda raw: root(raw, 3)["action"].update(input="0x77"), "has other data"),
    "other init code": (lambda raw: root(raw, CREATION)["action"].update(init="0x77"), "has other data"),
    "a reward in a transaction": (
        lambda raw: at(raw, 1).update(type="reward"),
        "is a reward, and has a tran",
    ),
    "rewards double": (
        lambda raw: traces(raw).extend([reward(raw), reward(raw)]),
        "there are 2 rewards for the block",
    ),
    "a reward of no uncle": (
        lambda raw: traces(raw).append(reward(raw, "uncle")),
        "rewards for 1 uncles, of 0",
    ),
    "a reward in between": (lambda raw: traces(raw).insert(0, reward(raw)), "transaction 0 has no traces"),
    "a call of no transaction": (
        lambda raw: traces(raw).append(reward(raw) | {"type": "call"}),
        "trace 11 is of transaction None",
    ),
}
GAS_LIES: dict[str, tuple[Callable[[RawBlock], object], str]] = {
    "more gas than the receipt's": (
        lambda raw: root(raw, 3)["result"].update(gasUsed=hex(110_000)),
        "transaction 3 used 110000 gas in its traces, more than its receipt's 100003 allow",
    ),
    "less gas than the receipt's": (
        lambda raw: root(raw, 3)["result"].update(gasUsed=hex(50_000)),
        "transaction 3 used 50000 gas in its traces, less than its receipt's 100003 demand",
    ),
    "no gas used": (
        lambda raw: root(raw, 4)["result"].update(gasUsed="0x0"),
        "used 0 gas in its traces, less",
    ),
    "more gas than the transaction has": (
        lambda raw: root(raw, 3)["action"].update(gas=hex(900_001)),
        "transaction 3 begins with 900001 gas",
    ),
    "too little gas": (
        lambda raw: root(raw, 3)["action"].update(gas="0x1"),
        "transaction 3 begins with 1 gas",
    ),
}


@pytest.mark.parametrize("level", list(Verify))
def test_honest_traces_are_accepted(level: Verify) -> None:
    check_block(made(), level, CHAIN_ID)


@pytest.mark.parametrize("level", [Verify.FULL, Verify.BLOOM])
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_and_named(lie: str, level: Verify) -> None:
    raw = made()
    tell, what = LIES[lie]
    tell(raw)
    with pytest.raises(BlockMismatch, match=what):
        check_block(raw, level, CHAIN_ID)


@pytest.mark.parametrize("lie", GAS_LIES)
def test_full_refuses_gas_that_the_receipt_rules_out(lie: str) -> None:
    raw = made()
    tell, what = GAS_LIES[lie]
    tell(raw)
    check_block(raw, Verify.BLOOM, CHAIN_ID)
    with pytest.raises(BlockMismatch, match=what):
        check_block(raw, Verify.FULL, CHAIN_ID)


def refused(raw: RawBlock) -> bool:
    try:
        # On Ethereum, where rewards follow from the block as well.
        check_traces(raw.block, raw.receipts, traces(raw), 1, gas=True)
    except (Contradiction, KeyError):
        return True
    return False


def test_two_lies_do_not_hide_each_other() -> None:
    honest, passed = made(), []
    for (one, (tell, _)), (other, (tell_too, _)) in itertools.permutations((LIES | GAS_LIES).items(), 2):
        raw = RawBlock(41, honest.block, honest.receipts, copy.deepcopy(honest.traces), "made")
        tell(raw)
        # The first lie may have removed what the second is about.
        with contextlib.suppress(StopIteration, LookupError, AttributeError, TypeError):
            tell_too(raw)
        # Two lies may also cancel each other: the doubled trace is the one that is left out.
        if not refused(raw) and traces(raw) != honest.traces:
            passed.append((one, other))
    assert passed == []


def test_a_created_contract_follows_from_the_sender_where_the_receipt_has_none() -> None:
    raw = made()
    (raw.receipts or [])[CREATION]["contractAddress"] = None
    check_block(raw, Verify.BLOOM, CHAIN_ID)
    root(raw, CREATION)["result"]["address"] = MINER
    with pytest.raises(BlockMismatch, match="transaction 1 creates the contract '0xabab"):
        check_block(raw, Verify.BLOOM, CHAIN_ID)


def failed_creation(raw: RawBlock) -> None:
    (raw.receipts or [])[CREATION]["status"] = "0x0"
    seal(raw)
    result = {"gasUsed": root(raw, CREATION)["result"]["gasUsed"], "code": "0x"}
    traces(raw)[:] = traces_of(raw)
    root(raw, CREATION)["result"] = result | {"address": created(raw.block["transactions"][CREATION])}


def all_gas(raw: RawBlock) -> None:
    for each in traces(raw):
        if not each["traceAddress"]:
            each["action"]["gas"] = raw.block["transactions"][each["transactionPosition"]]["gas"]


HONEST: dict[str, Callable[[RawBlock], object]] = {
    "a revert with its result": lambda raw: root(raw, FAILURE).update(
        result={"gasUsed": hex(100_002 - BEFORE), "output": "0x08c379a0"}
    ),
    "a failure whose result is null": lambda raw: root(raw, FAILURE).update(result=None, error="out of gas"),
    "a failed creation with its address": failed_creation,
    "an error that is null": lambda raw: root(raw, 3).update(error=None),
    "all gas of the transaction for the outer call": all_gas,
    "a fifth of the gas refunded": lambda raw: root(raw, 3)["result"].update(
        gasUsed=hex(100_003 * 5 // 4 - BEFORE)
    ),
    "capitals": lambda raw: [
        each.update(blockHash="0x" + each["blockHash"][2:].upper()) for each in traces(raw)
    ],
    "a reward": lambda raw: traces(raw).append(reward(raw)),
    "rewards of a contract": lambda raw: traces(raw).extend([reward(raw, "external", MINER)] * 2),
}


@pytest.mark.parametrize("variant", HONEST)
def test_what_clients_do_differently_is_no_lie(variant: str) -> None:
    raw = made()
    HONEST[variant](raw)
    check_block(raw, Verify.FULL, CHAIN_ID)


def test_the_floor_of_a_transaction_with_much_data_hides_how_much_gas_its_code_used() -> None:
    raw = made()
    tx, receipt = raw.block["transactions"][3], (raw.receipts or [])[3]
    tx["input"] = "0x" + "11" * 1_000
    receipt["gasUsed"] = hex(21_000 + 40 * 1_000)
    seal(raw)
    traces(raw)[:] = traces_of(raw)
    root(raw, 3)["result"]["gasUsed"] = "0x64"
    root(raw, 3)["action"]["gas"] = hex(900_000 - 37_000)
    check_block(raw, Verify.FULL, CHAIN_ID)


def test_gas_is_not_compared_where_its_rules_are_not_known() -> None:
    raw = made()
    GAS_LIES["more gas than the receipt's"][0](raw)
    amsterdam = raw.block | {"blockAccessListHash": "0x" + "00" * 32}
    check_traces(amsterdam, raw.receipts, traces(raw), CHAIN_ID, gas=True)
    raw.block["transactions"][3]["type"] = "0x7e"
    check_traces(raw.block, raw.receipts, traces(raw), CHAIN_ID, gas=True)


def test_before_byzantium_receipts_do_not_say_what_failed() -> None:
    raw = made()
    for receipt in raw.receipts or []:
        del receipt["status"]
    root(raw, 3).update(error="Out of gas", result=None)
    check_traces(raw.block, raw.receipts, traces(raw), CHAIN_ID, gas=True)


def test_mined_blocks_of_ethereum_pay_their_miner_and_uncles() -> None:
    raw = made()
    block = raw.block | {"difficulty": "0x10", "uncles": ["0x" + "33" * 32]}
    paid = [*traces(raw), reward(raw), reward(raw, "uncle", MINER)]
    check_traces(block, raw.receipts, paid, 1, gas=True)
    check_traces(block, raw.receipts, traces(raw), 61, gas=True)
    for wrong, what in (
        (traces(raw), "there are 0 rewards for the block"),
        (paid[:-1], "there are rewards for 0 uncles, of 1"),
        ([*traces(raw), reward(raw, author=MINER), paid[-1]], "is the reward of another miner"),
    ):
        with pytest.raises(Contradiction, match=what):
            check_traces(block, raw.receipts, wrong, 1, gas=True)
    with pytest.raises(Contradiction, match="there are 2 rewards, and the block wasn't mined"):
        check_traces(raw.block, raw.receipts, paid, 1, gas=True)


@pytest.mark.parametrize(
    "field", ["blockHash", "blockNumber", "transactionPosition", "traceAddress", "action"]
)
def test_a_trace_that_lacks_a_field_is_malformed(field: str) -> None:
    raw = made()
    del traces(raw)[0][field]
    with pytest.raises(BlockMalformed, match=f"{field} is missing"):
        check_block(raw, Verify.BLOOM, CHAIN_ID)


@pytest.mark.parametrize("nonsense", [None, 7, "", "junk", [], {}, [[]], -1, 2**70])
@pytest.mark.parametrize(
    "field", ["blockHash", "transactionHash", "traceAddress", "action", "result", "type"]
)
def test_nonsense_is_refused(field: str, nonsense: Any) -> None:
    raw = made()
    if nonsense == traces(raw)[0][field]:
        return
    traces(raw)[0][field] = nonsense
    with pytest.raises((BlockMismatch, BlockMalformed)):
        check_block(raw, Verify.FULL, CHAIN_ID)


def test_traces_alone_are_fetched_with_the_receipts_that_check_them() -> None:
    assert need_receipts([ChainTable.TRACES])
    assert need_receipts([ChainTable.TRACES], Verify.BLOOM)
    assert not need_receipts([ChainTable.TRACES], Verify.OFF)
    assert not need_receipts([ChainTable.BLOCKS, ChainTable.WITHDRAWALS])
