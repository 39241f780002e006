"""The block follower against the dev chain: whatever the chain does, the tables end up equal to it, row by row."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest

from tests.support.anvil import CHAIN_ID, Anvil
from tests.support.databases import install_data, role_dsn
from tests.support.dev_stack import eventually
from tests.support.faulty_rpc import Fault, FaultyRpc
from tests.support.follow_scene import USUAL, Attempt, FollowScene, Reader, node_blocks, node_table
from tests.support.postgres import CloneDatabase
from tracelake.contracts.dispatcher_api import EventIn
from tracelake.domain.chain_status import FollowerFacts, follower_status
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import RunningChain, running
from tracelake.evm.raw_block import UnknownTransactionType
from tracelake.hot.install import READER_ROLE, WRITER_ROLE
from tracelake.operators.block_follower.operator import follow

Serve = Callable[[DevChain], RunningChain]


@pytest.fixture
def scenes(clone_database: CloneDatabase) -> Iterator[Callable[..., FollowScene]]:
    opened: list[FollowScene] = []

    def open_scene(*outputs: str) -> FollowScene:
        dsn = clone_database("data_installed", install_data)
        writing, reading = role_dsn(dsn, WRITER_ROLE), role_dsn(dsn, READER_ROLE)
        opened.append(FollowScene(dsn, writing, reading, outputs or USUAL))
        return opened[-1]

    yield open_scene
    for scene in opened:
        scene.close()


@pytest.fixture
def scene(scenes: Callable[..., FollowScene]) -> FollowScene:
    return scenes()


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda chain: stack.enter_context(running(chain))


def chain_of(blocks: int, **settings: Any) -> DevChain:
    """A chain on which a fork of the protocol begins at block 5."""
    usual = {"finality": 64, "forks": ("osaka", "amsterdam@5")}
    return DevChain(seed=7, chain_id=1, blocks=blocks, **usual | settings)


def assert_equal(scene: FollowScene, node: RunningChain, start: int = 0) -> None:
    """Every table, row by row, and no block more or less than the chain has."""
    raw = node_blocks(node.url, start, node.chain.head)
    for version in scene.platform.versions:
        expected, found = node_table(raw, version.name, 1), scene.table(version.name)
        assert found.schema.names == expected.schema.names
        assert found.to_pylist() == expected.to_pylist(), version.name
        assert version.cursor == node.chain.head


def condition_of(attempt: Attempt) -> str:
    """What people are shown of it."""
    facts = FollowerFacts(now=datetime.now(UTC), status="Running", reported=attempt.wrapper.progress)
    return str(follower_status(facts).condition)


def invalidated(scene: FollowScene) -> list[tuple[int, int]]:
    return [
        (event.invalidate.start, event.invalidate.end)
        for event in scene.platform.received
        if event.invalidate is not None and event.dataset_uuid == scene.platform.versions[0].uuid
    ]


def cursors(scene: FollowScene) -> list[EventIn]:
    uuid = scene.platform.versions[0].uuid
    return [
        event for event in scene.platform.received if event.cursor is not None and event.dataset_uuid == uuid
    ]


def test_an_empty_table_is_filled_from_the_start_and_then_follows_the_tip(
    scene: FollowScene, serve: Serve
) -> None:
    node = serve(chain_of(12))
    attempt = scene.attempt(node.url, max_blocks_per_commit=5)
    attempt.settle()
    assert_equal(scene, node)
    assert [(wish.start, wish.end) for wish in scene.commits] == [(0, 4), (5, 9), (10, 12)]
    node.chain.mine()
    attempt.settle()
    node.chain.mine(3)
    attempt.settle()
    assert_equal(scene, node)
    assert invalidated(scene) == []
    expected = {"head": 16, "tip": 16, "lag": 0, "reorgs": 0, "endpoints": "node0"}
    eventually("its progress", lambda: expected.items() <= attempt.wrapper.progress.items() or None)
    shown = attempt.wrapper.progress
    assert abs(time.time() - shown["head_at"]) < 600
    assert shown["head_time"] > 0
    assert shown["endpoint_states"] == "node0 ok"
    assert condition_of(attempt) == "following"


def test_every_dataset_can_be_followed_by_its_name(scenes: Callable[..., FollowScene], serve: Serve) -> None:
    scene = scenes("withdrawals", "receipts", "blocks")
    node = serve(chain_of(6))
    scene.attempt(node.url).settle()
    assert_equal(scene, node)
    assert scene.table("withdrawals").num_rows > 0


@pytest.mark.parametrize(
    ("outputs", "message"),
    [(("logs",), "needs an output 'blocks'"), (("blocks", "rows"), "no output 'rows'")],
)
def test_outputs_that_make_no_sense_are_refused(
    scenes: Callable[..., FollowScene], outputs: tuple[str, ...], message: str
) -> None:
    with pytest.raises(Invalid, match=message):
        scenes(*outputs).attempt("http://127.0.0.1:1")


def test_a_chain_is_followed_from_a_block_or_from_its_head(
    scenes: Callable[..., FollowScene], serve: Serve
) -> None:
    node = serve(chain_of(9))
    later, latest = scenes(), scenes()
    attempt = latest.attempt(node.url, start_block="latest")
    attempt.settle()
    assert list(latest.hashes()) == [9]
    node.chain.mine(2)
    attempt.settle()
    assert list(latest.hashes()) == [9, 10, 11]
    later.attempt(node.url, start_block=10).settle()
    assert list(later.hashes()) == [10, 11]
    resumed = latest.attempt(node.url, start_block="latest")
    node.chain.mine(1)
    resumed.settle()
    assert list(latest.hashes()) == [9, 10, 11, 12]


def test_a_start_block_that_is_not_there_yet_is_waited_for(scene: FollowScene, serve: Serve) -> None:
    node = serve(chain_of(3))
    attempt = scene.attempt(node.url, start_block=5)
    attempt.settle()
    assert scene.hashes() == {}
    node.chain.mine(3)
    attempt.settle()
    assert list(scene.hashes()) == [5, 6]


@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("longer", [-1, 0, 3])
def test_a_reorg_is_written_at_once_with_what_it_takes_back(
    scene: FollowScene, serve: Serve, depth: int, longer: int
) -> None:
    node = serve(chain_of(20))
    attempt = scene.attempt(node.url)
    attempt.settle()
    before = len(scene.commits)
    node.chain.reorg(depth, depth + longer)
    attempt.settle()
    assert_equal(scene, node)
    [wish] = scene.commits[before:]
    fork = 20 - depth
    assert (wish.start, wish.end) == (fork + 1, max(20, 20 + longer))
    assert invalidated(scene) == [(fork + 1, 20)]
    kinds = ["back" if event.invalidate is not None else "reach" for event in wish.events]
    assert kinds == ["back"] * 3 + ["reach"] * 3
    assert {event.cursor for event in wish.events[3:]} == {20 + longer}
    assert scene.state == {"reorgs": 1, "deepest_reorg": depth}
    assert (attempt.follower.progress.reorgs, attempt.follower.progress.deepest) == (1, depth)


def test_a_reorg_that_comes_back_is_another_one_each_time(scene: FollowScene, serve: Serve) -> None:
    """Two forks, seen in turns: the first chain again after the second."""
    first, second = serve(chain_of(10)), serve(chain_of(10))
    second.chain.reorg(3)
    for node in (first, second, first, second):
        scene.attempt(node.url).settle()
    assert_equal(scene, second)
    ids = [event.id for event in scene.platform.received if event.id is not None]
    assert len(set(ids)) * 3 == len(ids) == 9


def test_a_reorg_that_is_deeper_than_a_commit_never_shows_a_mixture(scene: FollowScene, serve: Serve) -> None:
    node = serve(chain_of(60, finality=None))
    attempt = scene.attempt(node.url, max_blocks_per_commit=8)
    attempt.settle()
    node.chain.reorg(50)
    seen: list[int] = []
    while attempt.step() == 0:
        stored = scene.hashes()
        chain = {number: block.hash for number in stored if (block := node.chain.block(number)) is not None}
        assert stored == chain, "only the new chain is there, however little of it"
        seen.append(max(stored))
    assert seen == [18, 26, 34, 42, 50, 58, 60]
    assert invalidated(scene) == [(11, 60)]
    assert_equal(scene, node)


def test_a_deep_fork_is_found_with_few_questions(
    scene: FollowScene, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = serve(chain_of(400, finality=None, transactions_per_block=0))
    attempt = scene.attempt(node.url)
    attempt.settle()
    asked: list[int | str] = []
    pool = attempt.follower.pool
    header = pool.header

    def counted(which: int | str) -> dict[str, Any] | None:
        asked.append(which)
        return header(which)

    monkeypatch.setattr(pool, "header", counted)
    node.chain.reorg(300)
    attempt.settle()
    assert len(asked) <= 20
    assert invalidated(scene) == [(101, 400)]


def test_a_chain_that_gets_shorter_loses_its_rows_and_grows_again(scene: FollowScene, serve: Serve) -> None:
    node = serve(chain_of(20))
    attempt = scene.attempt(node.url)
    attempt.settle()
    node.chain.rollback(5)
    attempt.settle()
    assert_equal(scene, node)
    assert invalidated(scene) == [(16, 20)]
    assert cursors(scene)[-1].cursor == 15
    node.chain.mine(9)
    attempt.settle()
    assert_equal(scene, node)


def test_a_shorter_chain_is_not_believed_before_its_time(scene: FollowScene, serve: Serve) -> None:
    node = serve(chain_of(20))
    attempt = scene.attempt(node.url, shorter_after_seconds=3600)
    attempt.settle()
    node.chain.rollback(5)
    for _ in range(3):
        assert attempt.step() > 0
    assert max(scene.hashes()) == 20
    node.chain.mine(2)
    attempt.settle()
    # A lower head with other blocks is a reorg, and needs no patience.
    assert_equal(scene, node)


def test_everything_goes_when_the_chain_is_shorter_than_its_first_block(
    scene: FollowScene, serve: Serve
) -> None:
    node = serve(chain_of(20, finality=None))
    attempt = scene.attempt(node.url, start_block=15)
    attempt.settle()
    node.chain.rollback(12)
    attempt.settle()
    assert scene.hashes() == {}
    assert invalidated(scene) == [(15, 20)]
    node.chain.mine(10)
    attempt.settle()
    assert_equal(scene, node, start=15)


def test_an_endpoint_that_lags_takes_nothing_back(scene: FollowScene, serve: Serve) -> None:
    """The one that is up to date goes away for a while; the other still has an older state of the same chain."""
    good, slow = serve(chain_of(20)), serve(chain_of(14))
    attempt = scene.attempt(slow.url, good.url)
    attempt.settle()
    assert max(scene.hashes()) == 20
    slow.chain.mine(3)
    attempt.settle()
    assert invalidated(scene) == []
    assert_equal(scene, good)


def test_an_endpoint_that_is_stuck_on_a_left_fork_takes_nothing_back(
    scene: FollowScene, serve: Serve
) -> None:
    good, stuck = serve(chain_of(20)), serve(chain_of(20))
    stuck.chain.reorg(4)
    attempt = scene.attempt(good.url)
    attempt.settle()
    attempt = scene.attempt(stuck.url, good.url)
    attempt.settle()
    assert invalidated(scene) == []
    assert_equal(scene, good)


def test_with_a_quorum_one_endpoint_alone_is_not_followed_and_its_dissent_is_shown(
    scene: FollowScene, serve: Serve
) -> None:
    """The liar is ahead, on a fork of its own; then it takes one of the two others with it."""
    good, same, liar = serve(chain_of(20)), serve(chain_of(20)), serve(chain_of(20))
    liar.chain.reorg(4, 9)
    attempt = scene.attempt(liar.url, good.url, same.url, quorum=2)
    attempt.settle()
    assert_equal(scene, good)
    shown = "node0 has block 20 as 0x"
    eventually("its progress", lambda: (attempt.wrapper.progress.get("dissent") or "").startswith(shown))
    same.chain.reorg(2, 3)
    attempt.settle()
    assert scene.hashes()[20] == good.chain.blocks(20, 20)[0].hash
    assert invalidated(scene) == []
    disputed = "waiting: the endpoints don't agree on block 19"
    eventually("it says so", lambda: attempt.wrapper.progress.get("message") == disputed)


def test_when_all_endpoints_have_gone_over_to_the_fork_it_is_followed(
    scene: FollowScene, serve: Serve
) -> None:
    one, two = serve(chain_of(20)), serve(chain_of(20))
    attempt = scene.attempt(one.url, two.url)
    attempt.settle()
    two.chain.reorg(4)
    attempt.settle()
    assert invalidated(scene) == []
    one.chain.reorg(4)
    attempt.settle()
    assert_equal(scene, one)
    assert invalidated(scene) == [(17, 20)]


def test_a_reorg_below_what_is_final_stops_the_follower_and_changes_nothing(
    scene: FollowScene, serve: Serve
) -> None:
    node = serve(chain_of(20))
    attempt = scene.attempt(node.url, finality=5)
    attempt.settle()
    assert cursors(scene)[-1].finalized == 15
    before, commits = scene.hashes(), len(scene.commits)
    node.chain.reorg(6, 9)
    with pytest.raises(Invalid, match="block 15 as it is stored, which was final") as raised:
        attempt.settle()
    assert raised.value.reason == "ReorgBelowFinality"
    again = scene.attempt(node.url, finality=5)
    with pytest.raises(Invalid, match="which was final"):
        again.settle()
    assert (scene.hashes(), len(scene.commits)) == (before, commits)


def test_one_endpoint_alone_cannot_take_back_what_is_final(scene: FollowScene, serve: Serve) -> None:
    good, other = serve(chain_of(20)), serve(chain_of(20))
    other.chain.reorg(8, 12)
    scene.attempt(good.url, finality=5).settle()
    attempt = scene.attempt(other.url, good.url, finality=5)
    attempt.settle()
    assert invalidated(scene) == []
    good.chain.mine(6)
    with attempt.following():
        in_step(scene, good)
    assert invalidated(scene) == []


def test_an_endpoint_that_stays_on_its_fork_is_left_behind(scene: FollowScene, serve: Serve) -> None:
    good, stuck = serve(chain_of(20)), serve(chain_of(20))
    attempt = scene.attempt(stuck.url, good.url, poll_seconds=0.05)
    with attempt.following():
        in_step(scene, good)
        good.chain.reorg(4, 9)
        in_step(scene, good)
        for _ in range(5):
            good.chain.mine()
            in_step(scene, good)
    assert_equal(scene, good)
    assert invalidated(scene) == [(17, 20)]


def in_step(scene: FollowScene, node: RunningChain) -> None:
    head = node.chain.block(node.chain.head)
    assert head is not None
    eventually("it is in step", lambda: scene.platform.versions[2].cursor == head.number or None)
    eventually("with the chain", lambda: scene.hashes().get(head.number) == head.hash or None)


def test_a_reorg_down_to_what_is_final_is_followed(scene: FollowScene, serve: Serve) -> None:
    node = serve(chain_of(20))
    attempt = scene.attempt(node.url, finality=5)
    attempt.settle()
    node.chain.reorg(5, 6)
    attempt.settle()
    assert_equal(scene, node)


def test_what_the_chain_calls_finalized_is_announced_and_kept(scene: FollowScene, serve: Serve) -> None:
    node = serve(chain_of(100, finality=10))
    attempt = scene.attempt(node.url)
    attempt.settle()
    node.chain.mine()
    attempt.settle()
    assert cursors(scene)[-1].finalized == 90
    node.chain.reorg(20, 25)
    with pytest.raises(Invalid, match="block 90 as it is stored"):
        attempt.settle()


def test_a_follower_that_was_away_may_find_a_fork_below_todays_final_block(
    scene: FollowScene, serve: Serve
) -> None:
    """What it has stored was not final yet: that the chain's own blocks there are by now is no reason to halt."""
    node = serve(chain_of(20, finality=8))
    scene.attempt(node.url).settle()
    node.chain.reorg(4, 40)
    scene.attempt(node.url).settle()
    assert_equal(scene, node)


