"""The dev chain: what it is made of, that it is the same everywhere, and how it changes its mind."""

import re
from collections import Counter
from threading import Event
from typing import Any

import orjson
import pytest

from tests.support import evm_encoding
from tracelake.domain.errors import Invalid
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import Autopilot
from tracelake.evm.devchain.transactions import HUGE_DATA, MOST_UINT256, TRANSFER
from tracelake.evm.hashing import keccak256
from tracelake.evm.raw_block import RawBlock, Verify
from tracelake.evm.verify import check_block

DATA_FIELDS = {
    *(
        "input",
        "data",
        "extraData",
        "nonce of a header",
        "hash",
        "blockHash",
        "parentHash",
        "transactionHash",
    ),
    *("from", "to", "address", "miner", "contractAddress", "stateRoot", "transactionsRoot", "receiptsRoot"),
    *(
        "logsBloom",
        "mixHash",
        "sha3Uncles",
        "withdrawalsRoot",
        "parentBeaconBlockRoot",
        "requestsHash",
        "blockAccessListHash",
        "root",
    ),
    *("topics", "storageKeys", "blobVersionedHashes"),
}

FORKS = [
    ("osaka",),
    (
        "frontier",
        "byzantium@8",
        "berlin@16",
        "london@24",
        "paris@32",
        "shanghai@40",
        "cancun@48",
        "prague@54",
    ),
    ("prague", "amsterdam@20"),
]


def raw(chain: DevChain, height: int) -> RawBlock:
    block = chain.block(height)
    assert block is not None
    traces = orjson.loads(block.traces)
    return RawBlock(height, parsed(block.with_transactions), orjson.loads(block.all_receipts), traces, "dev")


def parsed(encoded: bytes) -> dict[str, Any]:
    value: dict[str, Any] = orjson.loads(encoded)
    return value


def hashes(chain: DevChain) -> list[str]:
    return [block.hash for block in chain.blocks(0, chain.head)]


def test_a_chain_is_the_same_on_every_machine() -> None:
    block = DevChain(7, blocks=40).block(40)
    assert block is not None
    assert block.hash == "0x0971e530e712fb5b8d97c089d1a3714599a35ac0c79e1865040dccb3bcc40202"


def test_a_seed_gives_the_same_chain_whatever_is_read_first() -> None:
    one, other = DevChain(3, blocks=30), DevChain(3, blocks=30)
    assert one.block(30) == other.blocks(0, 30)[-1]
    assert hashes(one) == hashes(other)


def test_another_seed_or_chain_id_is_another_chain() -> None:
    tips = {
        chain.blocks(10, 10)[0].hash
        for chain in (DevChain(1, blocks=10), DevChain(2, blocks=10), DevChain(1, blocks=10, chain_id=1))
    }
    assert len(tips) == 3


def test_blocks_that_were_dropped_from_memory_are_made_again_the_same() -> None:
    forgetful, chain = DevChain(5, blocks=20, cache_bytes=0), DevChain(5, blocks=20)
    assert forgetful.blocks(0, 20) == chain.blocks(0, 20)
    assert forgetful.block(3) == chain.block(3)


def test_a_long_chain_costs_nothing_until_it_is_read() -> None:
    chain = DevChain(blocks=10**9)
    assert chain.mine(10**9) == chain.head == 2 * 10**9
    assert chain.block(1) is not None


@pytest.mark.parametrize("forks", FORKS)
def test_every_block_can_be_proven_in_full(forks: tuple[str, ...]) -> None:
    chain = DevChain(11, blocks=60, forks=forks)
    parent = "0x" + "00" * 32
    for height in range(61):
        block = raw(chain, height)
        check_block(block, Verify.FULL, chain.chain_id)
        assert block.block["parentHash"] == parent
        parent = block.block["hash"]


