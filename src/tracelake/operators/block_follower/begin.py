"""Where an attempt goes on: at what is stored, whatever earlier attempts came to.

The data database is the truth about blocks, the platform about what others have heard of them. What they don't
agree on is settled before anything new is read:

- stored blocks of another chain: refused, nothing is touched;
- blocks that were announced and final, and aren't stored: their rows live in files, and the chain goes on there;
- other blocks that were announced and aren't stored, as after a restore from a backup: they are taken back;
- blocks that others have found wrong and taken back (``integrity_check``): written again;
- a stored chain that is broken above what is final: written again from there.

In the end the reach is announced once more: an earlier attempt's word may not have counted.
"""

from __future__ import annotations

from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.operators.block_follower.decide import BlockId, Rewrite
from tracelake.operators.block_follower.follower import Follower


def begin(follower: Follower) -> None:
    """May be called again after something was unavailable."""
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
    if not follower.settled:
        _take_back_what_is_gone(follower)
        if spans := _taken_back(follower):
            for span in spans:
                _write_again(follower, span)
            # What was broken may have been just that.
            broken = window.reload(follower.finality.final)
            _resume_above_files(follower)
        follower.settled = True
    if broken is not None:
        _mend(follower, broken)
    follower.announce()


def _mend(follower: Follower, broken: int) -> None:
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


def _take_back_what_is_gone(follower: Follower) -> None:
    cursor, tip = follower.tables.blocks.written.cursor, follower.window.tip
    first = follower.start or 0 if tip is None else tip.number + 1
    if cursor is not None and cursor >= first:
        follower.ctx.log.warning("less is stored than was announced", announced=cursor, first_missing=first)
        follower.ctx.emit(*follower.news.taken_back(first, cursor, "no longer stored"))


def _taken_back(follower: Follower) -> list[BlockRange]:
    """What others have taken back of any of the tables, as far as there are blocks."""
    tip = follower.window.tip
    if tip is None:
        return []
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