def test_it_goes_on_at_what_is_stored(scene: FollowScene, serve: Serve) -> None:
    node = serve(chain_of(10))
    scene.attempt(node.url).settle()
    node.chain.mine(4)
    commits = len(scene.commits)
    scene.attempt(node.url).settle()
    assert [(wish.start, wish.end) for wish in scene.commits[commits:]] == [(11, 14)]
    assert_equal(scene, node)


@pytest.mark.parametrize("change", ["grown", "reorg", "shorter"])
def test_what_a_commit_had_to_say_is_said_by_the_next_attempt(
    scene: FollowScene, serve: Serve, change: str
) -> None:
    """The process dies between the data and the event."""
    node, reader = serve(chain_of(20)), Reader()
    attempt = scene.attempt(node.url)
    attempt.settle()
    read(scene, reader)
    match change:
        case "grown":
            node.chain.mine(3)
        case "reorg":
            node.chain.reorg(5, 7)
        case _:
            node.chain.rollback(5)
    scene.deaf = True
    with pytest.raises(ConnectionError):
        attempt.settle()
    heard = len(scene.platform.received)
    scene.deaf = False
    scene.attempt(node.url).settle()
    assert len(scene.platform.received) > heard
    assert_equal(scene, node)
    read(scene, reader)
    assert reader.rows == scene.hashes()


