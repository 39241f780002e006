"""What people see of a follower: a line of progress that is always true, and log lines that tell what happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tracelake.operators.block_follower.decide import BlockId, Link, Why
from tracelake.operators.context import Context

_BEHIND = 100
"""From so many blocks on, a follower is catching up and says when it will be there."""


@dataclass(slots=True)
class Story:
    ctx: Context
    clock: Callable[[], float] = time.monotonic
    reorgs: int = 0
    deepest: int = 0
    delivered: set[str] = field(default_factory=set)
    """The endpoints whose blocks are in the tables, of this attempt."""
    _why: Why | None = None
    _trouble: str | None = None
    _catching_up: tuple[float, int] | None = None
    _told_of_finality: bool = False

    @classmethod
    def resumed(cls, ctx: Context) -> Story:
        """With what earlier attempts have counted."""
        known = ctx.state if isinstance(ctx.state, dict) else {}
        return cls(ctx, reorgs=int(known.get("reorgs", 0)), deepest=int(known.get("deepest_reorg", 0)))

    def unknown_finality(self) -> None:
        if not self._told_of_finality:
            self._told_of_finality = True
            self.ctx.log.warning(
                "no endpoint says what is finalized, so nothing is announced as final: set finality to a number"
            )

    def saw_head(self, head: int, tip: int | None, final: int | None, first: int) -> None:
        behind = max(0, head - (first - 1 if tip is None else tip))
        fields: dict[str, Any] = {
            "head": head,
            "tip": tip,
            "lag": behind,
            "finalized": final,
            "reorgs": self.reorgs,
            "deepest_reorg": self.deepest,
            "endpoints": ", ".join(sorted(self.delivered)) or None,
        }
        if behind < _BEHIND:
            if self._catching_up is not None:
                self.ctx.log.info("caught up", head=head)
                self._catching_up = None
            self.ctx.progress(**fields, blocks_per_second=None, eta_seconds=None, message="following the tip")
            return
        if self._catching_up is None:
            self._catching_up = (self.clock(), behind)
            self.ctx.log.info("catching up", head=head, behind=behind)
        began, were = self._catching_up
        took = max(self.clock() - began, 1e-6)
        rate = max(0.0, (were - behind) / took)
        eta = round(behind / rate, 1) if rate else None
        self.ctx.progress(**fields, blocks_per_second=round(rate, 1), eta_seconds=eta, message="catching up")

    def waits(self, why: Why) -> None:
        """Said once, however long it lasts."""
        if why is not self._why and why is not Why.IN_STEP:
            self.ctx.log.info("waiting", why=str(why))
            self.ctx.progress(message=str(why))
        self._why = why

    def reorg(self, fork: int, old: BlockId, links: list[Link]) -> None:
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

    def trouble(self, problem: str) -> None:
        """Something that may pass; a new one is told, the same one isn't told again."""
        if problem != self._trouble:
            self.ctx.log.warning("can't go on for now", problem=problem)
        self._trouble = problem
        self.ctx.progress(message="can't go on for now", problem=problem)

    def goes_on(self) -> None:
        if self._trouble is not None:
            self.ctx.log.info("going on")
            self.ctx.progress(problem=None)
            self._trouble = None
