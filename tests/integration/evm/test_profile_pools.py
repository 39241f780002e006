"""Blocks of other chains through a pool: receipts that are left out, and answers that no endpoint betters."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.faulty_rpc import Fault, FaultyRpc
from tests.support.profile_blocks import recorded, with_state_sync
from tracelake.domain.errors import Invalid
from tracelake.evm.fetch import fetch_blocks
from tracelake.evm.raw_block import BlockMalformed, RawBlock, UnknownTransactionType, Verify
from tracelake.evm.rpc.config import pool_of
from tracelake.evm.rpc.errors import RpcUnavailable
from tracelake.evm.rpc.pool import Pool

Json = dict[str, Any]
NUMBER = 5_000_000
RECEIPT = "eth_getTransactionReceipt"


def served(raw: RawBlock, chain_id: int, receipts: list[Json], single: list[Json]) -> FaultyRpc:
    """An endpoint with one block, these receipts for it, and those that it has for single transactions."""
    by_hash = {receipt["transactionHash"]: receipt for receipt in single}
    return FaultyRpc(
        {
            "eth_chainId": hex(chain_id),
            "eth_getBlockByNumber": raw.block,
            "eth_getBlockReceipts": receipts,
            RECEIPT: lambda params: by_hash.get(params[0]),
        }
    )


def fetched(pool: Pool, number: int, verify: Verify = Verify.FULL) -> RawBlock:
    [raw] = fetch_blocks(pool, range(number, number + 1), receipts=True, verify=verify)
    return raw


@pytest.mark.parametrize("has_it", [True, False], ids=["alone", "not at all"])
@pytest.mark.parametrize("by_block", [True, False], ids=["by block", "one by one"])
def test_a_receipt_that_is_left_out_is_asked_for_alone(by_block: bool, has_it: bool) -> None:
    raw = with_state_sync(NUMBER)
    assert raw.receipts is not None
    whole, sync = raw.receipts[:2], raw.receipts[2]
    with (
        served(raw, 137, whole, [*whole, sync] if has_it else whole) as node,
        Pool(pool_of(node.url)) as pool,
    ):
        if not by_block:
            node.lie(Fault.NO_METHOD, method="eth_getBlockReceipts")
        # The made block is signed for another chain; that is what full would find.
        found = fetched(pool, NUMBER, Verify.OFF)
        assert found.receipts == ([*whole, sync] if has_it else whole)
        assert found.profile.name == "polygon"


def test_receipts_that_are_missing_on_other_chains_are_no_answer() -> None:
    raw = with_state_sync(NUMBER)
    assert raw.receipts is not None
    with (
        served(raw, 31337, raw.receipts[:2], raw.receipts) as node,
        Pool(pool_of(node.url, deadline_seconds=2.0)) as pool,
        pytest.raises(RpcUnavailable, match="2 receipts for the 3 transactions"),
    ):
        fetched(pool, NUMBER)


def test_a_configured_profile_is_used_and_one_that_can_not_be_proven_is_refused_unasked() -> None:
    raw, chain_id = recorded("base_274")
    assert raw.receipts is not None
    with served(raw, chain_id, raw.receipts, []) as node:
        with Pool(pool_of(node.url, chain="optimism")) as pool:
            assert fetched(pool, raw.number).profile.name == "optimism"
        asked = node.requests
        with Pool(pool_of(node.url, chain="cronos")) as pool, pytest.raises(Invalid, match="CometBFT's"):
            fetched(pool, raw.number)
        assert node.requests == asked


def test_a_type_that_is_not_known_is_asked_for_once_of_each_endpoint_and_not_again() -> None:
    raw, chain_id = recorded("base_274")
    assert raw.receipts is not None
    with (
        served(raw, chain_id, raw.receipts, []) as one,
        served(raw, chain_id, raw.receipts, []) as other,
        Pool(pool_of(one.url, other.url, chain="ethereum")) as pool,
    ):
        begun = time.monotonic()
        with pytest.raises(UnknownTransactionType, match="chain profile ethereum doesn't have it"):
            fetched(pool, raw.number)
        blocks = [
            call for node in (one, other) for call in node.asked if call["method"] == "eth_getBlockByNumber"
        ]
        assert len(blocks) == 2
        assert time.monotonic() - begun < 5, "nothing was waited for"


@pytest.mark.parametrize(("fault", "value"), [(Fault.OTHER_TYPE, "0x55"), (Fault.FIELD_GONE, "stateRoot")])
def test_one_endpoint_alone_can_not_stop_the_others(fault: Fault, value: str) -> None:
    raw, chain_id = recorded("base_274")
    assert raw.receipts is not None
    with (
        served(raw, chain_id, raw.receipts, []) as lying,
        served(raw, chain_id, raw.receipts, []) as honest,
        Pool(pool_of(lying.url, honest.url)) as pool,
    ):
        lying.lie(fault, value=value)
        assert fetched(pool, raw.number).endpoint == honest.name


def test_a_block_that_every_endpoint_sends_malformed_is_not_tried_again_later() -> None:
    raw, chain_id = recorded("base_274")
    assert raw.receipts is not None
    with (
        served(raw, chain_id, raw.receipts, []) as one,
        served(raw, chain_id, raw.receipts, []) as other,
        Pool(pool_of(one.url, other.url)) as pool,
    ):
        for node in (one, other):
            node.lie(Fault.FIELD_GONE, value="stateRoot")
        with pytest.raises(BlockMalformed, match="stateRoot is missing; verify: bloom works") as failed:
            fetched(pool, raw.number)
        assert isinstance(failed.value, Invalid)
