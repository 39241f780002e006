"""A real node's chain and the dev chain's: the same code proves and decodes both, into the same tables."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import anvil as anvil_module
from tests.support.anvil import (
    CHAIN_ID,
    MOST,
    Anvil,
    AnvilChain,
    AnvilError,
    build_random_chain,
    program,
    running_anvil,
)
from tests.support.evm_contracts import TRANSFER
from tracelake.domain.errors import Unavailable
from tracelake.evm.decode import decode
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import running
from tracelake.evm.raw_block import BlockMismatch, ChainTable, RawBlock, Verify
from tracelake.evm.schemas import TABLES
from tracelake.evm.verify import check_block

BLOCKS = 40


def read(node: Anvil) -> list[RawBlock]:
    calls = [
        (method, params)
        for height in range(node.head + 1)
        for method, params in (
            ("eth_getBlockByNumber", [hex(height), True]),
            ("eth_getBlockReceipts", [hex(height)]),
            ("trace_block", [hex(height)]),
        )
    ]
    answers = node.batch(calls)
    return [
        RawBlock(number, block, receipts, traces, "node")
        for number, (block, receipts, traces) in enumerate(
            zip(answers[0::3], answers[1::3], answers[2::3], strict=True)
        )
    ]


def tips(node: Anvil) -> list[str]:
    blocks = node.batch([("eth_getBlockByNumber", [hex(each), False]) for each in range(node.head + 1)])
    return [block["hash"] for block in blocks]


def test_both_chains_are_proven_and_decoded_by_the_same_code_into_the_same_tables(anvil: Anvil) -> None:
    build_random_chain(anvil, seed=1, blocks=BLOCKS)
    with running(DevChain(1, blocks=BLOCKS)) as served:
        other = Anvil(served.url, 0)
        chains = {CHAIN_ID: read(anvil), served.chain.chain_id: read(other)}
        other.close()
    for chain_id, blocks in chains.items():
        assert len(blocks) == BLOCKS + 1
        for block in blocks:
            check_block(block, Verify.FULL, chain_id)
        for dataset in ChainTable:
            table = decode(blocks, dataset, chain_id)
            assert table.schema == TABLES[dataset].arrow
            if dataset is not ChainTable.WITHDRAWALS or chain_id != CHAIN_ID:
                assert table.num_rows > 0


def test_traces_of_every_kind_are_accepted_from_a_real_node_and_refused_when_some_are_missing(
    anvil: Anvil,
) -> None:
    sender = anvil.accounts()[0]
    # Calls the identity precompile, creates an empty contract, destroys itself in favour of its caller.
    runtime = "5f5f5f5f5f60045af150" + "5f5f5ff050" + "33ff"
    [deployed] = anvil.send([{"from": sender, "gas": hex(10**6), "data": "0x60118060095f395ff3" + runtime}])
    anvil.mine()
    contract = anvil.call("eth_getTransactionReceipt", deployed)["contractAddress"]
    anvil.send(
        [
            {"from": sender, "to": contract, "gas": hex(10**6), "value": "0x7"},
            {"from": sender, "to": "0x" + "00" * 19 + "02", "gas": hex(10**6), "data": "0x1234"},
            {"from": sender, "gas": hex(10**6), "data": "0xfe"},
            {"from": sender, "to": sender, "gas": hex(21_000), "value": "0x1"},
        ]
    )
    anvil.mine()
    for block in (blocks := read(anvil)):
        check_block(block, Verify.FULL, CHAIN_ID)
    last = blocks[-1]
    traces = last.traces or []
    assert {each["type"] for each in traces} == {"call", "create", "suicide"}
    assert [each["traceAddress"] for each in traces[:3]] == [[], [0], [1]]
    for lie in ([], traces[: len(traces) // 2], traces[1:], [*traces, traces[-1]], blocks[1].traces or []):
        for level in (Verify.FULL, Verify.BLOOM):
            with pytest.raises(BlockMismatch):
                check_block(RawBlock(last.number, last.block, last.receipts, lie, "node"), level, CHAIN_ID)


def test_a_random_chain_has_tokens_of_both_kinds_all_types_failures_and_huge_amounts(anvil: Anvil) -> None:
    chain = build_random_chain(anvil, seed=2, blocks=80)
    blocks = read(anvil)
    transactions = [each for block in blocks for each in block.block["transactions"]]
    receipts = [each for block in blocks for each in block.receipts or ()]
    assert {each["type"] for each in transactions} == {"0x0", "0x1", "0x2", "0x4"}
    assert {"chainId" in each for each in transactions if each["type"] == "0x0"} == {True, False}
    assert {each["status"] for each in receipts} == {"0x0", "0x1"}
    assert any(not block.block["transactions"] for block in blocks[1:])
    assert max(int(each["value"], 16) for each in transactions) == MOST - 2**128
    assert max(int(each["gas"], 16) for each in transactions) > 2**32
    logs = [log for each in receipts for log in each["logs"]]
    transfers = [log for log in logs if log["topics"][:1] == ["0x" + TRANSFER.hex()]]
    assert {len(log["topics"]) for log in transfers if log["address"] in chain.coins} == {3}
    assert {len(log["topics"]) for log in transfers if log["address"] in chain.collections} == {4}
    assert {len(log["topics"]) for log in logs} == {0, 1, 3, 4}
    assert MOST in {int(log["data"], 16) for log in transfers if len(log["topics"]) == 3}


def test_the_same_seed_builds_the_same_chain_hash_for_hash(anvil: Anvil) -> None:
    def live(node: Anvil) -> list[str]:
        chain = AnvilChain(node, seed=3)
        chain.grow(8)
        chain.reorg(3)
        node.rollback(2)
        chain.grow(4)
        return tips(node)

    with running_anvil() as other:
        assert live(anvil) == live(other)


def test_reorgs_and_rollbacks_replace_and_remove_blocks_and_leave_a_chain_that_can_be_proven(
    anvil: Anvil,
) -> None:
    chain = build_random_chain(anvil, seed=4, blocks=12)
    before = tips(anvil)
    assert chain.reorg(5) == 12
    after = tips(anvil)
    assert after[:8] == before[:8]
    assert not set(after[8:]) & set(before[8:])
    assert anvil.rollback(4) == 8
    assert anvil.block(9) is None
    assert chain.grow(6) == 14
    assert tips(anvil)[:9] == after[:9]
    for block in read(anvil):
        check_block(block, Verify.FULL, CHAIN_ID)


def test_a_node_of_a_test_tells_final_from_fresh_blocks(anvil: Anvil) -> None:
    anvil.mine(10)
    names = ("latest", "safe", "finalized")
    blocks = anvil.batch([("eth_getBlockByNumber", [name, False]) for name in names])
    assert [int(block["number"], 16) for block in blocks] == [10, 9, 8]


def test_blobs_decode_but_their_blocks_cannot_be_proven_on_anvil(anvil: Anvil) -> None:
    """It hashes blobs along with their transactions; if that changes, the exception in ``anvil_chain`` can go."""
    build_random_chain(anvil, seed=5, blocks=5, blobs=True)
    blocks = read(anvil)
    with_blobs = [
        block for block in blocks if any(each["type"] == "0x3" for each in block.block["transactions"])
    ]
    assert with_blobs
    assert decode(with_blobs, ChainTable.TRANSACTIONS, CHAIN_ID).num_rows > 0
    for block in with_blobs:
        check_block(block, Verify.BLOOM, CHAIN_ID)
        with pytest.raises(BlockMismatch, match="transactions"):
            check_block(block, Verify.FULL, CHAIN_ID)


def test_a_call_that_the_node_refuses_is_an_error(anvil: Anvil) -> None:
    with pytest.raises(AnvilError, match="anvil_reorg"):
        anvil.reorg(5)


def test_a_node_ends_with_the_process_that_started_it() -> None:
    source = """
from tests.support.anvil import running_anvil
with running_anvil() as node:
    print(node.pid, flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as starter:
        assert starter.stdout is not None
        node = os.pidfd_open(int(starter.stdout.readline()))
        starter.kill()
    ended, _, _ = select.select([node], [], [], 30)
    os.close(node)
    assert ended


def test_a_machine_without_anvil_is_told_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TRACELAKE_ANVIL", raising=False)
    monkeypatch.setattr(anvil_module, "_ROOT", tmp_path)
    with pytest.raises(Unavailable, match="scripts/install-anvil"):
        program()
