"""``block_follower``: an always-on source that keeps hot tables equal to the head of an EVM chain.

    config: { chain_id: 1, rpc_pool: main, start_block: 0, finality: finalized }
    outputs: [{ name: blocks }, { name: transactions }, { name: logs }]

Outputs say by their names what they hold: ``blocks`` (always), ``transactions``, ``logs``, ``receipts``,
``withdrawals``, ``traces``. ``start_block`` is a number or ``latest``; ``verify`` is ``full``, ``bloom`` or
``off``; ``finality`` is ``finalized`` or a number of blocks, and a reorg that goes deeper stops the follower
until a person decides; ``poll_seconds`` is the longest wait between two looks at the head;
``max_blocks_per_commit`` how much becomes visible at once while catching up; ``catch_up`` says who fetches
then, ``spark`` or this ``process`` (``auto``: Spark where there is one); ``shorter_after_seconds`` how long
no endpoint may have our last block before the chain is believed to have got shorter.
"""

from __future__ import annotations

import time

from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.rpc.pool import Pool
from tracelake.operators.api import operator
from tracelake.operators.block_follower.begin import begin
from tracelake.operators.block_follower.config import FollowerConfig
from tracelake.operators.block_follower.follower import Follower
from tracelake.operators.block_follower.load import InProcess, Loader
from tracelake.operators.block_follower.tables import ChainTables
from tracelake.operators.context import Context

_SPARK = "ecs_spark"
_DATA = "DataUnavailable"
_FIRST_WAIT = 0.05
_QUIET_SECONDS = 1.0
_LONGEST_WAIT = 10.0
_MISMATCH_SECONDS = 30.0


@operator("block_follower")
def block_follower(ctx: Context) -> None:
    if ctx.scope is not None:
        raise Invalid("InvalidScope", "block_follower is a source: it has no inputs")
    config = FollowerConfig.parse(ctx.config)
    tables = ChainTables(ctx)
    with Pool(ctx.rpc_pool()) as pool:
        at_tip = InProcess(tables, pool, config.chain_id, config.verify)
        follow(Follower(ctx, config, pool, tables, at_tip, _far_behind(ctx, config, tables)))


def follow(follower: Follower) -> None:
    """Until the attempt is canceled. What may pass is waited for here. After trouble with the data database what is
    stored is read anew: a commit that wasn't answered may have happened."""
    ctx = follower.ctx
    begun, trouble = False, Trouble()
    while ctx.wait_while_paused():
        try:
            if not begun:
                begin(follower)
                begun = True
            wait = follower.step()
            trouble.over()
            follower.story.goes_on()
        except Unavailable as error:
            if ctx.canceled:
                return
            if follower.unsure or trouble.is_hopeless(error):
                raise
            if error.reason == _DATA:
                begun = False
                follower.tables.reset_staging()
            else:
                follower.tables.drop_staged()
            wait = trouble.wait()
            if trouble.is_worth_telling(error):
                follower.story.trouble(error.message)
        if wait and not ctx.sleep(wait):
            return


class Trouble:
    """How long to wait for something that is unavailable, and when to fail of it."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._wait = _FIRST_WAIT

    def over(self) -> None:
        self._since, self._wait = None, _FIRST_WAIT

    def wait(self) -> float:
        wait, self._wait = self._wait, min(_LONGEST_WAIT, self._wait * 2)
        return wait

    def is_worth_telling(self, error: Unavailable) -> bool:
        """A chain that moves, or is seen unevenly, is nothing to speak of if it passes at once."""
        moving = error.reason in ("BlockNotFound", "BlockMismatch", "ChainChanged", "EndpointsDisagree")
        return not moving or self._seconds >= _QUIET_SECONDS

    def is_hopeless(self, error: Unavailable) -> bool:
        """Endpoints that all give wrong blocks won't do better by themselves: the task fails and says so."""
        if self._since is None:
            self._since = time.monotonic()
        return error.reason == "BlockMismatch" and self._seconds >= _MISMATCH_SECONDS

    @property
    def _seconds(self) -> float:
        return 0.0 if self._since is None else time.monotonic() - self._since


def _far_behind(ctx: Context, config: FollowerConfig, tables: ChainTables) -> Loader | None:
    if config.catch_up == "process" or (config.catch_up == "auto" and ctx.task.runtime != _SPARK):
        return None
    from tracelake.operators.block_follower.load_on_spark import OnSpark

    return OnSpark(ctx, tables, config)
