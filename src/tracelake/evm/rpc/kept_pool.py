"""A pool that this process keeps for a while: whoever needs the same endpoints soon after finds warm connections,
and what was learnt about them. For processes that do many small pieces of work, as Spark's Python workers do.

Such a process serves job after job. A pool that nobody uses is closed and forgotten within a minute or so, with its
threads, its connections and the keys in its addresses; so a job finds what it was given, and little of what was
given to another.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from tracelake.evm.rpc.config import PoolConfig
from tracelake.evm.rpc.pool import Pool

IDLE_SECONDS = 60.0

_MOST_IDLE = 4
_lock = threading.Lock()


@dataclass(slots=True)
class _Kept:
    pool: Pool
    process: int
    users: int = 0
    idle_since: float = 0.0


_kept: dict[tuple[bytes, float], _Kept] = {}
_sweeping: threading.Timer | None = None


@contextmanager
def kept_pool(config: PoolConfig, *, share: float = 1.0) -> Iterator[Pool]:
    """Left open on leaving it. ``share`` as for ``Pool``."""
    kept = _take(config, share)
    try:
        yield kept.pool
    finally:
        with _lock:
            kept.users -= 1
            kept.idle_since = time.monotonic()
            over = _forget_idle(most=_MOST_IDLE)
            _sweep_later()
        _close(over)


def _take(config: PoolConfig, share: float) -> _Kept:
    key = (msgspec.json.encode(config, order="sorted"), share)
    with _lock:
        kept = _kept.get(key)
        if kept is None or kept.process != os.getpid():
            # What a fork has inherited are threads and connections of its parent's: there is nothing to close.
            kept = _kept[key] = _Kept(Pool(config, share=share), os.getpid())
        kept.users += 1
        return kept


def _forget_idle(*, most: int | None = None, since: float | None = None) -> list[_Kept]:
    """Those idle since then, or those beyond so many, the longest idle first."""
    idle = sorted(
        ((key, kept) for key, kept in _kept.items() if not kept.users), key=lambda each: each[1].idle_since
    )
    over = len(idle) - most if most is not None else 0
    found = [
        (key, kept)
        for place, (key, kept) in enumerate(idle)
        if place < over or (since is not None and kept.idle_since <= since)
    ]
    for key, _ in found:
        del _kept[key]
    return [kept for _, kept in found]


def _sweep_later() -> None:
    global _sweeping
    if _sweeping is None or not _sweeping.is_alive():
        _sweeping = threading.Timer(IDLE_SECONDS, _sweep)
        _sweeping.daemon = True
        _sweeping.start()


def _sweep() -> None:
    global _sweeping
    with _lock:
        over = _forget_idle(since=time.monotonic() - IDLE_SECONDS)
        _sweeping = None
        if _kept:
            _sweep_later()
    _close(over)


def _close(over: list[_Kept]) -> None:
    for kept in over:
        if kept.process == os.getpid():
            kept.pool.close()