def test_a_zombie_commits_nothing(scene: FollowScene, serve: Serve) -> None:
    node = serve(chain_of(10))
    zombie = scene.attempt(node.url)
    zombie.settle()
    heir = scene.attempt(node.url)
    heir.settle()
    node.chain.reorg(3, 5)
    # Its login is gone, and its staging tables with it.
    zombie.again()
    with pytest.raises(Unavailable):
        zombie.settle()
    heir.settle()
    assert_equal(scene, node)


@pytest.mark.parametrize("table", ["blocks", "all"])
def test_a_stored_chain_with_a_hole_is_written_again_from_there(
    scene: FollowScene, serve: Serve, table: str
) -> None:
    node = serve(chain_of(20))
    scene.attempt(node.url).settle()
    for name in USUAL if table == "all" else ("blocks",):
        scene.cut(name, 12, 14)
    scene.attempt(node.url).settle()
    assert_equal(scene, node)
    assert invalidated(scene) == [(12, 20)]


def test_a_hole_in_a_chain_that_has_left_its_fork_meanwhile_is_mended(
    scene: FollowScene, serve: Serve
) -> None:
    node = serve(chain_of(20))
    scene.attempt(node.url).settle()
    scene.cut("blocks", 12, 14)
    node.chain.reorg(11)
    scene.attempt(node.url).settle()
    assert_equal(scene, node)
    assert invalidated(scene) == [(10, 20)]


