"""An ingest that needs no chain: one row per block, up to the tip."""

from __future__ import annotations

import pyarrow as pa

from tracelake.domain.errors import Invalid
from tracelake.operators.context import Context
from tracelake.operators.registry import operator


@operator("pretend_ingest")
def pretend_ingest(ctx: Context) -> None:
    tip = ctx.config.get("tip")
    if tip is not None and ctx.blocks[-1] > tip:
        raise Invalid("BeyondTip", f"block {ctx.blocks[-1]} is beyond the tip of the chain, {tip}")
    ctx.sleep(ctx.config.get("seconds", 0))
    for output in ctx.outputs:
        output.write(pa.table({"block_number": list(ctx.blocks)}))
