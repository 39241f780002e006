"""The reports of a follower: progress and log lines for people, events for the platform.

Progress is one line that is always true; a log line is written when something begins or ends, not while it lasts.

The events of a commit come in order: invalidations first, then how far the outputs reach. Every event names the
revision of its dataset that it comes of. If others have invalidated something meanwhile, it doesn't count: the
platform ends the lease, and the next attempt gets the ranges to write again. The id of an invalidation is unique.
The event is stored with its commit and sent again with the same id, while the same reorg, should it happen again,
gets another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracelake.contracts.dispatcher_api import EventIn
from tracelake.domain.chain_status import BEHIND
from tracelake.evm.rpc.endpoint import EndpointStats
from tracelake.operators.block_follower.decide import BlockId, BlockLink, WaitReason
from tracelake.operators.context import Context
from tracelake.operators.outputs import Output

_FRESH_SECONDS = 5.0
"""How often facts are looked up that go with each head that is seen: times, and the endpoints' states."""
_LONGEST_TEXT = 300
_TROUBLE = "waiting: temporary problem"


@dataclass(slots=True)
class FollowerProgress:
    ctx: Context
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    reorgs: int = 0
    deepest: int = 0
    delivered: set[str] = field(default_factory=set)
    """The endpoints whose blocks this attempt has written."""
    dissent: Mapping[str, str] = field(default_factory=dict)
    """With a quorum: the endpoints that don't agree on the head, or lag, and what each of them has."""
    disputed: int | None = None
    """With a quorum: the block that the endpoints don't agree on."""
    health: Callable[[], Sequence[EndpointStats]] = tuple
    """The state of each endpoint of the pool."""
    _why: WaitReason | None = None
    _trouble: str | None = None
    _trouble_since: int = 0
    _catching_up: tuple[float, int] | None = None
    _warned_of_finality: bool = False
    _seen_at: int = 0
    _fresh: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def resumed(cls, ctx: Context) -> FollowerProgress:
        """Goes on with the counts that earlier attempts have saved."""
        known = ctx.state if isinstance(ctx.state, dict) else {}
        return cls(ctx, reorgs=int(known.get("reorgs", 0)), deepest=int(known.get("deepest_reorg", 0)))

    def unknown_finality(self) -> None:
        if not self._warned_of_finality:
            self._warned_of_finality = True
            self.ctx.log.warning(
                "no endpoint knows a finalized block, so nothing is announced as final: set finality to a number"
            )

    def is_due(self) -> bool:
        """Whether the facts that go with a head are old enough to be looked up again."""
        return self.wall() - self._seen_at >= _FRESH_SECONDS or self.wall() < self._seen_at

    def saw_head(
        self,
        head: int,
        tip: int | None,
        final: int | None,
        first: int,
        *,
        head_time: int | None = None,
        tip_time: float | None = None,
    ) -> None:
        """``tip_time`` is looked up, and given, only when it ``is_due``. The time of the report changes as rarely,
        since every change is a write of the platform's."""
        behind = max(0, head - (first - 1 if tip is None else tip))
        if self.is_due():
            self._seen_at = int(self.wall())
            lag_seconds = (
                None if None in (head_time, tip_time) else max(0.0, (head_time or 0) - (tip_time or 0))
            )
            self._fresh = {
                "head_at": self._seen_at,
                "head_time": head_time,
                "lag_seconds": lag_seconds,
                **self._endpoint_fields(),
            }
        fields: dict[str, Any] = {
            "head": head,
            "tip": tip,
            "lag": behind,
            "finalized": final,
            "reorgs": self.reorgs,
            "deepest_reorg": self.deepest,
            "endpoints": ", ".join(sorted(self.delivered)) or None,
            "dissent": "; ".join(f"{name} {view}" for name, view in self.dissent.items()) or None,
            **self._fresh,
        }
        if behind == 0:
            fields["lag_seconds"] = 0.0
        if behind < BEHIND:
            if self._catching_up is not None:
                self.ctx.log.info("caught up", head=head)
                self._catching_up = None
            message = self._message("following the tip")
            if self.disputed is not None:
                message = f"waiting: the endpoints don't agree on block {self.disputed}"
            self.ctx.progress(**fields, blocks_per_second=None, eta_seconds=None, message=message)
            return
        if self._catching_up is None:
            self._catching_up = (self.clock(), behind)
            self.ctx.log.info("catching up", head=head, behind=behind)
        began, were = self._catching_up
        # Two calls may see the same time, and the rate is a quotient.
        took = max(self.clock() - began, 1e-6)
        rate = max(0.0, (were - behind) / took)
        eta = round(behind / rate, 1) if rate else None
        message = self._message("catching up")
        self.ctx.progress(**fields, blocks_per_second=round(rate, 1), eta_seconds=eta, message=message)

    def _endpoint_fields(self) -> dict[str, Any]:
        """Each endpoint's state, and the problems of those that aren't in order."""
        found = self.health()
        bad = [each for each in found if each.state not in ("ok", "unknown")]
        return {
            "endpoint_states": _short(", ".join(f"{each.name} {each.state}" for each in found)),
            "endpoint_problems": _short("; ".join(f"{each.name}: {each.last_problem}" for each in bad)),
        }

    def _message(self, usual: str) -> str:
        """A head was seen, but as long as a problem lasts its blocks aren't followed."""
        return usual if self._trouble is None else _TROUBLE

    def waits(self, why: WaitReason) -> None:
        """Logged once, however long it lasts, and shown as long as it lasts."""
        if why is not WaitReason.IN_STEP:
            if why is not self._why:
                self.ctx.log.info("waiting", why=str(why))
            # A block that the endpoints don't agree on is the better explanation.
            if self.disputed is None:
                self.ctx.progress(message=str(why))
        self._why = why

    def reorg(self, fork: int, old: BlockId, links: list[BlockLink]) -> None:
        depth = old.number - fork
        self.reorgs += 1
        self.deepest = max(self.deepest, depth)
        self.ctx.log.warning(
            "reorg" if links else "the chain got shorter",
            fork=fork,
            depth=depth,
            old_tip=old.number,
            old_hash=old.hash.hex(),
            new_tip=links[-1].number if links else fork,
            new_hash=links[-1].hash.hex() if links else None,
        )
        self.ctx.save({"reorgs": self.reorgs, "deepest_reorg": self.deepest})

    def trouble(self, problem: str, *, of_chain: bool = False) -> None:
        """A problem that may pass. It is logged when it is new, not each time it happens again."""
        if self._trouble is None:
            self._trouble_since = int(self.wall())
        if problem != self._trouble:
            self.ctx.log.warning(_TROUBLE, problem=problem)
        self._trouble = problem
        self.ctx.progress(
            message=_TROUBLE,
            problem=problem,
            problem_since=self._trouble_since,
            problem_of="chain" if of_chain else "platform",
            **self._endpoint_fields(),
        )

    def recovered(self) -> None:
        if self._trouble is not None:
            self.ctx.log.info("recovered")
            self.ctx.progress(problem=None, problem_since=None, problem_of=None)
            self._trouble = None


def _short(text: str) -> str | None:
    """Of a size that leaves room for the others: a report that is too large would end the attempt."""
    return text.encode("ascii", "backslashreplace").decode()[:_LONGEST_TEXT] or None


class FollowerEvents:
    def __init__(self, outputs: Sequence[Output], epoch: int) -> None:
        self._outputs = outputs
        self._epoch = epoch
        self._revisions = {output.index: output.revision for output in outputs}
        self._invalidations = 0

    def invalidate(self, start: int, end: int, reason: str) -> list[EventIn]:
        """Must be sent before any event that is made later, which counts on the new revision."""
        self._invalidations += 1
        # The epoch keeps the ids of two attempts apart, which both count from 1.
        event_id = f"blocks-{start}-{end}-{self._epoch}.{self._invalidations}"
        for output in self._outputs:
            self._revisions[output.index] += 1
        return [
            output.event(invalidate=(start, end), event_id=event_id, reason=reason)
            for output in self._outputs
        ]

    def reaches(self, cursor: int, finalized: int | None) -> list[EventIn]:
        return [
            output.event(cursor=cursor, finalized=finalized, revision=self._revisions[output.index])
            for output in self._outputs
        ]
