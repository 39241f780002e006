"""What to do next about a chain: decided purely, from what is stored and what the endpoints say.

Stored blocks form one chain by parent hash; the follower goes on from its last one, the tip. A head that is further
is something to read. A head that is not, and isn't the tip either, may mean three things that look alike:

- the endpoint that answered is behind, or stuck on a fork that the others have left. As long as any endpoint still
  has the tip, nothing has happened;
- the chain was reorganized: nobody has the tip, and there is another block at a height that is stored. The fork is
  looked for at once;
- the chain got shorter: nobody has the tip, and the head is one of our own blocks. Endpoints that lag, or a
  balancer in front of some that do, look just like it, so this is believed only after ``patience`` seconds in
  which nobody had the tip.

Whether a reorg may be followed is decided by its fork: what was final is never rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class BlockId:
    number: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class Link:
    """A block's place in its chain."""

    number: int
    hash: bytes
    parent: bytes

    @property
    def id(self) -> BlockId:
        return BlockId(self.number, self.hash)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What can be seen: ``tip`` is the last stored block, ``ours`` the stored hash at the head's height (None when
    there is none). ``others`` is what each endpoint has at the tip's height, None until they are asked; ``unseen``
    for how many seconds nobody has had the tip."""

    start: int
    tip: BlockId | None
    head: BlockId
    ours: bytes | None = None
    others: Mapping[str, bytes | None] | None = None
    unseen: float = 0.0
    patience: float


class Why(StrEnum):
    """Why there is nothing to do for now."""

    IN_STEP = "in step with the chain"
    BELOW_START = "the chain hasn't come to the first block yet"
    LAGGING = "an endpoint is behind, or on a fork that the others have left"
    UNSEEN = "no endpoint has our last block just now; the chain may have got shorter"
    UNANSWERED = "no endpoint could be asked about our last block"
    DISAGREE = "the endpoints don't agree about the chain"


@dataclass(frozen=True, slots=True)
class Wait:
    why: Why


@dataclass(frozen=True, slots=True)
class Extend:
    """Blocks to read, both ends included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class AskOthers:
    """Ask every endpoint what it has at this height, and decide again."""

    number: int


@dataclass(frozen=True, slots=True)
class FindFork:
    """Look for the last stored block that is still the chain's, at this height or below."""

    top: int


Step = Wait | Extend | AskOthers | FindFork


def decide(sight: Sight) -> Step:
    tip, head = sight.tip, sight.head
    if tip is None:
        return Extend(sight.start, head.number) if head.number >= sight.start else Wait(Why.BELOW_START)
    if head.number > tip.number:
        return Extend(tip.number + 1, head.number)
    if head == tip:
        return Wait(Why.IN_STEP)
    if sight.others is None:
        return AskOthers(tip.number)
    if not sight.others:
        return Wait(Why.UNANSWERED)
    if tip.hash in sight.others.values():
        return Wait(Why.LAGGING)
    other_fork = sight.ours not in (None, head.hash) or any(sight.others.values())
    if other_fork or sight.unseen >= sight.patience:
        return FindFork(min(head.number, tip.number))
    return Wait(Why.UNSEEN)


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Everything above ``fork`` is replaced by what the chain has there now."""

    fork: int


@dataclass(frozen=True, slots=True)
class Halt:
    """The chain took back what was final."""

    fork: int
    final: int


def judge_fork(fork: int, *, tip: BlockId, final: int | None) -> Rewrite | Halt | Wait:
    """``final`` is the last stored block that the chain had promised to keep."""
    if fork >= tip.number:
        return Wait(Why.DISAGREE)
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
    below = max(below, lowest - 1)
    while above - below > 1:
        middle = (above + below) // 2
        if same(middle):
            below = middle
        else:
            above = middle
    return below


def linked(parent: bytes | None, links: Sequence[Link]) -> int:
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
