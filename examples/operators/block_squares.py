"""An operator of your own: for every block of its range, the square of its number, as a Parquet table."""

import pyarrow as pa

from tracelake.operators import Context, operator


@operator("block_squares")
def block_squares(ctx: Context) -> None:
    blocks = list(ctx.blocks)
    ctx.log.info("squaring", blocks=len(blocks))
    squares = [block**2 + ctx.config.get("offset", 0) for block in blocks]
    ctx.outputs[0].write(pa.table({"block_number": blocks, "square": squares}))
    ctx.progress(done=len(blocks), total=len(blocks))
