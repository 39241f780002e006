"""What the block follower decides, against a model of a chain that grows, forks, shrinks and is seen unevenly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid
from tracelake.operators.block_follower.chain import ChainWindow
from tracelake.operators.block_follower.decide import (
    SHORTEST,
    AskOthers,
    BlockId,
    BlockLink,
    ChainObservation,
    Decision,
    Extend,
    FindFork,
    FollowerConfig,
    Halt,
    PollSchedule,
    Rewrite,
    Wait,
    WaitReason,
    count_linked,
    decide,
    find_fork,
    judge_fork,
)

TIP = BlockId(10, b"ten")
PATIENCE = 5.0


def look(
    head: BlockId,
    *,
    tip: BlockId | None = TIP,
    start: int = 0,
    ours: bytes | None = None,
    others: Mapping[str, bytes | None] | None = None,
    unseen: float = 0.0,
) -> Decision:
    sight = ChainObservation(
        start=start, tip=tip, head=head, ours=ours, others=others, unseen=unseen, patience=PATIENCE
    )
    return decide(sight)


def test_an_empty_table_begins_at_the_start_block() -> None:
    assert look(BlockId(7, b"h"), tip=None, start=3) == Extend(3, 7)
    assert look(BlockId(3, b"h"), tip=None, start=3) == Extend(3, 3)


def test_a_chain_that_is_below_the_start_block_is_waited_for() -> None:
    assert look(BlockId(2, b"h"), tip=None, start=3) == Wait(WaitReason.BELOW_START)


def test_a_head_beyond_the_tip_is_read() -> None:
    assert look(BlockId(12, b"twelve")) == Extend(11, 12)


def test_the_tip_as_head_is_nothing_to_do() -> None:
    assert look(TIP) == Wait(WaitReason.IN_STEP)


@pytest.mark.parametrize("head", [BlockId(10, b"other"), BlockId(8, b"eight"), BlockId(8, b"other")])
def test_a_head_that_is_neither_further_nor_the_tip_is_asked_about(head: BlockId) -> None:
    assert look(head, ours=b"eight") == AskOthers(10)


@pytest.mark.parametrize("head", [BlockId(10, b"other"), BlockId(8, b"eight"), BlockId(8, b"other")])
def test_as_long_as_somebody_has_the_tip_an_endpoint_is_only_behind(head: BlockId) -> None:
    others = {"slow": None, "forked": b"other", "good": b"ten"}
    assert look(head, ours=b"eight", others=others, unseen=1000.0) == Wait(WaitReason.LAGGING)


def test_another_block_at_a_stored_height_is_a_reorg_at_once() -> None:
    assert look(BlockId(10, b"other"), ours=b"ten", others={"only": b"other"}) == FindFork(10)


def test_another_block_below_the_tip_that_nobody_has_is_a_reorg_to_a_shorter_chain() -> None:
    assert look(BlockId(8, b"other"), ours=b"eight", others={"a": None, "b": None}) == FindFork(8)


def test_a_lower_head_of_our_own_is_a_shorter_chain_only_after_a_while() -> None:
    head, unknown = BlockId(8, b"eight"), {"only": None}
    assert look(head, ours=b"eight", others=unknown, unseen=0.0) == Wait(WaitReason.UNSEEN)
    assert look(head, ours=b"eight", others=unknown, unseen=4.9) == Wait(WaitReason.UNSEEN)
    assert look(head, ours=b"eight", others=unknown, unseen=5.0) == FindFork(8)


def test_a_lower_head_and_another_block_at_the_tips_height_are_a_reorg() -> None:
    others = {"slow": None, "reorganized": b"other"}
    assert look(BlockId(8, b"eight"), ours=b"eight", others=others) == FindFork(8)


def test_a_head_below_all_that_is_stored_is_believed_only_after_a_while() -> None:
    head = BlockId(2, b"two")
    assert look(head, ours=None, others={"only": None}) == Wait(WaitReason.UNSEEN)
    assert look(head, ours=None, others={"only": None}, unseen=5.0) == FindFork(2)


def test_endpoints_that_cannot_be_asked_prove_nothing() -> None:
    assert look(BlockId(8, b"other"), ours=b"eight", others={}, unseen=1000.0) == Wait(WaitReason.UNANSWERED)


def test_a_fork_is_followed_down_to_what_is_final() -> None:
    assert judge_fork(7, tip=TIP, final=7) == Rewrite(7)
    assert judge_fork(6, tip=TIP, final=7) == Halt(6, 7)
    assert judge_fork(0, tip=TIP, final=None) == Rewrite(0)


def test_a_fork_at_the_tip_itself_is_none() -> None:
    assert judge_fork(10, tip=TIP, final=None) == Wait(WaitReason.DISAGREE)


@given(lowest=st.integers(0, 50), size=st.integers(0, 3000), depth=st.integers(0, 4000))
def test_the_fork_is_found_with_few_questions(lowest: int, size: int, depth: int) -> None:
    top = lowest + size
    fork = max(lowest - 1, top - depth)
    asked: list[int] = []

    def same(number: int) -> bool:
        assert lowest <= number <= top
        asked.append(number)
        return number <= fork

    assert find_fork(lowest, top, same) == fork
    assert len(asked) <= 2 * max(top - fork, 1).bit_length() + 2


def chain_of(*hashes: str, parent: str = "genesis", first: int = 1) -> list[BlockLink]:
    parents = [parent, *hashes]
    return [
        BlockLink(first + place, each.encode(), before.encode())
        for place, (before, each) in enumerate(zip(parents, hashes, strict=False))
    ]


def test_blocks_are_taken_as_far_as_each_is_the_next_ones_parent() -> None:
    links = chain_of("a", "b", "c")
    assert count_linked(b"genesis", links) == 3
    assert count_linked(None, links) == 3
    assert count_linked(b"another", links) == 0
    assert count_linked(b"genesis", [*links, BlockLink(4, b"d", b"b")]) == 3
    assert count_linked(b"genesis", [links[0], links[2]]) == 1
    assert count_linked(b"genesis", []) == 0


class Table:
    """A hot table of blocks, and how often it was asked."""

    def __init__(self, links: list[BlockLink]) -> None:
        self.rows = {link.number: link for link in links}
        self.asked = 0

    def span(self) -> BlockRange | None:
        return BlockRange(min(self.rows), max(self.rows)) if self.rows else None

    def links(self, start: int, end: int) -> list[BlockLink]:
        self.asked += 1
        return [self.rows[number] for number in sorted(self.rows) if start <= number <= end]


def stored(size: int, first: int = 1) -> Table:
    return Table(chain_of(*(str(first + place) for place in range(size)), parent=str(first - 1), first=first))


def test_nothing_stored_is_no_tip() -> None:
    window = ChainWindow(Table([]))
    assert window.reload(None) is None
    assert (window.tip, window.first, window.hash_at(3)) == (None, None, None)


def test_the_last_blocks_are_in_memory_and_the_others_in_the_table() -> None:
    table = stored(100)
    window = ChainWindow(table, size=10)
    assert window.reload(None) is None
    assert window.tip == BlockId(100, b"100")
    before = table.asked
    assert [window.hash_at(number) for number in (91, 100)] == [b"91", b"100"]
    assert table.asked == before
    assert window.hash_at(5) == b"5"
    assert (window.hash_at(0), window.hash_at(101)) == (None, None)


def test_a_hole_or_a_wrong_parent_is_found_where_it_begins() -> None:
    table = stored(20)
    del table.rows[15]
    assert ChainWindow(table).reload(None) == 15
    table = stored(20)
    table.rows[12] = BlockLink(12, b"another", b"11")
    assert ChainWindow(table).reload(None) == 13


def test_what_is_missing_below_the_final_block_is_nobodys_loss() -> None:
    table = stored(20)
    for number in (*range(1, 6), 8):
        del table.rows[number]
    window = ChainWindow(table)
    assert window.reload(10) is None
    assert window.reload(7) == 8


def test_a_rewound_window_ends_at_the_fork_and_goes_on_from_there() -> None:
    window = ChainWindow(stored(100), size=10)
    window.reload(None)
    window.rewind(97)
    window.extend(chain_of("98b", "99b", parent="97", first=98))
    assert window.tip == BlockId(99, b"99b")
    assert [window.hash_at(number) for number in (97, 98, 100)] == [b"97", b"98b", None]
    window.rewind(50)
    assert window.tip == BlockId(50, b"50")
    window.rewind(0)
    assert (window.tip, window.first) == (None, None)
    window.extend(chain_of("1b"))
    assert (window.tip, window.first) == (BlockId(1, b"1b"), 1)


def test_a_chain_whose_rows_are_all_in_files_goes_on_behind_them() -> None:
    window = ChainWindow(Table([]))
    window.reload(7)
    window.resume(BlockId(7, b"7"))
    window.extend(chain_of("8", parent="7", first=8))
    assert (window.tip, window.hash_at(7)) == (BlockId(8, b"8"), b"7")


@dataclass
class Model:
    """A chain as hashes by height, the endpoints' views of it, and a follower that does what is decided."""

    chain: list[str] = field(default_factory=lambda: ["0"])
    views: list[list[str]] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)
    unseen_since: float | None = None
    now: float = 0.0
    rewrites: int = 0
    _names: Callable[[], int] = field(default_factory=lambda: itertools.count(1).__next__)

    def grow(self, blocks: int) -> None:
        self.chain += [f"{self._names()}" for _ in range(blocks)]

    def rewind(self, depth: int) -> None:
        del self.chain[max(1, len(self.chain) - depth) :]

    def view(self, endpoint: int) -> list[str]:
        return self.views[endpoint] if endpoint < len(self.views) else self.chain

    def step(self, endpoint: int) -> None:
        """One look, its head from this endpoint, blocks and headers from an endpoint that is up to date."""
        self.now += 1.0
        seen = self.view(endpoint)
        head = BlockId(len(seen) - 1, seen[-1].encode())
        tip = BlockId(len(self.stored) - 1, self.stored[-1].encode()) if self.stored else None
        ours = self.stored[head.number].encode() if head.number < len(self.stored) else None
        sight = ChainObservation(start=0, tip=tip, head=head, ours=ours, patience=3.0)
        decision = decide(sight)
        if isinstance(decision, AskOthers):
            others = self.others(decision.number)
            held = tip is not None and tip.hash in others.values()
            self.unseen_since = None if held else self.unseen_since or self.now
            unseen = 0.0 if self.unseen_since is None else self.now - self.unseen_since
            decision = decide(
                ChainObservation(
                    start=0, tip=tip, head=head, ours=ours, others=others, unseen=unseen, patience=3.0
                )
            )
        else:
            self.unseen_since = None
        self.act(decision)

    def others(self, number: int) -> Mapping[str, bytes | None]:
        views = [self.chain, *self.views]
        return {
            str(place): view[number].encode() if number < len(view) else None
            for place, view in enumerate(views)
        }

    def act(self, decision: Decision) -> None:
        match decision:
            case Extend(first, last):
                blocks = self.chain[first : last + 1]
                if first == 0 or (first <= len(self.chain) and self.chain[first - 1] == self.stored[-1]):
                    self.stored += blocks
                elif blocks:
                    self.refork(min(first, len(self.chain)) - 1)
            case FindFork(top):
                self.refork(top)
            case _:
                return

    def refork(self, top: int) -> None:
        def same(number: int) -> bool:
            return number < len(self.chain) and self.chain[number] == self.stored[number]

        tip = BlockId(len(self.stored) - 1, b"")
        if isinstance(verdict := judge_fork(find_fork(0, top, same), tip=tip, final=None), Rewrite):
            self.rewrites += 1
            self.stored = self.stored[: verdict.fork + 1]