def test_rows_that_are_no_longer_stored_are_taken_back(scene: FollowScene, serve: Serve) -> None:
    """As after a restore of the data database from a backup."""
    node, reader = serve(chain_of(20)), Reader()
    scene.attempt(node.url).settle()
    read(scene, reader)
    for name in USUAL:
        scene.cut(name, 16, 20)
    node.chain.reorg(2)
    scene.attempt(node.url).settle()
    assert_equal(scene, node)
    read(scene, reader)
    assert reader.rows == scene.hashes()


def test_final_rows_that_live_in_files_alone_are_not_fetched_again(scene: FollowScene, serve: Serve) -> None:
    node = serve(chain_of(20))
    scene.attempt(node.url, finality=0).settle()
    for name in USUAL:
        scene.cut(name, 0, 20)
    node.chain.mine(2)
    scene.attempt(node.url, finality=0).settle()
    assert list(scene.hashes()) == [21, 22]
    assert invalidated(scene) == []


def test_what_others_found_wrong_is_written_again(scene: FollowScene, serve: Serve) -> None:
    node, reader = serve(chain_of(20)), Reader()
    attempt = scene.attempt(node.url, max_blocks_per_commit=4)
    attempt.settle()
    read(scene, reader)
    scene.cut("logs", 3, 9)
    for version in scene.platform.versions:
        version.invalidate(3, 9)
    node.chain.mine()
    attempt.settle()
    assert len(scene.platform.refused) == 3, "an attempt that doesn't know of it passes over nothing"
    commits = len(scene.commits)
    scene.attempt(node.url, max_blocks_per_commit=4).settle()
    assert [(wish.start, wish.end) for wish in scene.commits[commits:]] == [(3, 6), (7, 9)]
    assert_equal(scene, node)


