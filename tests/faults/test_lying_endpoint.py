"""Every lie that ``full`` catches is caught where blocks are read, by an ingest and by a follower alike: what they
write is the honest block, from another endpoint. A fork that this version doesn't know stops them at once, unless
another endpoint shows that there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import orjson
import pytest

from tests.support.block_lies import LIES, Outcome, outcome
from tests.support.faulty_rpc import Fault, FaultyRpc
from tests.support.recorded_blocks import synthetic_chain
from tracelake.domain.errors import Unavailable
from tracelake.domain.event_abi import SYSTEM_ADDRESS
from tracelake.evm.decode import decode
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import running
from tracelake.evm.fetch import fetch_blocks
from tracelake.evm.forks import Fork
from tracelake.evm.raw_block import ChainTable, RawBlock, Senders, UnknownFork, Verify, need_receipts
from tracelake.evm.rpc.config import pool_of
from tracelake.evm.rpc.pool import Pool
from tracelake.operators.block_follower.decide import FollowerConfig
from tracelake.operators.block_follower.load import FollowedTables, InProcessLoader

OF_DEV_CHAIN = [lie for lie in LIES if lie.block == "synthetic Osaka"]
CAUGHT = [lie for lie in OF_DEV_CHAIN if outcome(lie, Verify.FULL) is Outcome.CAUGHT]
HONEST = OF_DEV_CHAIN[0].honest.raw
ABOUT = HONEST.number
TABLES = (ChainTable.BLOCKS, ChainTable.TRANSACTIONS, ChainTable.LOGS)
Blocks = list[tuple[Any, Any]]


@pytest.fixture(scope="module")
def chain() -> DevChain:
    return synthetic_chain(Fork.OSAKA, blocks=ABOUT + 4)


@pytest.fixture(scope="module")
def node(chain: DevChain) -> Iterator[str]:
    with running(chain) as served:
        yield served.url


@pytest.fixture
def liar(node: str) -> Iterator[FaultyRpc]:
    with FaultyRpc(node) as faulty:
        yield faulty


def ingested(pool: Pool, chain: DevChain) -> Blocks:
    """With what a cell of an ingest asks for (``fetch_span``)."""
    read = fetch_blocks(
        pool,
        range(ABOUT, ABOUT + 1),
        receipts=need_receipts(TABLES),
        verify=Verify.FULL,
        senders=Senders.DERIVE,
    )
    return [(raw.block, raw.receipts) for raw in read]


class Staged:
    """In place of the follower's tables: keeps what it is given."""

    needs_receipts, needs_traces = True, False

    def __init__(self) -> None:
        self.blocks: Blocks = []

    def stage(self, raw: list[RawBlock], chain_id: int) -> None:
        self.blocks += [(each.block, each.receipts) for each in raw]


def followed(pool: Pool, chain: DevChain) -> Blocks:
    staged = Staged()
    config = FollowerConfig.parse({"rpc_pool": "main", "chain_id": chain.chain_id})
    InProcessLoader(cast("FollowedTables", staged), pool, config).load(ABOUT, ABOUT, None)
    return staged.blocks


READERS: list[Callable[[Pool, DevChain], Blocks]] = [ingested, followed]


@contextmanager
def liar_first(liar: FaultyRpc, *others: str) -> Iterator[Pool]:
    """A pool that asks the liar first: the others are under suspicion, for no reason."""
    with Pool(pool_of(liar.url, *others)) as pool:
        pool.chain_id()
        for other in others:
            for _ in range(6):
                pool.distrust(other.removeprefix("http://"), "a rumour")
        yield pool


@pytest.mark.parametrize("read", READERS)
def test_every_lie_that_full_catches_is_caught_on_the_way(
    chain: DevChain, node: str, liar: FaultyRpc, read: Callable[[Pool, DevChain], Blocks]
) -> None:
    assert len(CAUGHT) > 15
    for lie in CAUGHT:
        forgery = lie.forged().raw
        forged = liar.lie(Fault.FORGED, block=ABOUT, value=(forgery.block, forgery.receipts))
        with liar_first(liar, node) as pool:
            assert read(pool, chain) == [(HONEST.block, HONEST.receipts)], lie.name
        assert forged.applied, lie.name
        liar.honest()


def of_a_newer_fork() -> tuple[Any, Any]:
    """The honest block with a header field that nobody knows, under another hash."""
    contents = orjson.dumps([{**HONEST.block, "stateExpiryRoot": "0x" + "11" * 32}, HONEST.receipts])
    block, receipts = orjson.loads(contents.replace(HONEST.block["hash"].encode(), b"0x" + b"77" * 32))
    return block, receipts


@pytest.mark.parametrize("read", READERS)
def test_a_fork_that_nobody_knows_stops_the_reading_at_once(
    chain: DevChain, liar: FaultyRpc, read: Callable[[Pool, DevChain], Blocks]
) -> None:
    forged = liar.lie(Fault.FORGED, block=ABOUT, value=of_a_newer_fork())
    with liar_first(liar) as pool, pytest.raises(UnknownFork) as refused:
        read(pool, chain)
    assert not isinstance(refused.value, Unavailable)
    assert (
        "it has stateExpiryRoot: newer fork than this version knows; `verify: bloom` works, or upgrade"
        in str(refused.value)
    )
    # Its block and receipts were asked for once.
    assert forged.applied == 2


@pytest.mark.parametrize("read", READERS)
def test_a_fork_that_only_one_endpoint_knows_is_a_lie(
    chain: DevChain, node: str, liar: FaultyRpc, read: Callable[[Pool, DevChain], Blocks]
) -> None:
    forged = liar.lie(Fault.FORGED, block=ABOUT, value=of_a_newer_fork())
    with liar_first(liar, node) as pool:
        assert read(pool, chain) == [(HONEST.block, HONEST.receipts)]
    assert forged.applied


def test_a_newer_fork_is_read_with_bloom(chain: DevChain, liar: FaultyRpc) -> None:
    liar.lie(Fault.FORGED, block=ABOUT, value=of_a_newer_fork())
    with liar_first(liar) as pool:
        [raw] = fetch_blocks(pool, range(ABOUT, ABOUT + 1), receipts=True, verify=Verify.BLOOM)
    assert decode([raw], ChainTable.LOGS, chain.chain_id).num_rows


def test_a_fork_may_begin_in_the_middle_of_a_range() -> None:
    """All that came before Osaka begin on other heights of the dev chain's own tests."""
    growing = DevChain(5, blocks=30, forks=("prague", "osaka@9", "amsterdam@17"))
    with running(growing) as served, Pool(pool_of(served.url)) as pool:
        blocks = list(fetch_blocks(pool, range(31), receipts=True))
    assert [("slotNumber" in raw.block) for raw in blocks] == [number >= 17 for number in range(31)]
    gas = decode(blocks, ChainTable.BLOCKS, growing.chain_id)["gas_used"].to_pylist()
    logs = decode(blocks, ChainTable.LOGS, growing.chain_id)
    spent = [int(raw.receipts[-1]["cumulativeGasUsed"], 16) if raw.receipts else 0 for raw in blocks]
    assert gas[:17] == spent[:17]
    assert gas[17:] != spent[17:]
    native = [
        number
        for number, address in zip(logs["block_number"].to_pylist(), logs["address"].to_pylist(), strict=True)
        if address == SYSTEM_ADDRESS
    ]
    assert native
    assert min(native) >= 17
