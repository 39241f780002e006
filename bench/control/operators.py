"""Operators under measurement: they print their start time and do next to nothing."""

from __future__ import annotations

import statistics
import time

from tracelake.operators import Context, operator

PLAIN_RUNS = 20


@operator("bench_first_line")
def first_line(ctx: Context) -> None:
    print(time.time())


@operator("bench_select_1")
def select_1(ctx: Context) -> None:
    ctx.spark.sql("select 1").collect()


@operator("bench_plain_session")
def plain_session(ctx: Context) -> None:
    """The same query without the platform around it: sessions of the same server, one after the other."""
    seconds = []
    for _ in range(PLAIN_RUNS):
        began = time.perf_counter()
        session = ctx.spark.newSession()
        session.sql("select 1").collect()
        seconds.append(time.perf_counter() - began)
    print(statistics.median(seconds))
