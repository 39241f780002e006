"""Whatever an endpoint leaves out, doubles, mixes up or makes up is found, and the error says where and what."""

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.evm_blocks import CHAIN_ID, EVERY_TYPE, made_block, seal
from tracelake.domain.errors import Unavailable
from tracelake.evm.raw_block import (
    BlockMalformed,
    BlockMismatch,
    RawBlock,
    UnknownTransactionType,
    Verify,
)
from tracelake.evm.verify import check_block

Json = dict[str, Any]

UNPROVEN = {"totalDifficulty", "size", "blobGasPrice"}
LEVELS = [Verify.FULL, Verify.BLOOM]


@pytest.fixture
def raw() -> RawBlock:
    return made_block(random.Random(7), 41, transactions=6, logs=2)


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to every text in an answer that a hash, a root or another field vouches for."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key not in UNPROVEN:
                yield from leaves(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from leaves(value, (*path, index))
    elif isinstance(node, str) and len(node) > 2:
        yield path


def change(answer: Any, path: tuple[Any, ...], new: Callable[[Any], Any]) -> None:
    for step in path[:-1]:
        answer = answer[step]
    answer[path[-1]] = new(answer[path[-1]])


@pytest.mark.parametrize("level", list(Verify))
@pytest.mark.parametrize("transactions", [0, 1, 2, 17, 140])
def test_a_block_of_every_type_verifies(level: Verify, transactions: int) -> None:
    raw = made_block(random.Random(transactions), 3, transactions=transactions)
    check_block(raw, level, CHAIN_ID)


@pytest.mark.parametrize("kind", EVERY_TYPE)
def test_a_block_of_each_type_verifies(kind: str) -> None:
    check_block(made_block(random.Random(1), 9, transactions=5, kinds=(kind,)), Verify.FULL, CHAIN_ID)


@pytest.mark.parametrize(
    "later",
    [
        [
            "baseFeePerGas",
            "withdrawalsRoot",
            "blobGasUsed",
            "excessBlobGas",
            "parentBeaconBlockRoot",
            "requestsHash",
        ],
        ["withdrawalsRoot", "blobGasUsed", "excessBlobGas", "parentBeaconBlockRoot", "requestsHash"],
        ["blobGasUsed", "excessBlobGas", "parentBeaconBlockRoot", "requestsHash"],
        ["requestsHash"],
    ],
    ids=["Berlin", "London", "Shanghai", "Cancun"],
)
def test_headers_of_earlier_forks_verify(later: list[str]) -> None:
    raw = made_block(random.Random(2), 5, transactions=4, kinds=("0x0", "0x1"), withdrawals=0)
    for name in later:
        raw.block.pop(name)
    if "withdrawalsRoot" in later:
        raw.block.pop("withdrawals")
    seal(raw)
    check_block(raw, Verify.FULL, CHAIN_ID)


def test_receipts_of_before_byzantium_verify() -> None:
    raw = made_block(random.Random(3), 5, transactions=3, kinds=("0x0",))
    for receipt in raw.receipts or []:
        receipt["root"] = "0x" + "ab" * 32
        del receipt["status"]
    seal(raw)
    check_block(raw, Verify.FULL, CHAIN_ID)


def test_a_block_without_receipts_is_checked_as_far_as_it_goes(raw: RawBlock) -> None:
    alone = RawBlock(raw.number, raw.block, None, None, "one")
    check_block(alone, Verify.FULL, CHAIN_ID)
    alone.block["transactions"][0]["value"] = "0x123"
    with pytest.raises(BlockMismatch, match="hash of transaction 0"):
        check_block(alone, Verify.FULL, CHAIN_ID)


def test_fields_that_nobody_knows_are_no_matter(raw: RawBlock) -> None:
    raw.block["l1BlockNumber"] = "0x1"
    raw.block["transactions"][0]["blockTimestamp"] = 17
    (raw.receipts or [])[0]["blockTimestamp"] = 17
    check_block(raw, Verify.FULL, CHAIN_ID)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 5), st.data())
