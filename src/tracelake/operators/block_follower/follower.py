"""The follower: looks at the chain, decides, and does what was decided, one commit at a time.

A commit replaces a range of blocks in all tables and says what follows from it, in one transaction of the data
database; what is stored is one chain at every moment. Everything above a fork is deleted by the same commit that
writes the first blocks of the new chain, however many there are to come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.rpc.pool import Pool
from tracelake.operators.block_follower.config import FollowerConfig
from tracelake.operators.block_follower.decide import (
    AskOthers,
    BlockId,
    Extend,
    FindFork,
    Halt,
    Link,
    Rewrite,
    Sight,
    Wait,
    Why,
    decide,
    find_fork,
    judge_fork,
)
from tracelake.operators.block_follower.finality import Finality
from tracelake.operators.block_follower.load import Loader
from tracelake.operators.block_follower.news import News
from tracelake.operators.block_follower.rhythm import Rhythm
from tracelake.operators.block_follower.seen_chain import SeenChain
from tracelake.operators.block_follower.story import Story
from tracelake.operators.block_follower.tables import ChainTables
from tracelake.operators.block_follower.window import Window
from tracelake.operators.context import Context

CATCH_UP_FROM = 300
"""So many blocks behind, a worker with Spark lets its executors fetch."""
REORG = "reorg"
_MIXED = ("BlockMismatch", "ChainChanged")
"""Blocks that don't fit together may come from endpoints on different forks."""
_ANNOUNCE_EVERY = 30.0
_FINAL_AFTER = 1.0


