"""Hot tables behind a cursor: what an earlier fork left there goes, also where the chain got shorter."""

from __future__ import annotations

from uuid import uuid4

import pyarrow as pa

from tests.support.hot_scene import HotScene
from tests.support.operator_process import an_input
from tracelake.contracts.dispatcher_api import PayloadInput, PayloadInvalidation

GONE = PayloadInvalidation(start=5, end=9, revision=1)


def cursors(scene: HotScene) -> list[int | None]:
    assert scene.wrapper is not None
    return [event.cursor for event in scene.wrapper.sent]


def stored_after(scene: HotScene, second: PayloadInput, *blocks: int) -> list[tuple[int]]:
    """Blocks 3, 6 and 9 are there; then an attempt on ``second`` stages ``blocks``."""
    version = uuid4()
    ctx = scene.begin(an_input(after=0, upto=9), versions=[version])
    ctx.outputs[0].stage(pa.table({"block_number": [3, 6, 9]}))
    ctx.finish()
    ctx = scene.begin(second, versions=[version])
    if blocks:
        ctx.outputs[0].stage(pa.table({"block_number": list(blocks)}))
    assert ctx.finish() == ([], [])
    return scene.rows(ctx)


def test_blocks_that_are_gone_leave_no_rows_behind_a_cursor(hot_scene: HotScene) -> None:
    assert stored_after(hot_scene, an_input(after=4, upto=6, invalidation=GONE), 5) == [(3,), (5,)]
    assert cursors(hot_scene) == [6]


def test_a_cursor_that_only_went_back_takes_its_rows_along(hot_scene: HotScene) -> None:
    assert stored_after(hot_scene, an_input(after=4, upto=4, invalidation=GONE)) == [(3,)]


def test_a_cursor_moves_on_over_blocks_without_rows(hot_scene: HotScene) -> None:
    assert stored_after(hot_scene, an_input(after=9, upto=12)) == [(3,), (6,), (9,)]
    assert cursors(hot_scene) == [12]
