"""Chain profiles: blocks of other chains are proven as far as their profile says, or refused with what to do."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import rlp
from tiny_keccak import keccak256

from tests.support import evm_encoding
from tests.support.profile_blocks import NAMES, ZERO, recorded, sealed_with, under, with_state_sync
from tracelake.domain.errors import Invalid
from tracelake.evm.columns import Proof, arrow_fields
from tracelake.evm.decode import decode
from tracelake.evm.profiles.registry import PROFILES, profile_of
from tracelake.evm.raw_block import (
    BlockMalformed,
    BlockMismatch,
    BlockUnprovable,
    ChainTable,
    RawBlock,
    UnknownTransactionType,
    Unprovable,
    Verify,
)
from tracelake.evm.schemas import TABLES
from tracelake.evm.verify import check_block

Json = dict[str, Any]
NOT_IN_FULL = {
    "bittensor_6646068": "chain profile frontier: its block hashes aren't",
    "cronos_10000": "chain profile cronos: its block hashes are CometBFT's",
    "stable_13683593": "chain profile stable: its block hashes are CometBFT's",
    "tempo_17708868": r"transactions of type 0x76 \(several calls\) can't be proven",
}
PROVEN = [name for name in NAMES if name not in NOT_IN_FULL]
WORD, ADDRESS = "0x" + "ab" * 32, "0x" + "cd" * 20
NODES_WORD = {
    (table, field.name)
    for table, schema in TABLES.items()
    for column in schema.columns
    if column.proof is Proof.NODE
    for field in arrow_fields(column)
}
OWN_FEES = {
    (table, name)
    for table in (ChainTable.TRANSACTIONS, ChainTable.RECEIPTS)
    for name in ("gas_price", "effective_gas_price")
}


def tables(raw: RawBlock, chain_id: int) -> dict[ChainTable, Any]:
    wanted = [ChainTable.BLOCKS, ChainTable.TRANSACTIONS, ChainTable.WITHDRAWALS]
    if raw.receipts is not None:
        wanted += [ChainTable.LOGS, ChainTable.RECEIPTS]
    found = {table: decode([raw], table, chain_id) for table in wanted}
    for rows in found.values():
        rows.validate(full=True)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_block_is_proven_or_refused_with_what_works(name: str) -> None:
    raw, chain_id = recorded(name)
    for level in (Verify.BLOOM, Verify.OFF):
        check_block(raw, level, chain_id)
    assert len(tables(raw, chain_id)[ChainTable.TRANSACTIONS]) == len(raw.block["transactions"])
    if name in PROVEN:
        check_block(raw, Verify.FULL, chain_id)
        return
    with pytest.raises(Unprovable, match=f"{NOT_IN_FULL[name]}.*verify: bloom works") as refused:
        check_block(raw, Verify.FULL, chain_id)
    assert isinstance(refused.value, Invalid), "trying again doesn't help"


def lies(item: Json) -> Iterator[tuple[str, Any]]:
    for key, value in list(item.items()):
        if isinstance(value, str) and value.startswith("0x"):
            yield key, value + "1" if len(value) == 2 else value[:-1] + ("1" if value[-1] != "1" else "2")
            yield key, "0x0" if len(value) < 20 else "0x" + "00" * (len(value) // 2 - 1)
            yield key, None
    for key in (
        "baseFeePerGas",
        "v",
        "r",
        "maxFeePerGas",
        "maxPriorityFeePerGas",
        "nonce",
        "value",
        "effectiveGasPrice",
    ):
        yield key, "0x9"
    yield "accessList", [{"address": ADDRESS, "storageKeys": [WORD]}]
    yield "contractAddress", ADDRESS
    yield "withdrawals", [{"index": "0x1", "validatorIndex": "0x2", "address": ADDRESS, "amount": "0x3"}]


@pytest.mark.parametrize("name", PROVEN)
def test_no_lie_about_a_proven_block_changes_what_its_profile_proves(name: str) -> None:
    raw, chain_id = recorded(name)
    may_change = NODES_WORD | (OWN_FEES if raw.profile.own_fees else set())
    honest = tables(raw, chain_id)
    transactions, receipts = raw.block["transactions"], raw.receipts or []
    changed = []
    for item in (
        raw.block,
        *transactions,
        *receipts,
        *(log for each in receipts for log in each["logs"][:1]),
    ):
        for key, lie in lies(item):
            before = copy.copy(item)
            item[key] = lie
            try:
                check_block(raw, Verify.FULL, chain_id)
                after = tables(raw, chain_id)
            except (BlockMismatch, BlockMalformed, Unprovable):
                after = honest
            item.clear()
            item.update(before)
            columns = {
                (table, column)
                for table, rows in honest.items()
                for column in rows.schema.names
                if not rows.column(column).equals(after[table].column(column))
            }
            if columns - may_change:
                changed.append((key, lie, columns - may_change))
    assert changed == []


@pytest.mark.parametrize(
    ("name", "left_out"), [("base_274", "gasPrice"), ("hyperliquid_50000", "withdrawals")]
)
def test_what_is_nothing_may_be_left_out(name: str, left_out: str) -> None:
    raw, chain_id = recorded(name)
    honest = tables(raw, chain_id)
    for item in (raw.block, *raw.block["transactions"][:1]):
        if item.get(left_out) in ([], "0x0"):
            item[left_out] = None
    check_block(raw, Verify.FULL, chain_id)
    assert tables(raw, chain_id) == honest


def test_a_header_that_is_sealed_by_aura_may_have_a_base_fee() -> None:
    """Synthetic: London became active on Gnosis before the merge, and no recording here is from between."""
    raw, chain_id = recorded("gnosis_0")
    block = {**raw.block, "baseFeePerGas": "0x7"}
    step, seal = int(str(block["auraStep"]), 0), "0x" + str(block["auraSeal"]).removeprefix("0x")
    words = [bytes.fromhex(block[name][2:]) for name in ("parentHash", "sha3Uncles", "miner", "stateRoot")]
    words += [bytes.fromhex(block[name][2:]) for name in ("transactionsRoot", "receiptsRoot", "logsBloom")]
    numbers = [int(block[name], 16) for name in ("difficulty", "number", "gasLimit", "gasUsed", "timestamp")]
    sealed = [*words, *numbers, bytes.fromhex(block["extraData"][2:]), step, bytes.fromhex(seal[2:]), 7]
    block["hash"] = "0x" + keccak256(rlp.encode(sealed)).hex()
    check_block(RawBlock(0, block, [], None, "made", raw.profile), Verify.FULL, chain_id)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "base_274",
            'type 0x7e isn\'t known.*set chain = "optimism" or "base" in the RPC pool, or verify: bloom',
        ),
        ("arbitrum_150000000", 'type 0x6a isn\'t known.*set chain = "arbitrum"'),
        (
            "gnosis_10000000",
            'has fields of gnosis: set chain = "gnosis" in the RPC pool, or verify: bloom works',
        ),
        ("tempo_17708868", 'has fields of tempo: set chain = "tempo"'),
        ("bittensor_6646068", "mixHash is missing; verify: bloom works"),
    ],
)
def test_the_wrong_profile_is_refused_with_the_right_one(name: str, said: str) -> None:
    raw, chain_id = recorded(name)
    with pytest.raises(Invalid, match=f"^block {raw.number} from recorded: .*{said}"):
        check_block(under(raw, "ethereum"), Verify.FULL, chain_id)


def test_a_chain_that_nobody_knows_is_no_endpoints_fault_for_sure() -> None:
    raw, chain_id = recorded("cronos_10000")
    with pytest.raises(BlockMismatch, match="doesn't hash headers as Ethereum does, and verify: bloom works"):
        check_block(under(raw, "ethereum"), Verify.FULL, chain_id)


def test_a_type_that_no_profile_has_is_named() -> None:
    raw, chain_id = recorded("base_274")
    raw.block["transactions"][0]["type"] = "0x55"
    with pytest.raises(
        UnknownTransactionType, match=r"type 0x55 .* no chain profile has it; verify: bloom works"
    ):
        check_block(raw, Verify.FULL, chain_id)


def test_an_absent_value_is_null_where_the_type_has_none_and_refused_elsewhere() -> None:
    raw, chain_id = recorded("tempo_17708868")
    rows = decode([raw], ChainTable.TRANSACTIONS, chain_id).to_pylist()
    assert [(row["value_string"], row["input"], row["n_input_bytes"]) for row in rows[:2]] == [
        (None, None, None)
    ] * 2
    assert rows[2]["value_string"] == "0"
    with pytest.raises(
        BlockMalformed, match=r'value is missing; transaction type \'0x76\'.*set chain = "tempo"'
    ):
        decode([under(raw, "ethereum")], ChainTable.TRANSACTIONS, chain_id)


def test_authorizations_in_another_form_become_the_same_rows() -> None:
    raw, chain_id = recorded("bittensor_6646068")
    [row] = decode([raw], ChainTable.TRANSACTIONS, chain_id).to_pylist()
    [entry] = row["authorization_list"]
    assert (entry["chain_id"], entry["nonce"], entry["y_parity"], entry["r"]) == ("945", 6, 0, bytes(32))


def number(text: str) -> int:
    return int(text, 16)


def raw_bytes(text: str | None) -> bytes:
    return bytes.fromhex((text or "0x")[2:])


CALL = {
    "gasPrice": "0x77",
    "gas": "0x5208",
    "to": ADDRESS,
    "value": "0x1234567890abcdef12",
    "input": "0xc0ffee",
}
OF_CALL = (("gasPrice", number), ("gas", number), ("to", raw_bytes), ("value", number), ("input", raw_bytes))
NOTHING = {"v": "0x0", "r": "0x0", "s": "0x0"}
SUBMIT = {
    "requestId": WORD,
    "from": ADDRESS,
    "l1BaseFee": "0x5",
    "depositValue": "0x99",
    "gasPrice": "0x7",
    "gas": "0x100",
    "retryTo": ADDRESS,
    "retryValue": "0x3",
    "beneficiary": ADDRESS,
    "maxSubmissionFee": "0x8",
    "refundTo": ADDRESS,
    "retryData": "0xc0ffee",
    "nonce": "0x0",
    "value": "0x0",
    "to": ZERO[:-2] + "6e",
    "input": "0xc9f95d32"
    + WORD[2:]
    + "".join(f"{value:064x}" for value in (5, 0x99, 3, 7, 0x100, 8))
    + ADDRESS[2:].rjust(64, "0") * 3
    + f"{11 * 32:064x}{3:064x}"
    + "c0ffee".ljust(64, "0"),
}
ARBITRUM_TYPES: dict[str, tuple[Json, tuple[tuple[str, Any], ...]]] = {
    "0x64": (
        {"requestId": WORD, "from": ADDRESS, "to": ADDRESS, "value": "0x5", "nonce": "0x0", "gas": "0x0"}
        | {"gasPrice": "0x0", "input": "0x"},
        (("requestId", raw_bytes), ("from", raw_bytes), ("to", raw_bytes), ("value", number)),
    ),
    "0x65": (CALL | {"from": ADDRESS, "nonce": "0x4"}, (("from", raw_bytes), ("nonce", number), *OF_CALL)),
    "0x66": (
        CALL | {"requestId": WORD, "from": ADDRESS, "to": None, "nonce": "0x0"},
        (("requestId", raw_bytes), ("from", raw_bytes), *OF_CALL),
    ),
    "0x68": (
        CALL
        | {"nonce": "0x2", "from": ADDRESS, "ticketId": WORD, "refundTo": ADDRESS}
        | {"maxRefund": "0x9", "submissionFeeRefund": "0x0"},
        (
            *(("nonce", number), ("from", raw_bytes), *OF_CALL, ("ticketId", raw_bytes)),
            *(("refundTo", raw_bytes), ("maxRefund", number), ("submissionFeeRefund", number)),
        ),
    ),
    "0x69": (
        SUBMIT,
        (
            *(("requestId", raw_bytes), ("from", raw_bytes), ("l1BaseFee", number), ("depositValue", number)),
            *(("gasPrice", number), ("gas", number), ("retryTo", raw_bytes), ("retryValue", number)),
            *(("beneficiary", raw_bytes), ("maxSubmissionFee", number), ("refundTo", raw_bytes)),
            ("retryData", raw_bytes),
        ),
    ),
}


@pytest.mark.parametrize("kind", ARBITRUM_TYPES)
def test_each_type_of_arbitrum_is_proven_by_its_specified_encoding(kind: str) -> None:
    fields, order = ARBITRUM_TYPES[kind]
    tx = copy.deepcopy(fields) | NOTHING | {"type": kind, "chainId": "0xa4b1"}
    content = rlp.encode([42161, *(read(tx.get(name)) for name, read in order)])
    raw = sealed_with(PROFILES["arbitrum"], tx, bytes([int(kind, 16)]) + content)
    check_block(raw, Verify.FULL, 42161)
    for name, lie in (
        ("from", ZERO),
        ("value", "0x1"),
        ("nonce", "0x7"),
        ("input", "0x00"),
        ("to", "0x" + "11" * 20),
    ):
        altered = copy.deepcopy(raw)
        altered.block["transactions"][0][name] = lie
        (altered.receipts or [])[0].update({name: lie} if name in ("from", "to") else {})
        with pytest.raises(BlockMismatch):
            check_block(altered, Verify.FULL, 42161)


@pytest.mark.parametrize("version", ["0x1", None], ids=["since Canyon", "before Canyon"])
@pytest.mark.parametrize("mint", ["0xde0b6b3a7640000", None])
def test_deposits_are_proven_with_mints_and_with_receipts_of_both_forms(
    mint: str | None, version: str | None
) -> None:
    tx = NOTHING | {
        "type": "0x7e",
        "sourceHash": WORD,
        "from": ADDRESS,
        "to": None,
        "mint": mint,
        "value": "0x5",
        "gas": "0x5208",
        "input": "0x6001",
        "nonce": "0x11",
        "gasPrice": "0x0",
    }
    fields = [raw_bytes(WORD), raw_bytes(ADDRESS), b"", int(mint or "0x0", 16), 5, 0x5208, 0, b"\x60\x01"]
    tail = () if version is None else (0x11, 1)
    raw = sealed_with(PROFILES["optimism"], tx, b"\x7e" + rlp.encode(fields), tail)
    made = "0x" + keccak256(rlp.encode([raw_bytes(ADDRESS), 0x11]))[12:].hex()
    assert raw.receipts is not None
    raw.receipts[0] |= {"depositNonce": "0x11", "depositReceiptVersion": version, "contractAddress": made}
    raw.receipts[0]["effectiveGasPrice"] = "0x0"
    check_block(raw, Verify.FULL, 10)
    whole = tables(raw, 10)
    left_out = raw.receipts[0] | {"contractAddress": None, "effectiveGasPrice": None}
    assert tables(RawBlock(raw.number, raw.block, [left_out], None, "other", raw.profile), 10) == whole
    raw.receipts[0]["effectiveGasPrice"] = "0x1"
    with pytest.raises(BlockMismatch, match="its type is free"):
        check_block(raw, Verify.FULL, 10)


@pytest.mark.parametrize("receipt", [True, False], ids=["with its receipt", "without a receipt"])
def test_a_state_sync_is_outside_of_the_roots_and_in_the_tables(receipt: bool) -> None:
    raw = with_state_sync(5_000_000, receipt=receipt)
    check_block(raw, Verify.FULL, None)
    rows = tables(raw, 137)
    assert [row["success"] for row in rows[ChainTable.TRANSACTIONS].to_pylist()][2] is (
        True if receipt else None
    )
    assert rows[ChainTable.LOGS].column("log_index").to_pylist() == list(range(5 if receipt else 4))
    assert len(rows[ChainTable.RECEIPTS]) == (3 if receipt else 2)
    with pytest.raises(BlockMismatch):
        check_block(under(raw, "ethereum"), Verify.BLOOM, None)


@pytest.mark.parametrize("lie", [{"value": "0x1"}, {"hash": WORD}, {"to": ADDRESS}, {"input": "0x00"}])
def test_a_state_sync_can_only_be_what_every_one_is(lie: Json) -> None:
    raw = with_state_sync(5_000_000, receipt=False)
    raw.block["transactions"][2] |= lie
    with pytest.raises(BlockMismatch):
        check_block(raw, Verify.FULL, None)


def test_a_receipt_of_a_signed_transaction_can_not_be_left_out() -> None:
    raw = with_state_sync(5_000_000)
    assert raw.receipts is not None
    del raw.receipts[0]
    with pytest.raises(BlockMismatch, match="2 receipts for 3 transactions"):
        check_block(raw, Verify.BLOOM, None)
    with pytest.raises(BlockMalformed, match="receipts are 2 for 3 transactions"):
        decode([raw], ChainTable.TRANSACTIONS, 137)


def test_a_state_sync_in_the_roots_can_not_be_proven_and_says_so() -> None:
    raw = with_state_sync(90_000_000)
    raw.block["transactions"][2] |= {"type": "0x7f", "hash": WORD}
    assert raw.receipts is not None
    raw.receipts[2] |= {"type": "0x7f", "transactionHash": WORD}
    for log in raw.receipts[2]["logs"]:
        log["transactionHash"] = WORD
    bloom = int(raw.block["logsBloom"], 16) | int(raw.receipts[2]["logsBloom"], 16)
    raw.block["logsBloom"] = f"0x{bloom:0512x}"
    raw.block["hash"] = "0x" + keccak256(evm_encoding.header(raw.block)).hex()
    for item in (
        *raw.block["transactions"],
        *raw.receipts,
        *(log for each in raw.receipts for log in each["logs"]),
    ):
        item["blockHash"] = raw.block["hash"]
    check_block(raw, Verify.BLOOM, None)
    with pytest.raises(
        BlockUnprovable, match=r"type 0x7f \(state sync\) can't be .*verify: bloom works"
    ) as found:
        check_block(raw, Verify.FULL, None)
    assert isinstance(found.value, Invalid)


def test_logs_that_are_numbered_per_transaction_are_numbered_per_block() -> None:
    raw = under(with_state_sync(5_000_000, receipt=False), "cosmos")
    del raw.block["transactions"][2]
    assert raw.receipts is not None
    for receipt in raw.receipts:
        for place, log in enumerate(receipt["logs"]):
            log["logIndex"] = hex(place)
    check_block(raw, Verify.BLOOM, None)
    assert decode([raw], ChainTable.LOGS, 25).column("log_index").to_pylist() == [0, 1, 2, 3]
    with pytest.raises(BlockMismatch, match="one is missing or double"):
        check_block(under(raw, "ethereum"), Verify.BLOOM, None)


def test_every_profile_says_what_it_proves() -> None:
    for name, profile in PROFILES.items():
        assert profile.name == name
        assert profile.about
        assert bool(profile.proves) != bool(profile.unprovable)
    ids = [chain_id for profile in PROFILES.values() for chain_id in profile.chain_ids]
    assert len(ids) == len(set(ids))
    assert (profile_of(None, 8453).name, profile_of("gnosis", 8453).name) == ("base", "gnosis")
    assert (profile_of(None, 31337).name, profile_of(None, None).name) == ("ethereum", "ethereum")
