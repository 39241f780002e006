"""``Follower``: observes the chain, decides, and carries the decision out, one commit at a time.

A commit replaces a range of blocks in all tables and stores the events about it, in one transaction of the data
database; so the stored blocks are one chain at every moment. Everything above a fork is deleted by the same commit
that writes the first blocks of the new chain, however many there are to come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.rpc.pool import Pool
from tracelake.operators.block_follower.chain import ChainView, ChainWindow, Finality
from tracelake.operators.block_follower.decide import (
    AskOthers,
    BlockId,
    BlockLink,
    ChainObservation,
    Extend,
    FindFork,
    FollowerConfig,
    Halt,
    PollSchedule,
    Rewrite,
    Wait,
    WaitReason,
    decide,
    find_fork,
    judge_fork,
)
from tracelake.operators.block_follower.load import BlockLoader, FollowedTables
from tracelake.operators.block_follower.progress import FollowerEvents, FollowerProgress
from tracelake.operators.context import Context

CATCH_UP_FROM = 300
"""From this many blocks behind, the executors of a worker with Spark fetch."""
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
        tables: FollowedTables,
        at_tip: BlockLoader,
        far_behind: BlockLoader | None = None,
    ) -> None:
        self.ctx = ctx
        self.config = config
        self.pool = pool
        self.chain = ChainView(pool)
        self.tables = tables
        self.at_tip = at_tip
        self.far_behind = far_behind
        self.outputs = list(tables.outputs.values())
        self.window = ChainWindow(tables)
        self.finality = Finality(pool, config.finality, tables.blocks.written.finalized)
        self.events = FollowerEvents(self.outputs, ctx.task.epoch or 0)
        self.schedule = PollSchedule(config.poll_seconds)
        self.progress = FollowerProgress.resumed(ctx)
        self.progress.health = pool.stats
        self.start = config.start_block
        self.settled = False
        """The state of the outputs at the time of the claim has been reconciled with the stored blocks."""
        self.unsure = False
        """A commit with an invalidation wasn't answered, so the current revision of the outputs isn't known."""
        self._unseen_since: float | None = None
        self._announced: tuple[float, int | None] = (0.0, None)
        self._head: int | None = None

    def step(self) -> float:
        """Observe the chain once and act on it. Returns the seconds until the next step."""
        head = self.chain.head()
        self._saw(head)
        # start_block: latest. An earlier attempt may have stored blocks already.
        if self.start is None:
            self.start = head.number if self.window.first is None else self.window.first
        tip = self.window.tip
        match self._decide(head):
            case Extend(first, last):
                return self._extend(first, last, head)
            case FindFork(top):
                return self._refork(top, head)
            case Wait(why):
                self.progress.waits(why)
                if why is WaitReason.IN_STEP and tip is not None:
                    self._idle(tip)
                return self.schedule.wait(time.monotonic())
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
        # A chain that got shorter has no blocks above the fork: then the commit only deletes.
        links: list[BlockLink] = []
        if last > fork:
            links = self._load(fork + 1, last, self.window.hash_at(fork), head)
            if not links:
                self.tables.drop_staged()
                return False
        self._commit(fork + 1, links, replaced=tip, reason=reason)
        if reason == REORG:
            self.progress.reorg(fork, tip, links)
        return True

    def write_again(self, first: int, last: int, head: BlockId) -> int:
        """Replace stored blocks by themselves; returns the first block that is still to be done. If they aren't the
        chain's, neither are the blocks above them, and all are replaced."""
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
        """Announce how far the tables reach, even if that was announced before."""
        tip = self.window.tip
        if tip is not None:
            final = self.finality.reached(self._first, tip.number)
            self.ctx.emit(*self.events.reaches(tip.number, final))
            self._announced = (time.monotonic(), final)

    @property
    def _first(self) -> int:
        """The first block that this follower is responsible for."""
        return self.start or 0

    def _decide(self, head: BlockId) -> Extend | FindFork | Wait | AskOthers:
        tip = self.window.tip
        ours = self.window.hash_at(head.number) if tip is not None and head.number <= tip.number else None
        sight = ChainObservation(
            start=self._first, tip=tip, head=head, ours=ours, patience=self.config.shorter_after_seconds
        )
        decision = decide(sight)
        if not isinstance(decision, AskOthers):
            self._unseen_since = None
            return decision
        assert tip is not None
        # Every endpoint is asked here, so only a head that looks odd leads to it.
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
            self.progress.waits(WaitReason.DISAGREE)
            return self.schedule.wait(time.monotonic())
        match self.find_fork(top, tip, head):
            case Rewrite(fork) if self.rewrite(fork, head, REORG):
                return 0.0
            case _:
                self.progress.waits(WaitReason.DISAGREE)
                self._prefer_furthest()
                return self.schedule.wait(time.monotonic())

    def _prefer_furthest(self) -> None:
        """The endpoints are on different forks: go with the one that is furthest."""
        tip, final = self.window.tip, self.finality.final
        kept = None if final is None else self.window.hash_at(final)
        if tip is not None:
            self.chain.prefer_furthest(
                tip.number, BlockId(final, kept) if final is not None and kept else None
            )

    def find_fork(self, top: int, tip: BlockId, head: BlockId) -> Rewrite | Wait:
        """Where the stored chain leaves the chain. Raises ``ReorgBelowFinality`` when that is below the final
        block and no endpoint has that block any more."""
        final = self.finality.final
        lowest = max(self._first, self.window.first or 0, final or 0)
        if final is not None and lowest == final and self.window.hash_at(final) is None:
            # Its rows are in files alone: only the blocks above it can be compared.
            lowest += 1
        verdict = judge_fork(find_fork(lowest, top, self._same), tip=tip, final=final)
        if not isinstance(verdict, Halt):
            return verdict
        # While any endpoint still has the final block, the others may be on a fork that will be left.
        if self.window.hash_at(verdict.final) in self.chain.hashes_at(verdict.final).values():
            return Wait(WaitReason.DISAGREE)
        raise self._below_finality(tip, head)

    def _fits(self, link: BlockLink) -> bool:
        """Whether this block is stored, or a child of it is."""
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

    def _load(self, first: int, last: int, parent: bytes | None, head: BlockId) -> list[BlockLink]:
        behind = head.number - first + 1
        loader = self.far_behind if self.far_behind is not None and behind > CATCH_UP_FROM else self.at_tip
        try:
            links = loader.load(first, last, parent)
        except Unavailable as error:
            # The next try asks the endpoints of the leading fork first.
            if error.reason in _MIXED:
                self._prefer_furthest()
            raise
        self.progress.delivered |= loader.endpoints
        return links

    def _commit(
        self, first: int, links: Sequence[BlockLink], replaced: BlockId | None = None, reason: str = ""
    ) -> None:
        """Commit all staged rows as blocks from ``first`` on. With ``replaced``, the tip until now, the commit
        deletes everything up to there."""
        last = links[-1].number if links else first - 1
        events = [] if replaced is None else self.events.invalidate(first, replaced.number, reason)
        final = self.finality.reached(self._first, last)
        if last >= self._first:
            events += self.events.reaches(last, final)
        # The old chain may have been longer, and all of it must go.
        end = last if replaced is None else max(last, replaced.number)
        # An exception leaves it set; then only a new attempt learns the revision from its claim.
        self.unsure = replaced is not None
        self.ctx.commit(self.outputs, start=first, end=end, events=events)
        self.unsure = False
        # After the commit: memory must not be ahead of the database.
        self.window.rewind(first - 1)
        self.window.extend(links)
        self.finality.stored(self._first, last)
        self._announced = (time.monotonic(), final)
        if self._head is not None:
            self._show(self._head, last)

    def _saw(self, head: BlockId) -> None:
        if self._head is not None and head.number > self._head:
            self.schedule.saw(head.number - self._head, time.monotonic())
        self._head = head.number
        tip = self.window.tip
        stored = None if tip is None else tip.number
        self.progress.dissent, self.progress.disputed = self.pool.dissent, self.pool.disputed
        self._show(head.number, stored)

    def _show(self, head: int, stored: int | None) -> None:
        due = self.progress.is_due() and stored is not None and stored < head
        self.progress.saw_head(
            head,
            stored,
            self.finality.final,
            self._first,
            head_time=self.chain.head_time,
            tip_time=self.tables.timestamp(stored) if due and stored is not None else None,
        )

    def _idle(self, tip: BlockId) -> None:
        """Nothing is new: ask which block is final, and announce it, since no commit is going to."""
        self.finality.ask(self._first, tip, self.window.hash_at)
        if not self.finality.is_known:
            self.progress.unknown_finality()
        at, announced = self._announced
        since = time.monotonic() - at
        if since >= _ANNOUNCE_EVERY or (self.finality.final != announced and since >= _FINAL_AFTER):
            self.announce()