@pytest.mark.parametrize("forks", FORKS)
def test_every_block_has_the_hashes_and_roots_of_an_independent_encoder(forks: tuple[str, ...]) -> None:
    chain = DevChain(11, blocks=60, forks=forks)
    for height in range(61):
        raw_block = raw(chain, height)
        block, receipts = raw_block.block, raw_block.receipts or []
        encoded = [evm_encoding.transaction(tx) for tx in block["transactions"]]
        logs = [log for receipt in receipts for log in receipt["logs"]]
        assert block["hash"] == "0x" + keccak256(evm_encoding.header(block)).hex()
        assert [tx["hash"] for tx in block["transactions"]] == [
            "0x" + keccak256(one).hex() for one in encoded
        ]
        assert block["transactionsRoot"] == "0x" + evm_encoding.trie_root(encoded).hex()
        receipts_root = evm_encoding.trie_root([evm_encoding.receipt(receipt) for receipt in receipts])
        assert block["receiptsRoot"] == "0x" + receipts_root.hex()
        assert block["logsBloom"] == "0x" + evm_encoding.logs_bloom(logs).hex()


def test_a_short_chain_has_every_kind_of_transaction() -> None:
    chain = DevChain(1, blocks=150)
    seen: Counter[str] = Counter()
    for height in range(151):
        block = raw(chain, height)
        assert block.receipts is not None
        seen["empty"] += not block.block["transactions"]
        seen["withdrawals"] += bool(block.block["withdrawals"])
        for transaction, receipt in zip(block.block["transactions"], block.receipts, strict=True):
            kind = int(transaction["type"], 16)
            protected = "chainId" in transaction
            seen[f"type {kind}" if kind or protected else "unprotected"] += 1
            seen[f"type {kind} fails"] += receipt["status"] == "0x0"
            assert receipt["status"] == "0x1" or receipt["logs"] == []
            assert (receipt["contractAddress"] is None) == (transaction["to"] is not None)
            seen["creates"] += transaction["to"] is None
            seen["gas beyond 32 bits"] += int(receipt["gasUsed"], 16) > 2**32
            seen["largest value"] += int(transaction["value"], 16) >= MOST_UINT256 - 1
            seen["blob"] += "blobGasUsed" in receipt
            seen["authorization"] += len(transaction.get("authorizationList", ()))
    wanted = {f"type {kind}" for kind in range(5)} | {f"type {kind} fails" for kind in range(5)}
    wanted |= {"empty", "withdrawals", "unprotected", "creates", "gas beyond 32 bits", "largest value"}
    assert {name for name in wanted | {"blob", "authorization"} if not seen[name]} == set()