CHANGES = st.one_of(
    st.tuples(st.just("grow"), st.integers(1, 6)),
    st.tuples(st.just("reorg"), st.integers(1, 12)),
    st.tuples(st.just("shrink"), st.integers(1, 12)),
    st.tuples(st.just("look"), st.integers(0, 2)),
    st.tuples(st.just("lag"), st.integers(0, 5)),
)


@given(st.lists(CHANGES, max_size=60))
def test_whatever_a_chain_does_the_follower_ends_up_with_it(changes: list[tuple[str, int]]) -> None:
    model = Model()
    for kind, size in changes:
        match kind:
            case "grow":
                model.grow(size)
            case "reorg":
                model.rewind(size)
                model.grow(size + 1)
            case "shrink":
                model.rewind(size)
            case "lag":
                model.views = [model.chain[: max(1, len(model.chain) - size)]]
            case _:
                model.step(size % 2)
    model.views = []
    for _ in range(12):
        model.step(0)
    assert model.stored == model.chain


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 1)), max_size=60))
def test_an_endpoint_that_lags_never_makes_the_follower_take_anything_back(
    looks: list[tuple[int, int, int]],
) -> None:
    """The chain only grows, and the endpoints see old states of it."""
    model = Model()
    for grown, behind, endpoint in looks:
        model.grow(grown)
        model.views = [model.chain[: max(1, len(model.chain) - behind)]]
        model.step(endpoint)
    assert model.rewrites == 0


