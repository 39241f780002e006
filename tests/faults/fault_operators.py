"""Operators that write real outputs, and in their first attempt linger long enough for something to go wrong.

Each row says which attempt wrote it, so that a test sees whose rows were committed.
"""

from __future__ import annotations

import ctypes
import os
import sys

import pyarrow as pa

from tracelake.operators.context import Context
from tracelake.operators.registry import operator

VICTIM = "victim"
_PR_SET_NAME = 15


@operator("holds_files")
def holds_files(ctx: Context) -> None:
    ctx.outputs[0].write(_rows(ctx))
    _linger(ctx)


@operator("holds_rows")
def holds_rows(ctx: Context) -> None:
    ctx.outputs[0].stage(_rows(ctx))
    _linger(ctx)


@operator("fills_the_disk")
def fills_the_disk(ctx: Context) -> None:
    """Writes more than the limit lets it, into its folder or into its output."""
    limit = ctx.config["limit"]
    sys.stdout.write("x" * 4 * limit)
    sys.stdout.flush()
    if ctx.config["what"] == "folder":
        with open(os.path.join(os.environ["TMPDIR"], "scratch"), "wb") as file:
            file.write(bytes(4 * limit))
    count = len(ctx.blocks)
    noise = [os.urandom(limit) for _ in range(count)]
    ctx.outputs[0].write(pa.table({"block_number": list(ctx.blocks), "noise": noise}))


def _rows(ctx: Context) -> pa.Table:
    blocks = list(ctx.blocks)
    return pa.table({"block_number": blocks, "attempt": [ctx.task.attempt] * len(blocks)})


def _linger(ctx: Context) -> None:
    if ctx.task.attempt == 1:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, VICTIM.encode(), 0, 0, 0)
        ctx.progress(staged=True)
        ctx.sleep(ctx.config["seconds"])
