"""Pools that a process keeps between pieces of work, and how long."""

from __future__ import annotations

import os

import pytest

from tracelake.evm.rpc import pool as module
from tracelake.evm.rpc.config import PoolConfig, pool_of
from tracelake.evm.rpc.pool import Pool, kept_pool

PATIENCE = 30.0


pytestmark = pytest.mark.usefixtures("no_pool_is_kept")


def config(port: int) -> PoolConfig:
    return pool_of(f"http://127.0.0.1:{port}")


def used(port: int, share: float = 1.0) -> Pool:
    with kept_pool(config(port), share=share) as pool:
        return pool


def test_who_comes_again_finds_the_same_pool() -> None:
    first = used(1)
    assert used(1) is first
    assert used(2) is not first, "other endpoints"
    assert used(1, share=0.5) is not first, "another part of their limits"


def test_only_a_few_idle_ones_are_kept() -> None:
    pools = [used(port) for port in range(1, 9)]
    assert [pool.selector.closed.is_set() for pool in pools] == [True] * 4 + [False] * 4


def test_one_in_use_is_not_closed_for_others() -> None:
    with kept_pool(config(1)) as pool:
        for port in range(2, 12):
            used(port)
        assert not pool.selector.closed.is_set()


def test_one_that_nobody_uses_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.05)
    with kept_pool(config(1)) as busy:
        idle = used(2)
        assert idle.selector.closed.wait(PATIENCE)
        assert not busy.selector.closed.is_set()
    assert busy.selector.closed.wait(PATIENCE)
    assert used(2) is not idle


def test_what_a_fork_has_inherited_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = used(1)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    own = used(1)
    assert own is not inherited
    assert not inherited.selector.closed.is_set(), "it is the parent's"
    inherited.close()