def test_the_rhythm_of_a_chain_is_learnt() -> None:
    rhythm = PollSchedule(longest=1.0)
    assert rhythm.wait(0.0) == pytest.approx(0.1)
    for beat in range(20):
        rhythm.saw(1, beat * 0.5)
    last = 19 * 0.5
    assert rhythm.wait(last) == pytest.approx(0.25), "nothing comes right after a block"
    assert rhythm.wait(last + 0.4) == pytest.approx(0.05), "one is due: look often"


def test_no_wait_is_longer_than_the_longest_nor_too_short() -> None:
    slow, fast = PollSchedule(longest=1.0), PollSchedule(longest=1.0)
    for beat in range(5):
        slow.saw(1, beat * 600.0)
        fast.saw(100, beat * 0.1)
    assert slow.wait(2400.0) == 1.0
    assert fast.wait(100.0) == SHORTEST


def test_settings_have_defaults() -> None:
    config = FollowerConfig.parse({"chain_id": 1, "rpc_pool": "main"})
    assert (config.start_block, config.finality, config.catch_up) == (0, None, "auto")
    latest = FollowerConfig.parse(
        {"chain_id": 1, "rpc_pool": "main", "start_block": "latest", "finality": 64}
    )
    assert (latest.start_block, latest.finality) == (None, 64)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"chain_id": 0}, "chain_id: must be a whole number"),
        ({"chain_id": True}, "chain_id: must be a whole number"),
        ({"rpc_pool": ""}, "rpc_pool: must be the name"),
        ({"start_block": -1}, "start_block: must be a block number or latest"),
        ({"start_block": "first"}, "start_block: must be a block number or latest"),
        ({"verify": "some"}, "verify: must be one of full, bloom, off"),
        ({"finality": "safe"}, "finality: must be finalized or a number"),
        ({"finality": -1}, "finality: must be finalized or a number"),
        ({"poll_seconds": 0}, "poll_seconds: must be a number of seconds"),
        ({"max_blocks_per_commit": 0}, "max_blocks_per_commit: must be a whole number"),
        ({"catch_up": "often"}, "catch_up: must be one of"),
        ({"shorter_after_seconds": -1}, "shorter_after_seconds: must be a number"),
        ({"depth": 5}, "depth: block_follower has no such setting"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        FollowerConfig.parse({"chain_id": 1, "rpc_pool": "main", **wrong})


def test_what_is_required_is_asked_for() -> None:
    with pytest.raises(Invalid, match="config: chain_id: is required; config: rpc_pool: is required"):
        FollowerConfig.parse({})
