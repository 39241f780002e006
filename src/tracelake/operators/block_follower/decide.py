"""The decisions of a follower, made purely from the stored chain and the answers of the endpoints.

Stored blocks form one chain by parent hash, and the follower goes on from the last one, the tip. A head beyond it
means blocks to read. A head that isn't beyond it and isn't the tip may mean three things that look alike:

- the endpoint that answered is behind, or stuck on a fork that the others have left. As long as any endpoint still
  has the tip, nothing has happened;
- the chain was reorganized: no endpoint has the tip, and there is another block at a height that is stored. The
  fork is looked for at once;
- the chain got shorter: no endpoint has the tip, and the head is one of our own blocks. Endpoints that lag, or a
  balancer in front of some that do, look just like it, so this is believed only after ``patience`` seconds in which
  no endpoint had the tip.

Whether a reorg may be followed depends on its fork: final blocks are never rewritten.

``PollSchedule`` decides when to ask for the head again, from the intervals between blocks. Ten requests per
interval find a block a twentieth of it late on average; most requests in the first half are wasted, so there are
none. ``FollowerConfig`` has the job's settings (``domain.operators.block_follower``) as the follower uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from tracelake.domain.operators.block_follower import SPEC
from tracelake.evm.raw_block import Senders, Verify

SHORTEST = 0.02
_LEARN = 0.3
_QUIET = 0.5
_LOOKS = 10


@dataclass(frozen=True, slots=True)
class BlockId:
    number: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class BlockLink:
    """A block's place in its chain."""

    number: int
    hash: bytes
    parent: bytes

    @property
    def id(self) -> BlockId:
        return BlockId(self.number, self.hash)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainObservation:
    """``tip`` is the last stored block, ``ours`` the stored hash at the head's height (None when there is none).
    ``others`` are the endpoints' hashes at the tip's height, None until they are asked; ``unseen`` is the number of
    seconds since an endpoint had the tip."""

    start: int
    tip: BlockId | None
    head: BlockId
    ours: bytes | None = None
    others: Mapping[str, bytes | None] | None = None
    unseen: float = 0.0
    patience: float


class WaitReason(StrEnum):
    """Why there is nothing to do for now."""

    IN_STEP = "in step with the chain"
    BELOW_START = "the chain hasn't come to the first block yet"
    LAGGING = "an endpoint is behind, or on a fork that the others have left"
    UNSEEN = "no endpoint has our last block just now; the chain may have got shorter"
    UNANSWERED = "no endpoint could be asked about our last block"
    DISAGREE = "the endpoints don't agree about the chain"


@dataclass(frozen=True, slots=True)
class Wait:
    why: WaitReason


@dataclass(frozen=True, slots=True)
class Extend:
    """Blocks to read, both ends included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class AskOthers:
    """Ask every endpoint for its block at this height, and decide again."""

    number: int


@dataclass(frozen=True, slots=True)
class FindFork:
    """Look for the last stored block that is still the chain's, at this height or below."""

    top: int


Decision = Wait | Extend | AskOthers | FindFork


def decide(sight: ChainObservation) -> Decision:
    tip, head = sight.tip, sight.head
    if tip is None:
        return (
            Extend(sight.start, head.number) if head.number >= sight.start else Wait(WaitReason.BELOW_START)
        )
    # Whether these blocks continue the tip is known only when they are read.
    if head.number > tip.number:
        return Extend(tip.number + 1, head.number)
    if head == tip:
        return Wait(WaitReason.IN_STEP)
    if sight.others is None:
        return AskOthers(tip.number)
    if not sight.others:
        return Wait(WaitReason.UNANSWERED)
    if tip.hash in sight.others.values():
        return Wait(WaitReason.LAGGING)
    # Another block at a stored height proves a reorg; only a head among our own blocks needs patience.
    other_fork = sight.ours not in (None, head.hash) or any(sight.others.values())
    if other_fork or sight.unseen >= sight.patience:
        return FindFork(min(head.number, tip.number))
    return Wait(WaitReason.UNSEEN)


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Replace everything above ``fork`` by the chain's blocks."""

    fork: int


@dataclass(frozen=True, slots=True)
class Halt:
    """The chain has dropped a block that was final."""

    fork: int
    final: int


def judge_fork(fork: int, *, tip: BlockId, final: int | None) -> Rewrite | Halt | Wait:
    """``final`` is the last stored block that the chain had promised to keep."""
    if fork >= tip.number:
        return Wait(WaitReason.DISAGREE)
    if final is not None and fork < final:
        return Halt(fork, final)
    return Rewrite(fork)


def find_fork(lowest: int, top: int, same: Callable[[int], bool]) -> int:
    """The highest block of ``lowest``–``top`` that is the ``same`` in both chains, ``lowest`` − 1 if none is.

    Chains that differ at a height differ at all above it, so steps that double find the place to search in: a reorg
    of depth n takes about 2·log2(n) questions.
    """
    step = 1
    above = top + 1
    below = top
    while below >= lowest and not same(below):
        above = below
        below = top - step
        step *= 2
    # The last step may have gone below the lowest block.
    below = max(below, lowest - 1)
    while above - below > 1:
        middle = (above + below) // 2
        if same(middle):
            below = middle
        else:
            above = middle
    return below


def count_linked(parent: bytes | None, links: Sequence[BlockLink]) -> int:
    """How many of these blocks continue the chain that ends with ``parent``, each the next one's parent. None: any
    block may be the first."""
    expected = parent
    number: int | None = None
    for count, link in enumerate(links):
        if (expected is not None and link.parent != expected) or (
            number is not None and link.number != number
        ):
            return count
        expected, number = link.hash, link.number + 1
    return len(links)


@dataclass(slots=True)
class PollSchedule:
    longest: float
    _interval: float | None = None
    _last: float | None = None

    def saw(self, blocks: int, now: float) -> None:
        """Record that ``blocks`` new blocks have come since the last call."""
        # Several blocks may have come between two requests.
        if self._last is not None and blocks > 0:
            took = (now - self._last) / blocks
            old = took if self._interval is None else self._interval
            # A moving average: one late block doesn't change the schedule much.
            self._interval = old + _LEARN * (took - old)
        self._last = now

    def wait(self, now: float) -> float:
        """Seconds until the next request for the head."""
        if self._interval is None or self._last is None:
            return _clamp(self.longest / _LOOKS, self.longest)
        since = now - self._last
        look = self._interval / _LOOKS
        return _clamp(max(look, self._interval * _QUIET - since), self.longest)


def _clamp(seconds: float, longest: float) -> float:
    return min(longest, max(SHORTEST, seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerConfig:
    """``start_block`` None: the chain's head when the follower first asks. ``finality`` None: the block that the
    endpoints call finalized; a number: that many blocks below the tip."""

    chain_id: int
    start_block: int | None
    verify: Verify
    senders: Senders
    finality: int | None
    poll_seconds: float
    max_blocks_per_commit: int
    catch_up: Literal["auto", "spark", "process"]
    shorter_after_seconds: float

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> FollowerConfig:
        given = SPEC.read(config)
        return cls(
            chain_id=given.chain_id,
            start_block=None if given.start_block == "latest" else given.start_block,
            verify=Verify(given.verify),
            senders=Senders(given.senders),
            finality=None if given.finality == "finalized" else given.finality,
            poll_seconds=given.poll_seconds,
            max_blocks_per_commit=given.max_blocks_per_commit,
            catch_up=given.catch_up,
            shorter_after_seconds=given.shorter_after_seconds,
        )