def test_full_finds_any_digit_that_was_changed(seed: int, data: st.DataObject) -> None:
    raw = made_block(random.Random(seed), 41, transactions=4, logs=2)
    answer = [raw.block, raw.receipts]
    path = data.draw(st.sampled_from(list(leaves(answer))))

    def other_digit(text: str) -> str:
        at = data.draw(st.integers(2, len(text) - 1))
        digit = data.draw(st.sampled_from([one for one in "0123456789abcdef" if one != text[at].lower()]))
        return text[:at] + digit + text[at + 1 :]

    change(answer, path, other_digit)
    with pytest.raises((BlockMismatch, BlockMalformed, UnknownTransactionType)) as found:
        check_block(raw, Verify.FULL, CHAIN_ID)
    assert str(found.value).startswith("block 41 from made: ")


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 5), st.data(), st.sampled_from([None, 7, "", "0x", "junk", [], {}, "0x" + "f" * 600]))
def test_full_finds_any_field_that_was_replaced_by_nonsense(
    seed: int, data: st.DataObject, nonsense: Any
) -> None:
    raw = made_block(random.Random(seed), 41, transactions=3, logs=1)
    answer = [raw.block, raw.receipts]
    change(answer, data.draw(st.sampled_from(list(leaves(answer)))), lambda _: nonsense)
    with_optional_gone = nonsense is None
    try:
        check_block(raw, Verify.FULL, CHAIN_ID)
    except (BlockMismatch, BlockMalformed, UnknownTransactionType):
        return
    assert with_optional_gone, "only a field that clients may leave out can be missing"


LIES: dict[str, tuple[Callable[[RawBlock], object], str]] = {
    "a log is missing": (lambda raw: receipts(raw)[2]["logs"].pop(0), "log 4 has the index 5"),
    "the last log is missing": (lambda raw: receipts(raw)[5]["logs"].pop(), "logs of receipt 5 don't give"),
    "all logs are missing": (
        lambda raw: [one["logs"].clear() for one in receipts(raw)],
        "receipt 0 has no logs, and a logsBloom that stands for some",
    ),
    "a log is doubled": (
        lambda raw: receipts(raw)[0]["logs"].append(receipts(raw)[0]["logs"][1]),
        "log 2 has the",
    ),
    "a log is marked as removed": (
        lambda raw: receipts(raw)[0]["logs"][0].update(removed=True),
        "log 0 is marked as removed",
    ),
    "a receipt is missing": (lambda raw: receipts(raw).pop(), "5 receipts for 6 transactions"),
    "no receipts": (lambda raw: receipts(raw).clear(), "0 receipts for 6 transactions"),
    "receipts are mixed up": (lambda raw: receipts(raw).reverse(), "receipt 0 is of transaction 0x"),
    "receipts are another block's": (
        lambda raw: [one.update(blockHash="0x" + "11" * 32) for one in receipts(raw)],
        "receipt 0 is of block 0x1111",
    ),
    "the block's filter is wrong": (
        lambda raw: raw.block.update(logsBloom="0x" + "00" * 256),
        "the logs don't give the block's logsBloom",
    ),
    "a receipt's filter is wrong": (
        lambda raw: receipts(raw)[1].update(logsBloom="0x" + "ff" * 256),
        "the logs of receipt 1 don't give its logsBloom",
    ),
    "a transaction is missing": (
        lambda raw: raw.block["transactions"].pop(0),
        "transaction 0 has the index 0x1",
    ),
    "a transaction is another block's": (
        lambda raw: raw.block["transactions"][3].update(blockHash="0x" + "22" * 32),
        "transaction 3 is of block 0x2222",
    ),
    "a transaction is another chain's": (
        lambda raw: raw.block["transactions"][0].update(chainId="0x5"),
        "transaction 0 is of chain 5, not 31337",
    ),
    "the answer is another block": (lambda raw: raw.block.update(number="0x2a"), "the answer is block 42"),
}


def receipts(raw: RawBlock) -> list[Json]:
    assert raw.receipts is not None
    return raw.receipts


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("lie", LIES)
def test_what_an_endpoint_gets_wrong_is_found_and_named(raw: RawBlock, lie: str, level: Verify) -> None:
    tell, what = LIES[lie]
    tell(raw)
    with pytest.raises(BlockMismatch, match=what) as found:
        check_block(raw, level, CHAIN_ID)
    assert str(found.value).startswith("block 41 from made: ")
    assert isinstance(found.value, Unavailable)