class Follower:
    def __init__(
        self,
        ctx: Context,
        config: FollowerConfig,
        pool: Pool,
        tables: ChainTables,
        at_tip: Loader,
        far_behind: Loader | None = None,
    ) -> None:
        self.ctx = ctx
        self.config = config
        self.pool = pool
        self.chain = SeenChain(pool)
        self.tables = tables
        self.at_tip = at_tip
        self.far_behind = far_behind
        self.outputs = list(tables.outputs.values())
        self.window = Window(tables)
        self.finality = Finality(pool, config.finality, tables.blocks.written.finalized)
        self.news = News(self.outputs, ctx.task.epoch or 0)
        self.rhythm = Rhythm(config.poll_seconds)
        self.story = Story.resumed(ctx)
        self.start = config.start_block
        self.settled = False
        """What the claim said about the outputs has been dealt with."""
        self.unsure = False
        """A commit that takes something back wasn't answered: how often that was counted isn't known any more."""
        self._unseen_since: float | None = None
        self._announced: tuple[float, int | None] = (0.0, None)
        self._head: int | None = None

    def step(self) -> float:
        """One look and what follows from it; the seconds until the next."""
        head = self.chain.head()
        self._saw(head)
        if self.start is None:
            self.start = head.number if self.window.first is None else self.window.first
        tip = self.window.tip
        match self._decide(head):
            case Extend(first, last):
                return self._extend(first, last, head)
            case FindFork(top):
                return self._refork(top, head)
            case Wait(why):
                self.story.waits(why)
                if why is Why.IN_STEP and tip is not None:
                    self._idle(tip)
                return self.rhythm.wait(time.monotonic())
            case AskOthers():
                raise AssertionError("the others were asked")
            case never:
                assert_never(never)

    def rewrite(self, fork: int, head: BlockId, reason: str) -> bool:
        """Replace everything above ``fork`` by the chain's blocks, or the first of them; False when the endpoints
        don't agree on them just now."""
        tip = self.window.tip
        assert tip is not None
        last = min(head.number, fork + self.config.max_blocks_per_commit)
        links: list[Link] = []
        if last > fork:
            links = self._load(fork + 1, last, self.window.hash_at(fork), head)
            if not links:
                self.tables.drop_staged()
                return False
        self._commit(fork + 1, links, replaced=tip, reason=reason)
        if reason == REORG:
            self.story.reorg(fork, tip, links)
        return True

    def write_again(self, first: int, last: int, head: BlockId) -> int:
        """Replace stored blocks by themselves; answers with the first that is still to be done. If they aren't the
        chain's, neither is what stands above them, and all of it goes."""
        last = min(last, first + self.config.max_blocks_per_commit - 1)
        links = self._load(first, last, self.window.hash_at(first - 1), head) if last <= head.number else []
        if len(links) == last - first + 1 and self._fits(links[-1]):
            self.ctx.commit(self.outputs, start=first, end=last)
            self.window.correct(links)
            return last + 1
        self.tables.drop_staged()
        lowest = self._first if self.window.first is None else self.window.first
        fork = find_fork(lowest, min(first - 1, head.number), self._same)
        if not self.rewrite(fork, head, "stored blocks were not the chain's"):
            raise Unavailable("EndpointsDisagree", f"the endpoints don't agree on block {fork + 1}")
        tip = self.window.tip
        return fork + 1 if tip is None else tip.number + 1

    def announce(self) -> None:
        """Say how far the tables reach, as was said before or not."""
        tip = self.window.tip
        if tip is not None:
            final = self.finality.reached(self._first, tip.number)
            self.ctx.emit(*self.news.reaches(tip.number, final))
            self._announced = (time.monotonic(), final)

    @property
    def _first(self) -> int:
        """Nothing below it is this follower's."""
        return self.start or 0

    def _decide(self, head: BlockId) -> Extend | FindFork | Wait | AskOthers:
        tip = self.window.tip
        ours = self.window.hash_at(head.number) if tip is not None and head.number <= tip.number else None
        sight = Sight(
            start=self._first, tip=tip, head=head, ours=ours, patience=self.config.shorter_after_seconds
        )
        decision = decide(sight)
        if not isinstance(decision, AskOthers):
            self._unseen_since = None
            return decision
        assert tip is not None
        others = self.chain.hashes_at(decision.number)
        now = time.monotonic()
        if tip.hash in others.values():
            self._unseen_since = None
        elif self._unseen_since is None:
            self._unseen_since = now
        unseen = 0.0 if self._unseen_since is None else now - self._unseen_since
        return decide(replace(sight, others=others, unseen=unseen))

    def _extend(self, first: int, last: int, head: BlockId) -> float:
        tip = self.window.tip
        last = min(last, first + self.config.max_blocks_per_commit - 1)
        links = self._load(first, last, None if tip is None else tip.hash, head)
        if not links:
            # The chain's next block has another parent than our tip.
            self.tables.drop_staged()
            return self._refork(first - 1, head)
        self._commit(first, links)
        self.finality.ask(self._first, links[-1].id, self.window.hash_at)
        return 0.0

    def _refork(self, top: int, head: BlockId) -> float:
        tip = self.window.tip
        if tip is None:
            self.story.waits(Why.DISAGREE)
            return self.rhythm.wait(time.monotonic())
        match self.find_fork(top, tip, head):
            case Rewrite(fork) if self.rewrite(fork, head, REORG):
                return 0.0
            case _:
                self.story.waits(Why.DISAGREE)
                self._take_sides()
                return self.rhythm.wait(time.monotonic())

    def _take_sides(self) -> None:
        """The endpoints are on different forks: go with the one that is furthest."""
        tip, final = self.window.tip, self.finality.final
        kept = None if final is None else self.window.hash_at(final)
        if tip is not None:
            self.chain.side_with_furthest(
                tip.number, BlockId(final, kept) if final is not None and kept else None
            )

    def find_fork(self, top: int, tip: BlockId, head: BlockId) -> Rewrite | Wait:
        """Where the stored chain leaves the chain; raises when that is below what is final, and no endpoint has it
        any more."""
        final = self.finality.final
        lowest = max(self._first, self.window.first or 0, final or 0)
        if final is not None and lowest == final and self.window.hash_at(final) is None:
            # Its rows live in files alone: what is above it is all that can be compared.
            lowest += 1
        verdict = judge_fork(find_fork(lowest, top, self._same), tip=tip, final=final)
        if not isinstance(verdict, Halt):
            return verdict
        if self.window.hash_at(verdict.final) in self.chain.hashes_at(verdict.final).values():
            return Wait(Why.DISAGREE)
        raise self._below_finality(tip, head)

    def _fits(self, link: Link) -> bool:
        """Is this block, or one with its hash as parent, what is stored?"""
        if self.window.hash_at(link.number) == link.hash:
            return True
        above = self.tables.links(link.number + 1, link.number + 1)
        return len(above) == 1 and above[0].parent == link.hash

    def _same(self, number: int) -> bool:
        return self.window.hash_at(number) == self.chain.hash_at(number)

    def _below_finality(self, tip: BlockId, head: BlockId) -> Invalid:
        final = self.finality.final
        return Invalid(
            "ReorgBelowFinality",
            f"the chain no longer has block {final} as it is stored, which was final: its head {head.number} "
            f"(0x{head.hash.hex()}) doesn't descend from it, our last block is {tip.number} (0x{tip.hash.hex()}). "
            "Nothing was changed. Are the endpoints of the RPC pool on the right chain? If they are, retry this "
            "task once they agree; to accept a deeper reorg, deploy with a larger finality.",
        )

    def _load(self, first: int, last: int, parent: bytes | None, head: BlockId) -> list[Link]:
        behind = head.number - first + 1
        loader = self.far_behind if self.far_behind is not None and behind > CATCH_UP_FROM else self.at_tip
        try:
            links = loader.load(first, last, parent)
        except Unavailable as error:
            if error.reason in _MIXED:
                self._take_sides()
            raise
        self.story.delivered |= loader.endpoints
        return links

    def _commit(
        self, first: int, links: Sequence[Link], replaced: BlockId | None = None, reason: str = ""
    ) -> None:
        """Everything that was staged, as blocks ``first`` and on; with ``replaced``, the tip of before, everything
        up to there is replaced."""
        last = links[-1].number if links else first - 1
        events = [] if replaced is None else self.news.taken_back(first, replaced.number, reason)
        final = self.finality.reached(self._first, last)
        if last >= self._first:
            events += self.news.reaches(last, final)
        end = last if replaced is None else max(last, replaced.number)
        self.unsure = replaced is not None
        self.ctx.commit(self.outputs, start=first, end=end, events=events)
        self.unsure = False
        self.window.rewind(first - 1)
        self.window.extend(links)
        self.finality.stored(self._first, last)
        self._announced = (time.monotonic(), final)
        if self._head is not None:
            self.story.saw_head(self._head, last, self.finality.final, self._first)

    def _saw(self, head: BlockId) -> None:
        if self._head is not None and head.number > self._head:
            self.rhythm.saw(head.number - self._head, time.monotonic())
        self._head = head.number
        tip = self.window.tip
        stored = None if tip is None else tip.number
        self.story.saw_head(head.number, stored, self.finality.final, self._first)

    def _idle(self, tip: BlockId) -> None:
        """Nothing new: time to ask what is final, and to say so if nothing else is going to."""
        self.finality.ask(self._first, tip, self.window.hash_at)
        if not self.finality.told:
            self.story.unknown_finality()
        at, announced = self._announced
        since = time.monotonic() - at
        if since >= _ANNOUNCE_EVERY or (self.finality.final != announced and since >= _FINAL_AFTER):
            self.announce()
