"""Callers take turns: whoever asks much waits for himself, not the others for him."""

from __future__ import annotations

import asyncio

import pytest

from tracelake.domain.errors import Unavailable
from tracelake.query.engine.slots import FairQueue


def given(turns: FairQueue[int], waiting: dict[str, list[asyncio.Future[int]]]) -> list[str]:
    """Whose turns come, one after the other, as long as there are some."""
    order = []
    while (turn := turns.next()) is not None:
        [whose] = [key for key, own in waiting.items() if turn in own]
        order.append(whose)
        turns.done(whose)
    return order


async def test_callers_are_served_in_turn() -> None:
    turns: FairQueue[int] = FairQueue(2, 64)
    waiting = {key: [turns.join(key) for _ in range(count)] for key, count in (("a", 4), ("b", 2), ("c", 1))}
    assert given(turns, waiting) == ["a", "b", "c", "a", "b", "a", "a"]


async def test_a_caller_has_its_share_of_the_places_and_no_more() -> None:
    turns: FairQueue[int] = FairQueue(1, 64)
    mine = [turns.join("a") for _ in range(3)]
    assert turns.next() is mine[0]
    assert turns.next() is None
    other = turns.join("b")
    assert turns.next() is other
    turns.done("a")
    assert turns.next() is mine[1]


async def test_a_caller_fills_a_part_of_the_queue() -> None:
    turns: FairQueue[int] = FairQueue(1, 8)
    mine = [turns.join("a") for _ in range(2)]
    with pytest.raises(Unavailable, match="of your queries"):
        turns.join("a")
    others = [turns.join(key) for key in "bcdefg"]
    with pytest.raises(Unavailable, match="8 queries"):
        turns.join("h")
    turns.leave("a", mine[0])
    turns.join("h")
    turns.refuse_all(Unavailable("Closed", "closed"))
    for turn in (mine[1], *others):
        assert isinstance(turn.exception(), Unavailable)