def test_blocks_found_missing_are_written_again_and_nothing_else(scene: FollowScene, serve: Serve) -> None:
    node = serve(chain_of(20))
    scene.attempt(node.url, finality=5).settle()
    for name in USUAL:
        scene.cut(name, 3, 9)
    for version in scene.platform.versions:
        version.invalidate(3, 9)
    commits = len(scene.commits)
    attempt = scene.attempt(node.url, finality=5)
    attempt.settle()
    assert [(wish.start, wish.end) for wish in scene.commits[commits:]] == [(3, 9)]
    assert_equal(scene, node)
    node.chain.mine()
    attempt.settle()
    assert_equal(scene, node)
    assert attempt.follower.progress.reorgs == 0


def test_blocks_found_wrong_that_are_not_the_chains_take_all_above_with_them(
    scene: FollowScene, serve: Serve
) -> None:
    node, other = serve(chain_of(20)), serve(chain_of(20))
    other.chain.reorg(10)
    scene.attempt(other.url, finality=2).settle()
    for version in scene.platform.versions:
        version.invalidate(12, 13)
    scene.attempt(node.url, finality=2).settle()
    assert_equal(scene, node)


def test_a_chain_that_was_not_followed_before_is_refused(scene: FollowScene, serve: Serve) -> None:
    node = serve(chain_of(5))
    scene.attempt(node.url).settle()
    other = serve(DevChain(seed=1, chain_id=2, blocks=9))
    with pytest.raises(Invalid, match="the RPC pool is on chain 2, but the job follows chain_id 1"):
        scene.attempt(other.url).settle()
    with pytest.raises(Invalid, match="the stored blocks are of chain 1, not of 2"):
        scene.attempt(other.url, chain_id=2).settle()
    assert_equal(scene, node)


