"""The demo's own operator: the sum of a chunk's squares, on ``ecs_python``."""

from __future__ import annotations

import pyarrow as pa

from tracelake.operators import Context, operator


@operator("demo_sum")
def demo_sum(ctx: Context) -> None:
    squares = ctx.inputs[0].arrow().column("square").to_pylist()
    ctx.log.info("summing", rows=len(squares))
    total = {"block_number": [ctx.blocks.start], "total": [str(sum(squares))]}
    ctx.outputs[0].write(pa.table(total))
