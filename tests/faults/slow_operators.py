"""A consumer that is slower than its producers, whatever the machine: it copies a table after a while."""

from __future__ import annotations

from tracelake.operators.context import Context
from tracelake.operators.registry import operator


@operator("slow_copy")
def slow_copy(ctx: Context) -> None:
    ctx.sleep(ctx.config["seconds"])
    ctx.outputs[0].write(ctx.inputs[0].arrow())
