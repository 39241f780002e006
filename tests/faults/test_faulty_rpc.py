"""An endpoint that fails, lies or lags never gets wrong or partial blocks through.

With a second, honest endpoint the range comes out right; alone, the reading fails and says which block, which
endpoint and what. Faults that cost nothing but time are overcome alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.faulty_rpc import Fault, FaultyRpc
from tracelake.domain.errors import Unavailable
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import running
from tracelake.evm.fetch import fetch_blocks
from tracelake.evm.raw_block import BlockMismatch, RawBlock, Verify
from tracelake.evm.rpc.config import pool_of
from tracelake.evm.rpc.errors import BlockNotFound, RpcRefused, RpcUnavailable
from tracelake.evm.rpc.pool import Pool

HEAD = 60
BLOCKS = range(5, 35)
LIED_ABOUT = 12
BLOCK = "eth_getBlockByNumber"
RECEIPTS = "eth_getBlockReceipts"


@dataclass(frozen=True, slots=True)
class Scene:
    node: str
    chain: DevChain
    faulty: FaultyRpc
    right: list[tuple[Any, Any]]

    def pool(self, *urls: str, deadline: float = 20) -> Pool:
        options = {"chain_id": self.chain.chain_id, "deadline_seconds": deadline, "timeout_seconds": 0.5}
        return Pool(pool_of(*urls, **options))

    def alone(self, deadline: float = 20) -> Pool:
        return self.pool(self.faulty.url, deadline=deadline)

    def with_another(self) -> Pool:
        """The faulty one is asked first: the other is under suspicion, for no reason."""
        pool = self.pool(self.faulty.url, self.node)
        pool.chain_id()
        for _ in range(6):
            pool.distrust(self.node.removeprefix("http://"), "a rumour")
        return pool


@pytest.fixture(scope="module")
def standing() -> Iterator[Scene]:
    chain = DevChain(seed=11, blocks=HEAD)
    with running(chain) as node, FaultyRpc(node.url) as faulty:
        with Pool(pool_of(node.url)) as pool:
            right = shown(fetch_blocks(pool, BLOCKS, receipts=True))
        yield Scene(node.url, chain, faulty, right)


@pytest.fixture
def scene(standing: Scene) -> Iterator[Scene]:
    yield standing
    standing.faulty.honest()


def shown(blocks: Iterator[RawBlock]) -> list[tuple[Any, Any]]:
    return [(raw.block, raw.receipts) for raw in blocks]


def read(pool: Pool, verify: Verify = Verify.FULL) -> list[tuple[Any, Any]]:
    return shown(fetch_blocks(pool, BLOCKS, receipts=True, verify=verify))


ANY = {
    "429 with Retry-After": (Fault.TOO_MANY_REQUESTS, {"method": BLOCK, "value": 30}),
    "429 without": (Fault.TOO_MANY_REQUESTS, {"method": BLOCK}),
    "500": (Fault.SERVER_ERROR, {"method": BLOCK}),
    "503": (Fault.UNAVAILABLE, {"method": BLOCK}),
    "403": (Fault.FORBIDDEN, {"method": BLOCK}),
    "hang": (Fault.HANG, {"method": BLOCK}),
    "closed": (Fault.CLOSE, {"method": BLOCK}),
    "cut": (Fault.CUT, {"method": BLOCK}),
    "truncated": (Fault.TRUNCATED, {"method": BLOCK}),
    "html": (Fault.HTML, {"method": BLOCK}),
    "missing item": (Fault.MISSING_ITEM, {"method": BLOCK}),
    "doubled item": (Fault.DOUBLED_ITEM, {"method": BLOCK}),
    "wrong id": (Fault.WRONG_ID, {"method": BLOCK}),
    "null block": (Fault.NULL, {"method": BLOCK, "block": LIED_ABOUT}),
    "null receipts": (Fault.NULL, {"method": RECEIPTS, "block": LIED_ABOUT}),
    "empty block": (Fault.EMPTY, {"method": BLOCK, "block": LIED_ABOUT}),
    "empty receipts": (Fault.EMPTY, {"method": RECEIPTS, "block": LIED_ABOUT}),
    "error for a block": (Fault.ITEM_ERROR, {"method": BLOCK, "block": LIED_ABOUT}),
    "error for receipts": (Fault.ITEM_ERROR, {"method": RECEIPTS, "block": LIED_ABOUT}),
    "no such method": (Fault.NO_METHOD, {"method": BLOCK}),
    "lag": (Fault.LAG, {"value": HEAD - LIED_ABOUT}),
    "receipts of another block": (Fault.OTHER_RECEIPTS, {"block": LIED_ABOUT}),
    "missing log": (Fault.MISSING_LOG, {"block": LIED_ABOUT}),
    "doubled log": (Fault.DOUBLED_LOG, {"block": LIED_ABOUT}),
    "altered log": (Fault.ALTERED_LOG, {"block": LIED_ABOUT}),
    "wrong bloom": (Fault.WRONG_BLOOM, {"block": LIED_ABOUT}),
    "wrong receipts root": (Fault.WRONG_RECEIPTS_ROOT, {"block": LIED_ABOUT}),
    "wrong parent": (Fault.WRONG_PARENT, {"block": LIED_ABOUT}),
}
"""Each of these is fatal for an endpoint on its own."""

LIES = {
    Fault.ALTERED_LOG: "root",
    Fault.MISSING_LOG: "missing or double",
    Fault.DOUBLED_LOG: "missing or double",
    Fault.WRONG_BLOOM: "logsBloom",
    Fault.WRONG_RECEIPTS_ROOT: "hash",
    Fault.WRONG_PARENT: "hash",
}
"""What verification says of each."""

PATIENCE = {fault: 0.6 for fault, options in ANY.values() if "block" not in options} | {Fault.ITEM_ERROR: 3.0}
"""They may pass, and are given time to. An error for a block is named in the end if it was received once."""

OVERCOME = {
    "429 once, with Retry-After": (Fault.TOO_MANY_REQUESTS, {"method": BLOCK, "value": 1, "times": 1}),
    "429 twice, without": (Fault.TOO_MANY_REQUESTS, {"method": BLOCK, "times": 2}),
    "500 once": (Fault.SERVER_ERROR, {"method": BLOCK, "times": 1}),
    "hang once": (Fault.HANG, {"method": BLOCK, "times": 1}),
    "cut once": (Fault.CUT, {"method": BLOCK, "times": 1}),
    "closed once": (Fault.CLOSE, {"method": BLOCK, "times": 1}),
    "truncated once": (Fault.TRUNCATED, {"method": BLOCK, "times": 1}),
    "shuffled": (Fault.SHUFFLED, {}),
    "missing item now and then": (Fault.MISSING_ITEM, {"method": BLOCK, "times": 3}),
    "no batches": (Fault.BATCH_REFUSED, {}),
    "small batches": (Fault.MAX_BATCH, {"value": 3}),
    "null receipts at first": (Fault.NULL, {"method": RECEIPTS, "times": 3}),
    "a block that comes late": (Fault.NULL, {"method": BLOCK, "block": LIED_ABOUT, "times": 1}),
    "errors for some items": (Fault.ITEM_ERROR, {"method": BLOCK, "times": 3}),
    "no eth_getBlockReceipts": (Fault.NO_METHOD, {"method": RECEIPTS}),
    "receipts of another block once": (Fault.OTHER_RECEIPTS, {"block": LIED_ABOUT, "times": 1}),
    "altered log once": (Fault.ALTERED_LOG, {"block": LIED_ABOUT, "times": 1}),
    "a head that isn't there": (Fault.AHEAD, {"value": 5}),
}


@pytest.mark.parametrize("name", [*ANY, *OVERCOME])
def test_with_another_endpoint_the_right_blocks_come_out(scene: Scene, name: str) -> None:
    fault, options = {**ANY, **OVERCOME}[name]
    lie = scene.faulty.lie(fault, **options)
    with scene.with_another() as pool:
        assert read(pool) == scene.right
    assert lie.applied or fault is Fault.AHEAD


@pytest.mark.parametrize("name", [name for name, (fault, _) in ANY.items() if fault not in LIES])
def test_alone_it_fails_and_says_which_block_which_endpoint_and_what(scene: Scene, name: str) -> None:
    fault, options = ANY[name]
    scene.faulty.lie(fault, **options)
    got: list[RawBlock] = []
    with (
        scene.alone(PATIENCE.get(fault, 20)) as pool,
        pytest.raises((Unavailable, RpcRefused)) as failed,
    ):
        got.extend(fetch_blocks(pool, BLOCKS, receipts=True))
    assert [(raw.block, raw.receipts) for raw in got] == scene.right[: len(got)]
    assert scene.faulty.name in failed.value.message
    assert "block" in failed.value.message
    if "block" in options:
        assert len(got) <= LIED_ABOUT - BLOCKS.start
        assert f"block {LIED_ABOUT}" in failed.value.message


@pytest.mark.parametrize("name", OVERCOME)
def test_alone_it_is_overcome(scene: Scene, name: str) -> None:
    fault, options = OVERCOME[name]
    lie = scene.faulty.lie(fault, **options)
    with scene.alone() as pool:
        assert read(pool) == scene.right
    assert lie.applied or fault is Fault.AHEAD


@pytest.mark.parametrize("fault", LIES)
def test_full_verification_catches_every_lie_about_a_block(scene: Scene, fault: Fault) -> None:
    said = rf"block {LIED_ABOUT} from {scene.faulty.name}: .*{LIES[fault]}"
    scene.faulty.lie(fault, block=LIED_ABOUT)
    with scene.alone() as pool, pytest.raises(BlockMismatch, match=said):
        read(pool)


@pytest.mark.parametrize("fault", [Fault.MISSING_LOG, Fault.DOUBLED_LOG, Fault.WRONG_BLOOM])
def test_bloom_verification_catches_logs_that_do_not_fit(scene: Scene, fault: Fault) -> None:
    scene.faulty.lie(fault, block=LIED_ABOUT)
    with scene.alone() as pool, pytest.raises(BlockMismatch, match=f"block {LIED_ABOUT} from "):
        read(pool, Verify.BLOOM)


def test_a_broken_chain_is_noticed_even_unverified(scene: Scene) -> None:
    scene.faulty.lie(Fault.WRONG_PARENT, block=LIED_ABOUT)
    with (
        scene.alone() as pool,
        pytest.raises(BlockMismatch, match=r"parentHash 0xabab.* isn't the hash of block 11"),
    ):
        read(pool, Verify.OFF)


def test_when_all_lie_each_is_named(scene: Scene) -> None:
    with FaultyRpc(scene.node) as other:
        scene.faulty.lie(Fault.ALTERED_LOG, block=LIED_ABOUT)
        other.lie(Fault.MISSING_LOG, block=LIED_ABOUT)
        with scene.pool(scene.faulty.url, other.url) as pool, pytest.raises(BlockMismatch) as failed:
            read(pool)
    assert f"block {LIED_ABOUT} from " in failed.value.message
    assert f"{scene.faulty.name}: " in failed.value.message
    assert f"{other.name}: " in failed.value.message


def test_when_one_lies_and_the_other_is_gone_both_are_said(scene: Scene) -> None:
    with FaultyRpc(scene.node) as other:
        gone = other.url
    scene.faulty.lie(Fault.ALTERED_LOG, block=LIED_ABOUT)
    with (
        scene.pool(scene.faulty.url, gone) as pool,
        pytest.raises(BlockMismatch, match=f"block {LIED_ABOUT}"),
    ):
        read(pool)


def test_a_block_past_everybodys_tip_is_named(scene: Scene) -> None:
    scene.faulty.lie(Fault.LAG, value=3)
    with (
        scene.with_another() as pool,
        pytest.raises(BlockNotFound, match=f"block {HEAD + 1} isn't there") as failed,
    ):
        list(fetch_blocks(pool, range(HEAD - 2, HEAD + 5), receipts=True))
    assert failed.value.number == HEAD + 1


def test_an_endpoint_on_another_chain_is_left_out_and_named(scene: Scene) -> None:
    scene.faulty.lie(Fault.OTHER_CHAIN, value=5)
    before = scene.faulty.calls(BLOCK)
    with scene.pool(scene.faulty.url, scene.node) as pool:
        assert pool.chain_id() == scene.chain.chain_id
        assert read(pool) == scene.right
        left_out = next(each for each in pool.stats() if each.name == scene.faulty.name)
        assert (left_out.state, left_out.last_problem) == (
            "left out",
            f"it is on chain 5, not on {scene.chain.chain_id}",
        )
        assert scene.faulty.calls(BLOCK) == before
    with scene.alone() as pool, pytest.raises(RpcUnavailable, match=f"{scene.faulty.name}: it is on chain 5"):
        read(pool)


def test_logs_are_read_in_halves_where_a_range_is_too_long(scene: Scene) -> None:
    with scene.pool(scene.node) as pool:
        right = pool.logs(0, HEAD)
    limit = scene.faulty.lie(Fault.RANGE_LIMIT, value=7)
    with scene.alone() as pool:
        assert pool.logs(0, HEAD) == right
    assert limit.applied


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault.NULL, "null for logs"),
        (Fault.ITEM_ERROR, "internal error"),
        (Fault.DOUBLED_LOG, "the same log twice"),
    ],
)
def test_logs_that_are_none_are_not_taken_for_no_logs(scene: Scene, fault: Fault, said: str) -> None:
    scene.faulty.lie(fault, method="eth_getLogs")
    with scene.alone(0.6) as pool, pytest.raises(RpcUnavailable, match=f"{scene.faulty.name}: .*{said}"):
        pool.logs(0, HEAD)


def test_no_logs_from_an_endpoint_that_lags_are_asked_of_another(scene: Scene) -> None:
    with scene.pool(scene.node) as pool:
        right = pool.logs(HEAD - 5, HEAD)
        with pytest.raises(BlockNotFound, match=f"block {HEAD + 2} isn't there"):
            pool.logs(HEAD - 5, HEAD + 2)
    scene.faulty.lie(Fault.EMPTY, method="eth_getLogs")
    scene.faulty.lie(Fault.LAG, value=3)
    with scene.with_another() as pool:
        assert pool.logs(HEAD - 5, HEAD) == right