def test_a_short_chain_has_every_kind_of_log() -> None:
    chain = DevChain(1, blocks=300)
    logs = [
        log for block in chain.blocks(0, 300) for receipt in block.receipts for log in parsed(receipt)["logs"]
    ]
    assert {len(log["topics"]) for log in logs} == {0, 1, 2, 3, 4}
    transfers = [log for log in logs if log["topics"][:1] == [TRANSFER]]
    layouts = Counter((len(log["topics"]), len(log["data"]) // 2 - 1) for log in transfers)
    assert set(layouts) == {(3, 32), (4, 0), (1, 96), (2, 64)}
    amounts = {int(log["data"], 16) for log in transfers if len(log["topics"]) == 3}
    assert MOST_UINT256 in amounts
    assert any(MOST_UINT256 - 1000 <= amount < MOST_UINT256 for amount in amounts)
    assert max(len(log["data"]) for log in logs) > 2 * HUGE_DATA


def test_quantities_have_no_leading_zeros_and_data_has_whole_bytes() -> None:
    chain = DevChain(2, blocks=40, forks=("frontier", "osaka@5", "amsterdam@20"))
    for height in range(41):
        block = raw(chain, height)
        header_nonce = block.block.pop("nonce")
        assert re.fullmatch("0x[0-9a-f]{16}", header_nonce)
        assert list(_misspelt(block.block)) + list(_misspelt(block.receipts)) == []


def _misspelt(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _misspelt(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from _misspelt(each, name)
    elif isinstance(value, str):
        pattern = "0x([0-9a-f]{2})*" if name in DATA_FIELDS else "0x(0|[1-9a-f][0-9a-f]*)"
        if not re.fullmatch(pattern, value):
            yield name, value


def test_a_steady_chain_has_exactly_what_was_asked_for_in_every_block() -> None:
    chain = DevChain(9, transactions_per_block=20, logs_per_transaction=3, steady=True, blocks=20)
    for block in chain.blocks(1, 20):
        assert len(block.transactions) == 20
        assert len(block.logs) == 60


def test_a_chain_without_transactions_is_a_chain_of_empty_blocks() -> None:
    chain = DevChain(9, transactions_per_block=0, blocks=5)
    assert all(block.hashes == () for block in chain.blocks(0, 5))


def test_a_reorg_replaces_the_last_blocks_and_no_others() -> None:
    chain = DevChain(4, blocks=20)
    before = hashes(chain)
    assert chain.reorg(5) == 20
    after = hashes(chain)
    assert after[:16] == before[:16]
    assert not set(after[16:]) & set(before[16:])
    assert all(chain.block_by_hash(gone) is None for gone in before[16:])
    for height in range(16, 21):
        check_block(raw(chain, height), Verify.FULL)


@pytest.mark.parametrize(("length", "head"), [(2, 17), (9, 24), (0, 15)])
def test_a_reorg_may_leave_a_shorter_or_a_longer_chain(length: int, head: int) -> None:
    chain = DevChain(4, blocks=20)
    assert chain.reorg(5, length) == chain.head == head
    assert chain.block(head + 1) is None
    assert len(hashes(chain)) == head + 1


def test_what_grows_after_a_rollback_are_other_blocks() -> None:
    chain = DevChain(4, blocks=20)
    before = hashes(chain)
    assert chain.rollback(6) == 14
    assert chain.block_by_hash(before[20]) is None
    chain.mine(6)
    after = hashes(chain)
    assert after[:15] == before[:15]
    assert not set(after[15:]) & set(before[15:])


def test_reorgs_upon_reorgs_are_the_same_again_from_the_same_calls() -> None:
    def lived() -> DevChain:
        chain = DevChain(8, blocks=30)
        for depth, length in ((3, 3), (7, 9), (20, 4), (1, 5)):
            chain.reorg(depth, length)
            chain.mine(2)
        return chain

    one, other = lived(), lived()
    other.block(other.head)
    assert hashes(one) == hashes(other)
    for height in range(one.head + 1):
        check_block(raw(one, height), Verify.FULL)


def test_some_transactions_survive_a_reorg_under_their_hash_in_another_block() -> None:
    chain = DevChain(4, blocks=30, transactions_per_block=8)
    before = {name: block.hash for block in chain.blocks(21, 30) for name in block.hashes}
    chain.reorg(10)
    after = {name: block.hash for block in chain.blocks(21, 30) for name in block.hashes}
    moved = set(before) & set(after)
    assert moved
    assert set(before) - set(after)
    for name in moved:
        assert before[name] != after[name]
        found = chain.transaction(name)
        assert found is not None
        assert found[0].hash == after[name]
    assert all(chain.transaction(name) is None for name in set(before) - set(after))


def test_a_transaction_is_found_before_its_block_was_ever_read() -> None:
    known = next(name for block in DevChain(4, blocks=9).blocks(0, 9) for name in block.hashes)
    found = DevChain(4, blocks=9).transaction(known)
    assert found is not None
    block, position = found
    fields = parsed(block.transactions[position])
    assert fields["hash"] == known == "0x" + keccak256(evm_encoding.transaction(fields)).hex()


def test_finality_follows_the_head_at_its_distance() -> None:
    chain = DevChain(blocks=100, finality=10)
    assert (chain.finalized, chain.safe) == (90, 95)
    chain.finalize(97)
    assert (chain.finalized, chain.safe) == (97, 97)
    chain.mine(20)
    assert chain.finalized == 110
    assert DevChain(blocks=3, finality=10).finalized == 0


def test_a_chain_without_finality_says_so_until_it_is_told() -> None:
    chain = DevChain(blocks=100, finality=None)
    assert chain.finalized is None
    chain.finalize(40)
    assert (chain.finalized, chain.safe) == (40, 40)
    chain.reorg(70)
    assert chain.finalized == 30


@pytest.mark.parametrize("change", ["reorg", "rollback"])
@pytest.mark.parametrize("depth", [0, 11, -1])
def test_a_reorg_that_is_too_deep_is_refused_and_changes_nothing(change: str, depth: int) -> None:
    chain = DevChain(blocks=10)
    before = hashes(chain)
    with pytest.raises(Invalid, match="depth must be from 1 to 10"):
        getattr(chain, change)(depth)
    assert hashes(chain) == before


def test_the_genesis_block_survives_the_deepest_reorg() -> None:
    chain = DevChain(blocks=10)
    genesis = chain.block(0)
    chain.reorg(10)
    assert chain.block(0) == genesis


@pytest.mark.parametrize(
    ("forks", "refusal"),
    [
        ((), "must begin at block 0"),
        (("atlantis",), "'atlantis' isn't known; there are frontier, byzantium"),
        (("osaka@5",), "must begin at block 0"),
        (("osaka", "amsterdam"), "begin at a higher block"),
        (("osaka", "prague@5"), "later than the one before"),
        (("@5",), "NAME or NAME@BLOCK"),
        (("osaka", "amsterdam@"), "NAME or NAME@BLOCK"),
        (("osaka", "amsterdam@-1"), "NAME or NAME@BLOCK"),
        (("osaka", "amsterdam@²"), "NAME or NAME@BLOCK"),
    ],
)
def test_forks_that_no_chain_can_have_are_refused(forks: tuple[str, ...], refusal: str) -> None:
    with pytest.raises(Invalid, match=refusal):
        DevChain(0, forks=forks)


def test_since_amsterdam_payments_of_ether_are_logged_by_the_protocol() -> None:
    chain = DevChain(3, blocks=40, forks=("osaka", "amsterdam@20"))
    system = "0x" + "ff" * 19 + "fe"
    for height in range(41):
        block = raw(chain, height)
        for tx, receipt in zip(block.block["transactions"], block.receipts or [], strict=True):
            native = [log for log in receipt["logs"] if log["address"] == system]
            pays = int(tx["value"], 16) and tx["to"] != tx["from"] and receipt["status"] == "0x1"
            assert len(native) == bool(pays and height >= 20)
            assert [int(log["data"], 16) for log in native] == [int(tx["value"], 16)] * len(native)
    assert any(log.address == system for block in chain.blocks(20, 40) for log in block.logs)


@pytest.mark.parametrize(
    "options",
    [
        {"transactions_per_block": -1},
        {"logs_per_transaction": 10**6},
        {"chain_id": 0},
        {"blocks": -1},
        {"finality": -5},
    ],
)
def test_impossible_chains_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(Invalid, match=next(iter(options)).split("_per_")[0]):
        DevChain(0, **options)


class Turns(Event):
    """Lets an autopilot take so many turns, without waiting."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self._turns = turns

    def wait(self, timeout: float | None = None) -> bool:
        self._turns -= 1
        return self._turns < 0


def test_a_chain_on_autopilot_grows_by_a_block_a_turn_and_reorgs_now_and_then() -> None:
    chain, calm = DevChain(6, blocks=10), DevChain(6, blocks=10)
    Autopilot(1.0, reorg_every=4, reorg_depth=2).run(chain, Turns(9))
    Autopilot(1.0).run(calm, Turns(9))
    assert chain.head == calm.head == 19
    first_difference = next(
        height
        for height, pair in enumerate(zip(hashes(chain), hashes(calm), strict=True))
        if pair[0] != pair[1]
    )
    assert first_difference == 12
