"""Operators that behave and misbehave, for the tests of the wrapper."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from tracelake.operators.context import Context
from tracelake.operators.registry import operator


@operator("killed")
def killed(ctx: Context) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@operator("exits")
def exits(ctx: Context) -> None:
    os._exit(3)


@operator("says_nothing")
def says_nothing(ctx: Context) -> None:
    raise ValueError


@operator("sleeps")
def sleeps(ctx: Context) -> None:
    ctx.log.info("sleeping", pid=os.getpid())
    if not ctx.sleep(ctx.config.get("seconds", 600)):
        return
    announce(ctx)


@operator("deaf")
def deaf(ctx: Context) -> None:
    """Hears no cancel, and has a child that hears none either."""
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    ctx.log.info("deaf")
    time.sleep(600)


@operator("babbles")
def babbles(ctx: Context) -> None:
    """Writes what is no message to every socket that it has."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as found:
                found.send(b"\x00\x00\x00\x05hello")
        except OSError:
            continue
    time.sleep(600)


@operator("talks")
def talks(ctx: Context) -> None:
    ctx.progress(done=1, total=2, message="half")
    ctx.log.info("said by the operator")
    ctx.save({"seen": ctx.state})
    announce(ctx)


@operator("fails_once")
def fails_once(ctx: Context) -> None:
    if ctx.state is None:
        ctx.save({"tried": ctx.task.attempt})
        raise RuntimeError(f"first attempt {ctx.task.attempt}")
    announce(ctx)


@operator("shows_environment")
def shows_environment(ctx: Context) -> None:
    for name, value in sorted(os.environ.items()):
        sys.stdout.write(f"{name}={value}\n")
    sys.stdout.flush()
    if ctx.config.get("tells"):
        ctx.progress(message=f"with {os.environ['API_KEY']}")
    if ctx.config.get("raises"):
        raise RuntimeError(f"the key is {os.environ['API_KEY']}")
    announce(ctx)


@operator("writes")
def writes(ctx: Context) -> None:
    """One row per block."""
    import pyarrow as pa

    ctx.outputs[0].write(pa.table({"block_number": pa.array(ctx.blocks, pa.int64())}))


@operator("reads")
def reads(ctx: Context) -> None:
    rows = ctx.inputs[0].arrow().num_rows
    ctx.progress(rows=rows)
    announce(ctx)


@operator("selects")
def selects(ctx: Context) -> None:
    """A job that needs a core of Spark's: it waits for ever behind work that was left running."""
    ctx.log.info("selected", rows=ctx.spark.range(100).repartition(2).count())
    announce(ctx)


def announce(ctx: Context) -> None:
    for output in ctx.outputs:
        output.announce()


@operator("spins")
def spins(ctx: Context) -> None:
    """Keeps Spark busy for longer than any test waits."""
    ctx.log.info("spinning")
    ctx.spark.range(10**14).selectExpr("sum(id % 7)").collect()
    announce(ctx)


@operator("spins_once")
def spins_once(ctx: Context) -> None:
    """Only a later attempt gets to write anything."""
    if ctx.task.attempt == 1:
        spins(ctx)
    blocks = ctx.spark.range(ctx.blocks.start, ctx.blocks.stop).toDF("block_number")
    ctx.outputs[0].write(blocks)
