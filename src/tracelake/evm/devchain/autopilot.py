"""A chain that grows by itself: a block at every interval, and a reorg every so many blocks."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Event

import structlog

from tracelake.domain.errors import Invalid
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.growth import Growth

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Autopilot:
    """Every ``reorg_every`` blocks the last ``reorg_depth`` are replaced (0: never)."""

    block_time: float
    reorg_every: int = 0
    reorg_depth: int = 1

    def run(self, chain: DevChain, stop: Event, growth: Growth | None = None) -> None:
        """Until ``stop`` is set, or the chain has grown as far as it may. A reorg replaces blocks in place of the
        one that would have been mined, and brings one more, so the chain is never shorter than before and each of
        its intervals shows one head."""
        growth = growth or Growth(chain.profile.transactions)
        mined = 0
        while not stop.wait(self.block_time):
            mined += 1
            depth = min(self.reorg_depth, chain.head)
            reorgs = self.reorg_every > 0 and mined % self.reorg_every == 0 and depth > 0
            try:
                growth.add(depth + 1 if reorgs else 1)
            except Invalid as full:
                _log.warning("the chain grows no further", reason=full.message)
                return
            if reorgs:
                chain.reorg(depth, depth + 1)
            else:
                chain.mine()
            # Made now, so that whoever asks for the new head needn't wait for it.
            chain.block(chain.head)
