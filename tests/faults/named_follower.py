"""The block follower in a process that a test can find, to kill it."""

from __future__ import annotations

import ctypes

from tracelake.operators.block_follower import operator as built_in
from tracelake.operators.context import Context
from tracelake.operators.registry import operator

NAME = "follower"
_PR_SET_NAME = 15


@operator("named_follower")
def named_follower(ctx: Context) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME.encode(), 0, 0, 0)
    built_in.block_follower(ctx)
