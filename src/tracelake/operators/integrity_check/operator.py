"""``integrity_check``: stored blocks against themselves and against the chain; what is wrong is taken back.

    inputs: [{ from: { job: ingest, output: 0 } }, { from: { job: ingest, output: 1 }, trigger: false }]
    config: { rpc_pool: main, verify: bloom }

Inputs are tables of one chain, in files or in Postgres, and are told apart by their columns. Every block must be
there once and be the child of the one before, every other row belong to a stored block and none be missing. Then,
by ``verify``: ``bloom`` compares the headers that the chain has now (hash, number of transactions, filter of the
logs), ``full`` every value, ``off`` nothing.

What is wrong is taken back in all the inputs, at once: whoever made it makes it again, and what was made of it. The
output ``findings`` announces the blocks that were wrong (PerPartition), or how far the check has come (PerUpdate).
A range that is found wrong in the same way after it was made again is a failure for a person to look at: the
source and the chain disagree, and no repetition helps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

from tracelake.contracts.dispatcher_api import MAX_EVENTS, EventIn, InvalidateRange
from tracelake.domain import integrity_config
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Conflict, Invalid
from tracelake.evm.raw_block import Verify
from tracelake.evm.rpc.pool import Pool
from tracelake.operators.api import operator
from tracelake.operators.context import Context
from tracelake.operators.inputs import Input
from tracelake.operators.integrity_check.check_cell import UNFORESEEN, CellFound, CheckWork, check_cell
from tracelake.operators.job_config import refuse_wrong
from tracelake.operators.spark_cells import run_cells
from tracelake.operators.spark_slots import spark_slots
from tracelake.operators.stored_chain.blocks_check import unjoined
from tracelake.operators.stored_chain.finding import Finding, merged, ranges
from tracelake.operators.stored_chain.stored_table import StoredTable, stored_table

REASON = "integrity_check: "
_CELL = 250
_SHOWN = 20
_LONGEST_REASON = 1000


@operator("integrity_check")
def integrity_check(ctx: Context) -> None:
    verify = _verify(ctx)
    if ctx.scope is None or ctx.scope.blocks is None:
        ctx.log.info("nothing to do: no new blocks")
        return
    checked = [source for source in ctx.inputs if source.storage != "none"]
    work = _work(ctx, checked, ctx.scope.blocks, verify)
    findings = check(ctx, work)
    if not findings:
        ctx.log.info("all is right", start=work.span.start, end=work.span.end)
        if not ctx.scope.by_cursor:
            ctx.outputs[0].announce_nothing()
        return
    for finding in findings[:_SHOWN]:
        ctx.log.warning("wrong", blocks=f"{finding.start}-{finding.end}", what=finding.what)
    refuse_repetition(checked, findings)
    wrong = ranges(findings)
    take_back(ctx, checked, findings, wrong)
    for span in wrong if not ctx.scope.by_cursor else []:
        ctx.outputs[0].announce(start=span.start, end=span.end)


def check(ctx: Context, work: CheckWork) -> list[Finding]:
    """By one Spark job; what is wrong with the cells, and where they don't join."""
    found = run_cells(ctx, work.cells, partial(check_cell, work), CellFound, work.span, incomplete=UNFORESEEN)
    joints = unjoined(cell.edge for cell in found if cell.edge is not None)
    return merged([*(finding for cell in found for finding in cell.findings), *joints])


def refuse_repetition(checked: Sequence[Input], findings: Sequence[Finding]) -> None:
    before = {source.invalidation.reason for source in checked if source.invalidation is not None}
    for finding in findings:
        if _reason(finding) in before:
            raise Invalid("StillWrong", f"after it was made again, {finding}")


def take_back(
    ctx: Context, checked: Sequence[Input], findings: Sequence[Finding], wrong: list[BlockRange]
) -> None:
    """All of it in one call, and so in one transaction: a check that has spoken reads what is no longer true."""
    if len(wrong) * len(checked) > MAX_EVENTS:
        wrong = [BlockRange(wrong[0].start, wrong[-1].end)]
    events = []
    for span in wrong:
        first = next(finding for finding in findings if span.start <= finding.start <= span.end)
        for source in checked:
            key = f"{ctx.task.task_id}/{source.dataset_version}/{source.revision}/{span.partition_key}"
            events.append(
                EventIn(
                    dataset_uuid=source.dataset_uuid,
                    dataset_version=source.dataset_version,
                    id=hashlib.sha256(key.encode()).hexdigest()[:40],
                    invalidate=InvalidateRange(span.start, span.end),
                    reason=_reason(first),
                )
            )
    ctx.emit(*events)


def _work(ctx: Context, checked: Sequence[Input], span: BlockRange, verify: Verify) -> CheckWork:
    tables: list[StoredTable] = []
    for source in checked:
        table = stored_table(source)
        if table is None:
            raise Conflict("InputEmpty", f"input {source.index} has no rows yet")
        if table.dataset in {known.dataset for known in tables}:
            raise Invalid("InvalidConfig", f"two inputs are {table.dataset}")
        tables.append(table)
    pool = None if verify is Verify.OFF else ctx.rpc_pool()
    chain_id, share = 0, 1.0
    if pool is not None:
        with Pool(pool) as endpoints:
            chain_id = endpoints.chain_id(ctx.config.get("chain_id"))
        share = 1 / spark_slots(ctx.spark)
    return CheckWork(tuple(tables), span, _CELL, verify, pool, share, chain_id)


def _verify(ctx: Context) -> Verify:
    config = ctx.config
    refuse_wrong("integrity_check", config, integrity_config.KEYS, integrity_config.problems(config))
    return Verify(config.get("verify", integrity_config.DEFAULTS["verify"]))


def _reason(finding: Finding) -> str:
    return f"{REASON}{finding}"[:_LONGEST_REASON]
