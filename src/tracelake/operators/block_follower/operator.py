"""``block_follower``: an always-on source that keeps hot tables equal to the head of an EVM chain.

    config: { chain_id: 1, rpc_pool: main, start_block: 0, finality: finalized }
    outputs: [{ name: blocks }, { name: transactions }, { name: logs }]

``domain.operators.block_follower`` declares its settings. An output's name says which table it holds; ``blocks`` is
always among them.

An attempt resumes from the stored blocks, whatever earlier attempts did. The data database is the truth about
blocks, the platform about what was announced. They are reconciled before anything new is read:

- stored blocks of another chain: refused, nothing is changed;
- blocks that were announced and final, and aren't stored: their rows are in files, and the chain goes on there;
- other blocks that were announced and aren't stored, as after a restore from a backup: invalidated;
- blocks that others have found wrong and invalidated (``integrity_check``): written again;
- a stored chain that is broken above the final block: written again from there.

In the end the reach is announced once more: the last announcement of an earlier attempt may not have counted.
"""

from __future__ import annotations

import time

from tracelake.domain.backoff import Backoff
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.domain.operators.block_follower import SPEC
from tracelake.domain.runtimes import ECS_SPARK
from tracelake.evm.rpc.pool import Pool
from tracelake.operators.block_follower.decide import BlockId, FollowerConfig, Rewrite
from tracelake.operators.block_follower.follower import Follower
from tracelake.operators.block_follower.load import BlockLoader, FollowedTables, InProcessLoader
from tracelake.operators.context import Context
from tracelake.operators.registry import operator

_DATA = "DataUnavailable"
_RETRY = Backoff(0.05, 10.0)
_QUIET_SECONDS = 1.0
_MISMATCH_SECONDS = 30.0


@operator(SPEC.name)
def block_follower(ctx: Context) -> None:
    if ctx.scope is not None:
        raise Invalid("InvalidScope", "block_follower is a source: it has no inputs")
    config = FollowerConfig.parse(ctx.config)
    tables = FollowedTables(ctx)
    with Pool(ctx.rpc_pool()) as pool:
        at_tip = InProcessLoader(tables, pool, config)
        follow(Follower(ctx, config, pool, tables, at_tip, _far_behind(ctx, config, tables)))


def follow(follower: Follower) -> None:
    """Run until the attempt is canceled, waiting for outages to pass. After one of the data database the stored
    blocks are read again: a commit that wasn't answered may have happened."""
    ctx = follower.ctx
    begun, trouble = False, OutageBackoff()
    while ctx.wait_while_paused():
        try:
            if not begun:
                resume(follower)
                begun = True
            wait = follower.step()
            trouble.over()
            follower.progress.recovered()
        except Unavailable as error:
            if ctx.canceled:
                return
            # The next attempt gets the current revision with its claim.
            if follower.unsure or trouble.is_hopeless(error):
                raise
            if error.reason == _DATA:
                begun = False
                # The database may have crashed and emptied the staging tables.
                follower.tables.reset_staging()
            else:
                follower.tables.drop_staged()
            wait = trouble.wait()
            if trouble.is_worth_logging(error):
                follower.progress.trouble(error.message, of_chain=error.reason != _DATA)
        if wait and not ctx.sleep(wait):
            return


class OutageBackoff:
    """Delays during an outage, and when to log it or to give up."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._delays = _RETRY.counter()

    def over(self) -> None:
        self._since = None
        self._delays.succeeded()

    def wait(self) -> float:
        return self._delays.failed()

    def is_worth_logging(self, error: Unavailable) -> bool:
        """A chain that moves, or endpoints that differ for a moment, aren't worth a log line."""
        moving = error.reason in ("BlockNotFound", "BlockMismatch", "ChainChanged", "EndpointsDisagree")
        return not moving or self._seconds >= _QUIET_SECONDS

    def is_hopeless(self, error: Unavailable) -> bool:
        """Endpoints that all return wrong blocks won't recover by themselves: the task fails with that error."""
        if self._since is None:
            self._since = time.monotonic()
        return error.reason == "BlockMismatch" and self._seconds >= _MISMATCH_SECONDS

    @property
    def _seconds(self) -> float:
        return 0.0 if self._since is None else time.monotonic() - self._since