def test_a_commit_that_was_not_answered_is_looked_up_in_the_database(
    scene: FollowScene, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = serve(chain_of(10))
    attempt = scene.attempt(node.url)
    attempt.settle()
    commit = attempt.ctx.commit

    def lost(*args: Any, **more: Any) -> int:
        commit(*args, **more)
        raise Unavailable("DataUnavailable", "the answer got lost")

    node.chain.mine(2)
    with monkeypatch.context() as patch:
        patch.setattr(attempt.ctx, "commit", lost)
        with pytest.raises(Unavailable):
            attempt.settle()
    attempt.again()
    commits = len(scene.commits)
    attempt.settle()
    assert len(scene.commits) == commits, "it was made"
    assert_equal(scene, node)


def read(scene: FollowScene, reader: Reader) -> None:
    def fetch(start: int, end: int) -> dict[int, str]:
        return {number: each for number, each in scene.hashes().items() if start <= number <= end}

    reader.read(scene.platform, scene.platform.versions[0], fetch)


def test_a_reader_that_believes_events_alone_ends_up_with_the_chain(scene: FollowScene, serve: Serve) -> None:
    node, reader = serve(chain_of(10, finality=None)), Reader()
    attempt: Attempt = scene.attempt(node.url)
    changes: list[Callable[[], object]] = [
        lambda: node.chain.mine(3),
        lambda: node.chain.reorg(2),
        lambda: node.chain.reorg(6, 2),
        lambda: node.chain.rollback(3),
        lambda: node.chain.mine(8),
        lambda: node.chain.reorg(1, 4),
    ]
    for place, change in enumerate(changes):
        attempt.settle()
        if place % 2:
            read(scene, reader)
        change()
        if place == 3:
            attempt = scene.attempt(node.url)
    attempt.settle()
    read(scene, reader)
    assert reader.rows == scene.hashes()
    assert_equal(scene, node)


def test_a_chain_that_changes_while_it_is_read_is_never_mixed(scene: FollowScene, serve: Serve) -> None:
    """Nothing waits for anything: the chain changes between any two calls of the follower."""
    node, dice = serve(chain_of(30, finality=None, transactions_per_block=1)), random.Random(4)
    attempt = scene.attempt(node.url, max_blocks_per_commit=5, poll_seconds=0.02)
    with attempt.following():
        for _ in range(120):
            match dice.choice(("mine", "mine", "reorg", "shorter", "look")):
                case "mine":
                    node.chain.mine(dice.randint(1, 4))
                case "reorg":
                    depth = dice.randint(1, min(node.chain.head, 12))
                    node.chain.reorg(depth, depth + dice.randint(-1, 3))
                case "shorter" if node.chain.head > 10:
                    node.chain.rollback(dice.randint(1, 9))
                case _:
                    assert_is_one_chain(scene)
        eventually("it is in step", lambda: scene.platform.versions[2].cursor == node.chain.head or None)
        eventually("with all blocks", lambda: max(scene.hashes(), default=-1) == node.chain.head or None)
    assert_equal(scene, node)


def assert_is_one_chain(scene: FollowScene) -> None:
    rows = scene.table("blocks").select(["block_number", "block_hash", "parent_hash"]).to_pylist()
    for before, after in pairwise(rows):
        assert after["block_number"] == before["block_number"] + 1
        assert after["parent_hash"] == before["block_hash"]


def test_a_paused_follower_commits_nothing_and_goes_on_afterwards(scene: FollowScene, serve: Serve) -> None:
    node = serve(chain_of(10))
    attempt = scene.attempt(node.url, poll_seconds=0.05)
    version = scene.platform.versions[0]
    with attempt.following():
        eventually("it is in step", lambda: version.cursor == 10 or None)
        attempt.wrapper.set_flags(paused=True)
        # A look that had begun may still end with a commit: what is mined after it has ended doesn't.
        eventually("it waits", lambda: waiting(attempt) or None)
        node.chain.mine(5)
        assert version.cursor == 10
        attempt.wrapper.set_flags(paused=False)
        eventually("it goes on", lambda: version.cursor == 15 or None)
    assert_equal(scene, node)


def waiting(attempt: Attempt) -> bool:
    """Is it in the wait of a paused follower, which is longer than any other?"""
    return attempt.wrapper.waits_for >= 60


def test_a_type_that_is_not_known_stops_the_follower_with_what_to_do(
    scene: FollowScene, serve: Serve
) -> None:
    node = serve(chain_of(11, transactions_per_block=3))
    with FaultyRpc(node.url) as faulty:
        attempt = scene.attempt(faulty.url)
        attempt.settle()
        faulty.lie(Fault.OTHER_TYPE, block=12, value="0x7e")
        node.chain.mine(2)
        with pytest.raises(UnknownTransactionType, match=r'block 12 .*set chain = "optimism" or "base"'):
            follow(attempt.follower)
    assert scene.platform.versions[0].cursor == 11


def test_an_outage_of_the_endpoints_is_waited_out_and_shown(scene: FollowScene) -> None:
    chain = chain_of(10)
    with ExitStack() as first:
        node = first.enter_context(running(chain))
        attempt = scene.attempt(node.url, poll_seconds=0.05)
        version = scene.platform.versions[0]
        with attempt.following():
            eventually("it is in step", lambda: version.cursor == 10 or None)
            first.close()
            eventually("it says so", lambda: attempt.wrapper.progress.get("problem"))
            assert condition_of(attempt) == "unreachable"
            assert attempt.wrapper.progress["problem_since"] <= time.time()
            chain.mine(3)
            with running(chain, port=int(node.url.rpartition(":")[2])) as again:
                eventually("it goes on", lambda: version.cursor == 13 or None)
                eventually("and says so", lambda: attempt.wrapper.progress.get("problem") is None or None)
                assert_equal(scene, again)
                attempt.wrapper.set_flags(canceled=True)


def test_connections_that_are_cut_cost_time_and_nothing_else(scene: FollowScene, serve: Serve) -> None:
    node = serve(chain_of(10))
    attempt = scene.attempt(node.url, poll_seconds=0.05)
    version = scene.platform.versions[0]
    with attempt.following():
        for _ in range(4):
            eventually("it is in step", lambda: version.cursor == node.chain.head or None)
            scene.cut_connections()
            node.chain.mine(2)
        eventually("it is in step", lambda: version.cursor == node.chain.head or None)
    assert_equal(scene, node)


@pytest.mark.parametrize("made", [True, False])
def test_a_reorg_whose_commit_was_not_answered_is_left_to_the_next_attempt(
    scene: FollowScene, serve: Serve, monkeypatch: pytest.MonkeyPatch, made: bool
) -> None:
    """Only a new claim tells how often something of the tables was taken back."""
    node, reader = serve(chain_of(10)), Reader()
    attempt = scene.attempt(node.url)
    attempt.settle()
    read(scene, reader)
    commit = attempt.ctx.commit

    def lost(*args: Any, **more: Any) -> int:
        if made:
            commit(*args, **more)
        raise Unavailable("DataUnavailable", "the answer got lost")

    monkeypatch.setattr(attempt.ctx, "commit", lost)
    node.chain.reorg(3, 4)
    with pytest.raises(Unavailable, match="the answer got lost"):
        follow(attempt.follower)
    scene.attempt(node.url).settle()
    assert_equal(scene, node)
    read(scene, reader)
    assert reader.rows == scene.hashes()
    assert invalidated(scene) == [(8, 10)]


def test_whatever_a_real_node_does_the_tables_end_up_as_it_says(scene: FollowScene, anvil: Anvil) -> None:
    """A random story on anvil, with restarts in the middle; the same seed tells the same story."""
    dice = random.Random(20)
    accounts = anvil.accounts()
    settings: dict[str, Any] = {"chain_id": CHAIN_ID, "finality": 1000, "max_blocks_per_commit": 7}
    reader = Reader()
    attempt = scene.attempt(anvil.url, **settings)
    for _ in range(40):
        match dice.choice(("mine", "mine", "send", "send", "reorg", "shorter", "look", "restart")):
            case "mine":
                anvil.mine(dice.randint(1, 5))
            case "send":
                anvil.send([transfer(dice, accounts) for _ in range(dice.randint(1, 4))])
                anvil.mine()
            case "reorg" if anvil.head > 1:
                depth = dice.randint(1, min(anvil.head, 12))
                kept = [(transfer(dice, accounts), dice.randrange(depth)) for _ in range(dice.randint(0, 3))]
                anvil.reorg(depth, kept)
            case "shorter" if anvil.head > 1:
                anvil.rollback(dice.randint(1, min(anvil.head, 9)))
            case "restart":
                attempt = scene.attempt(anvil.url, **settings)
            case _:
                attempt.settle()
                read(scene, reader)
    attempt.settle()
    read(scene, reader)
    head = anvil.head
    assert reader.rows == scene.hashes()
    raw = node_blocks(anvil.url, 0, head)
    for name in USUAL:
        assert scene.table(name).to_pylist() == node_table(raw, name, CHAIN_ID).to_pylist(), name
    assert scene.platform.versions[0].cursor == head


def transfer(dice: random.Random, accounts: list[str]) -> dict[str, str]:
    sender, to = dice.sample(accounts, 2)
    return {"from": sender, "to": to, "value": hex(dice.randrange(10**18)), "gas": hex(21_000)}
