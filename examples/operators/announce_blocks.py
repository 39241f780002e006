"""An operator for a cron, webhook or manual source: it announces the blocks that the task is for."""

import json

from tracelake.operators import Context, operator


@operator("announce_blocks")
def announce_blocks(ctx: Context) -> None:
    source, output = ctx.source, ctx.outputs[0]
    if source is None:
        raise ValueError("announce_blocks runs in a cron, webhook or manual source")
    if source.tick is not None:
        ctx.emit(output.event(cursor=source.tick))
    elif source.delivery is not None:
        asked = json.loads(ctx.source_body())
        ctx.emit(output.event(start=asked["start"], end=asked["end"]))
    elif source.request is not None and source.request.start is not None:
        ctx.emit(output.event(start=source.request.start, end=source.request.end))
    else:
        ctx.log.warning("the trigger named no blocks: nothing to announce")