FORGERIES: dict[str, tuple[Callable[[RawBlock], object], str]] = {
    "data of a log": (
        lambda raw: receipts(raw)[1]["logs"][0].update(data="0x" + "00" * 32),
        "the receipts' root is",
    ),
    "status": (lambda raw: receipts(raw)[0].update(status="0x7"), "the receipts' root is"),
    "parent": (lambda raw: raw.block.update(parentHash="0x" + "00" * 32), "the header's hash is"),
    "transactions root": (
        lambda raw: raw.block.update(transactionsRoot="0x" + "00" * 32),
        "the header's hash is",
    ),
    "withdrawal": (lambda raw: raw.block["withdrawals"][0].update(amount="0x1"), "the withdrawals' root is"),
    "withdrawals gone": (lambda raw: raw.block["withdrawals"].clear(), "the withdrawals' root is"),
    "value": (lambda raw: raw.block["transactions"][2].update(value="0x1"), "the hash of transaction 2 is"),
    "gas of a receipt": (lambda raw: receipts(raw)[2].update(gasUsed="0x1"), "receipt 2 used 0x1 gas"),
    "price paid": (lambda raw: receipts(raw)[2].update(effectiveGasPrice="0x1"), "effectiveGasPrice 0x1"),
    "sender": (
        lambda raw: receipts(raw)[2].update({"from": "0x" + "00" * 20}),
        "receipt 2 has another sender",
    ),
    "recipient": (
        lambda raw: receipts(raw)[2].update({"to": "0x" + "00" * 20}),
        "receipt 2 has another recipient",
    ),
    "made contract": (
        lambda raw: receipts(raw)[2].update(contractAddress="0x" + "00" * 20),
        "receipt 2 has a contractAddress",
    ),
}


@pytest.mark.parametrize("forged", FORGERIES)
def test_full_finds_what_filters_and_places_cannot_tell(raw: RawBlock, forged: str) -> None:
    forge, what = FORGERIES[forged]
    forge(raw)
    check_block(raw, Verify.BLOOM, CHAIN_ID)
    with pytest.raises(BlockMismatch, match=what):
        check_block(raw, Verify.FULL, CHAIN_ID)


def test_off_only_wants_the_right_block(raw: RawBlock) -> None:
    receipts(raw).clear()
    check_block(raw, Verify.OFF, CHAIN_ID)
    raw.block["number"] = "0x1"
    with pytest.raises(BlockMismatch, match="the answer is block 1"):
        check_block(raw, Verify.OFF, CHAIN_ID)


@pytest.mark.parametrize("level", list(Verify))
def test_a_block_that_lacks_a_field_says_which(raw: RawBlock, level: Verify) -> None:
    del raw.block["number"]
    with pytest.raises(BlockMalformed, match="block 41 from made: number is missing"):
        check_block(raw, level, CHAIN_ID)


def test_transactions_as_hashes_alone_are_malformed(raw: RawBlock) -> None:
    raw.block["transactions"] = [tx["hash"] for tx in raw.block["transactions"]]
    with pytest.raises(BlockMalformed):
        check_block(raw, Verify.BLOOM, CHAIN_ID)


def test_capitals_and_padding_of_other_clients_are_no_mismatch(raw: RawBlock) -> None:
    for receipt in receipts(raw):
        receipt["blockHash"] = "0x" + receipt["blockHash"][2:].upper()
        receipt["transactionIndex"] = "0x0" + receipt["transactionIndex"][2:]
        receipt["blockNumber"] = "0x00" + receipt["blockNumber"][2:]
    check_block(raw, Verify.FULL, CHAIN_ID)


def test_verifying_changes_nothing(raw: RawBlock) -> None:
    before = copy.deepcopy(raw)
    check_block(raw, Verify.FULL, CHAIN_ID)
    assert raw == before


@pytest.mark.parametrize(
    "error", [BlockMismatch(4, "main", "a log is missing"), BlockMalformed(4, "main", "hash", "is missing")]
)
def test_errors_cross_a_process_boundary_whole(error: Unavailable) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))
