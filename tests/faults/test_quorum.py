"""Pools with a quorum: what too few endpoints have isn't believed, however well it is made up.

The liar serves a fork of its own: its blocks have valid hashes and roots, so every proof holds for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.faulty_rpc import Fault, FaultyRpc
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import running
from tracelake.evm.fetch import fetch_blocks
from tracelake.evm.raw_block import BlockMismatch, RawBlock, Verify
from tracelake.evm.rpc.config import pool_of
from tracelake.evm.rpc.errors import NoQuorum
from tracelake.evm.rpc.pool import Pool

HEAD = 40
FORK = 29
"""The last block that the liar's chain shares with the others'."""
BLOCKS = range(5, 36)
ALTERED = 12
"""A block with logs."""


@dataclass(frozen=True, slots=True)
class Scene:
    chain: DevChain
    honest: FaultyRpc
    second: FaultyRpc
    liar: FaultyRpc

    def pool(self, *endpoints: FaultyRpc, quorum: int, first: FaultyRpc | None = None) -> Pool:
        """``first`` is asked first: the others are under suspicion, for no reason."""
        urls = [endpoint.url for endpoint in endpoints]
        options: dict[str, Any] = {"deadline_seconds": 5, "timeout_seconds": 0.5, "quorum": quorum}
        pool = Pool(pool_of(*urls, chain_id=self.chain.chain_id, **options))
        pool.chain_id()
        for endpoint in endpoints if first is not None else ():
            if endpoint is not first:
                pool.distrust(endpoint.name, "a rumour")
        return pool


@pytest.fixture(scope="module")
def standing() -> Iterator[Scene]:
    chain, forked = DevChain(seed=11, blocks=HEAD), DevChain(seed=11, blocks=HEAD)
    forked.reorg(HEAD - FORK, HEAD - FORK + 7)
    with ExitStack() as stack:
        node, other = stack.enter_context(running(chain)), stack.enter_context(running(forked))
        rpcs = [stack.enter_context(FaultyRpc(url)) for url in (node.url, node.url, other.url)]
        yield Scene(chain, *rpcs)


@pytest.fixture
def scene(standing: Scene) -> Iterator[Scene]:
    yield standing
    for endpoint in (standing.honest, standing.second, standing.liar):
        endpoint.honest()


def read(pool: Pool) -> list[RawBlock]:
    return list(fetch_blocks(pool, BLOCKS, receipts=True))


def hashes(scene: Scene) -> list[str]:
    return [block.hash for block in scene.chain.blocks(BLOCKS.start, BLOCKS.stop - 1)]


def test_without_a_quorum_the_furthest_endpoint_is_believed(scene: Scene) -> None:
    with scene.pool(scene.honest, scene.second, scene.liar, quorum=1) as pool:
        assert pool.head(patient=True).endpoint == scene.liar.name


def test_the_head_is_the_highest_block_that_enough_endpoints_have_alike(scene: Scene) -> None:
    with scene.pool(scene.honest, scene.second, scene.liar, quorum=2) as pool:
        head = pool.head(patient=True)
        assert (head.number, head.hash) == (HEAD, scene.chain.blocks(HEAD, HEAD)[0].hash)
        assert pool.disputed is None
        assert list(pool.dissent) == [scene.liar.name], "it is ahead, on a fork of its own"
        assert f"has block {HEAD} as 0x" in pool.dissent[scene.liar.name]
        header = pool.header(HEAD)
        assert header is not None
        assert header["hash"] == head.hash
        assert pool.header(HEAD + 5) is None, "the liar alone has it"


def test_of_two_that_disagree_only_what_both_have_is_believed_and_it_is_shown(scene: Scene) -> None:
    with scene.pool(scene.honest, scene.liar, quorum=2) as pool:
        assert pool.head(patient=True).number == FORK
        assert pool.disputed == FORK + 1
        assert all(f"has block {FORK + 1} as 0x" in view for view in pool.dissent.values())
        assert list(pool.dissent) == [scene.honest.name, scene.liar.name]
        with pytest.raises(NoQuorum) as refused:
            pool.header(FORK + 1)
    for name in (scene.honest.name, scene.liar.name):
        assert f"{name}: 0x" in refused.value.message


def test_endpoints_that_lag_are_named_and_waited_for_only_if_they_are_needed(scene: Scene) -> None:
    scene.second.lie(Fault.LAG, value=6)
    with scene.pool(scene.honest, scene.second, quorum=2) as pool:
        assert pool.head(patient=True).number == HEAD - 6
    with (
        FaultyRpc(scene.honest.url) as third,
        scene.pool(scene.honest, scene.second, third, quorum=2) as pool,
    ):
        assert pool.head(patient=True).number == HEAD
        assert pool.dissent == {scene.second.name: "is 6 blocks behind"}


def test_too_few_endpoints_that_answer_are_no_quorum(scene: Scene) -> None:
    with scene.pool(scene.honest, scene.second, quorum=2) as pool:
        scene.second.lie(Fault.CLOSE)
        with pytest.raises(NoQuorum) as refused:
            pool.head()
        assert f"{scene.honest.name}: is at {HEAD}" in refused.value.message
        with pytest.raises(NoQuorum):
            read(pool)


def test_blocks_of_a_made_up_fork_do_not_come_out_though_they_prove_themselves(scene: Scene) -> None:
    with scene.pool(scene.honest, scene.second, scene.liar, quorum=2, first=scene.liar) as pool:
        with pytest.raises(BlockMismatch) as refused:
            read(pool)
        assert refused.value.endpoint == scene.liar.name
        assert refused.value.number == FORK + 1
        again = read(pool)
    assert [raw.block["hash"] for raw in again] == hashes(scene), "the liar is asked last from then on"
    with scene.pool(scene.honest, scene.liar, quorum=1, first=scene.liar) as pool:
        assert [raw.block["hash"] for raw in read(pool)] != hashes(scene), "without a quorum they do"


def test_a_value_that_no_hash_covers_is_the_one_that_enough_endpoints_have(scene: Scene) -> None:
    scene.second.lie(Fault.WRONG_SIZE, block=12)
    with (
        FaultyRpc(scene.honest.url) as third,
        scene.pool(scene.honest, scene.second, third, quorum=2, first=scene.second) as pool,
    ):
        [found] = [raw.block for raw in read(pool) if raw.number == 12]
    with scene.pool(scene.honest, quorum=1) as pool:
        [right] = [raw.block for raw in read(pool) if raw.number == 12]
    assert found["size"] == right["size"]
    with scene.pool(scene.honest, scene.second, quorum=2) as pool, pytest.raises(NoQuorum) as refused:
        read(pool)
    assert "block 12" in refused.value.message
    assert "other values" in refused.value.message


def test_what_bloom_does_not_prove_must_be_the_same_with_enough_endpoints(scene: Scene) -> None:
    [right] = [raw for raw in read_with_bloom(scene, scene.honest, quorum=1) if raw.number == ALTERED]
    scene.second.lie(Fault.ALTERED_LOG, block=ALTERED)
    [lie] = [raw for raw in read_with_bloom(scene, scene.second, quorum=1) if raw.number == ALTERED]
    assert lie.receipts != right.receipts, "without a quorum it gets through"
    with FaultyRpc(scene.honest.url) as third:
        found = read_with_bloom(scene, scene.honest, scene.second, third, quorum=2)
    assert [raw.receipts for raw in found if raw.number == ALTERED] == [right.receipts]
    with pytest.raises(NoQuorum, match=f"block {ALTERED}"):
        read_with_bloom(scene, scene.honest, scene.second, quorum=2)


def read_with_bloom(scene: Scene, *endpoints: FaultyRpc, quorum: int) -> list[RawBlock]:
    with scene.pool(*endpoints, quorum=quorum) as pool:
        return list(fetch_blocks(pool, BLOCKS, receipts=True, verify=Verify.BLOOM))


def test_a_value_that_some_clients_leave_out_is_left_out_unless_enough_give_it(scene: Scene) -> None:
    scene.second.lie(Fault.NO_SIZE, block=12)
    with scene.pool(scene.honest, scene.second, quorum=2) as pool:
        sizes = {raw.number: raw.block.get("size") for raw in read(pool)}
    assert sizes[12] is None
    assert sizes[13] is not None