def _far_behind(ctx: Context, config: FollowerConfig, tables: FollowedTables) -> BlockLoader | None:
    if config.catch_up == "process" or (config.catch_up == "auto" and ctx.task.runtime != ECS_SPARK):
        return None
    from tracelake.operators.block_follower.load import SparkLoader

    return SparkLoader(ctx, tables, config)


def resume(follower: Follower) -> None:
    """Reconcile stored and announced blocks. May be called again after something was unavailable."""
    # Before anything is changed: a wrong pool must not overwrite the blocks of another chain.
    _check_chain(follower)
    window = follower.window
    broken = window.reload(follower.finality.final)
    _resume_above_files(follower)
    follower.ctx.log.info(
        "stored so far",
        blocks=None if window.tip is None else window.tip.number,
        announced=follower.tables.blocks.written.cursor,
        finalized=follower.finality.final,
    )
    # Once for each attempt: the claim shows the outputs at
    # one moment, and is outdated after the first commit.
    if not follower.settled:
        _invalidate_missing(follower)
        if spans := _invalidated_by_others(follower):
            for span in spans:
                _write_again(follower, span)
            # The break that was found may have been in the blocks just written.
            broken = window.reload(follower.finality.final)
            _resume_above_files(follower)
        follower.settled = True
    if broken is not None:
        _repair(follower, broken)
    follower.announce()


def _repair(follower: Follower, broken: int) -> None:
    tip, head = follower.window.tip, follower.chain.head()
    assert tip is not None
    follower.ctx.log.warning("the stored chain is broken: writing it again from there", at=broken)
    found = follower.find_fork(min(broken - 1, head.number), tip, head)
    if not isinstance(found, Rewrite) or not follower.rewrite(
        found.fork, head, "the stored chain was broken"
    ):
        raise Unavailable("EndpointsDisagree", f"the endpoints don't agree on block {broken}")


def _check_chain(follower: Follower) -> None:
    wanted = follower.config.chain_id
    found = follower.pool.chain_id()
    if found != wanted:
        raise Invalid(
            "WrongChain", f"the RPC pool is on chain {found}, but the job follows chain_id {wanted}"
        )
    span = follower.tables.span()
    stored = None if span is None else follower.tables.chain_id(span.end)
    if stored is not None and stored != wanted:
        raise Invalid("WrongChain", f"the stored blocks are of chain {stored}, not of {wanted}")


def _resume_above_files(follower: Follower) -> None:
    cursor, final = follower.tables.blocks.written.cursor, follower.finality.final
    tip = follower.window.tip
    if cursor is None or final is None or cursor > final or (tip is not None and tip.number >= cursor):
        return
    found = follower.chain.hash_at(cursor)
    if found is None:
        raise Unavailable("BlockMissing", f"no endpoint has block {cursor}, which was final")
    follower.window.resume(BlockId(cursor, found))


def _invalidate_missing(follower: Follower) -> None:
    cursor, tip = follower.tables.blocks.written.cursor, follower.window.tip
    first = follower.start or 0 if tip is None else tip.number + 1
    if cursor is not None and cursor >= first:
        follower.ctx.log.warning("less is stored than was announced", announced=cursor, first_missing=first)
        follower.ctx.emit(*follower.events.invalidate(first, cursor, "no longer stored"))


def _invalidated_by_others(follower: Follower) -> list[BlockRange]:
    """Ranges of stored blocks that others have invalidated in any of the tables, merged."""
    tip = follower.window.tip
    if tip is None:
        return []
    # Blocks above the tip are written anyway, so the ranges end there.
    ranges = sorted(
        (max(back.start, follower.start or 0), min(back.end, tip.number))
        for output in follower.outputs
        for back in output.written.taken_back
    )
    merged: list[BlockRange] = []
    for start, end in ranges:
        if start > end:
            continue
        if merged and start <= merged[-1].end + 1:
            merged[-1] = BlockRange(merged[-1].start, max(merged[-1].end, end))
        else:
            merged.append(BlockRange(start, end))
    return merged


def _write_again(follower: Follower, span: BlockRange) -> None:
    follower.ctx.log.warning(
        "others found these blocks wrong: writing them again", start=span.start, end=span.end
    )
    first = span.start
    while first <= span.end:
        tip = follower.window.tip
        if tip is None or first > tip.number:
            return
        first = follower.write_again(first, min(span.end, tip.number), follower.chain.head())
