"""Closing the pools that a process keeps: a test that reads through them leaves none to the tests after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tracelake.evm.rpc import pool as module


@pytest.fixture
def no_pool_is_kept() -> Iterator[None]:
    yield
    if module._sweeping is not None:
        module._sweeping.cancel()
        module._sweeping.join()
    for kept in module._kept.values():
        kept.pool.close()
    module._kept.clear()
