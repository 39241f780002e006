"""A query of a chain that is followed, compacted and reorganised sees every block once, whatever happens when.

The follower, the compaction and the Dispatcher do what they do in the middle of a query, at each moment at which a
query looks at something: nothing is left to luck.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import combinations_with_replacement

import pyarrow as pa

from tests.support.query_scene import MOMENTS, QueryScene
from tracelake.evm.raw_block import ChainTable

Step = Callable[[], Awaitable[object]]


def orders(steps: Sequence[Step]) -> Iterator[list[tuple[str, Step]]]:
    """Each way in which these steps, one after the other, can fall into the moments of a query."""
    for moments in combinations_with_replacement(MOMENTS, len(steps)):
        yield list(zip(moments, steps, strict=True))


def by_block(rows: pa.Table) -> dict[int, bytes]:
    """The hash of each block; a block that is there twice, or one that is missing, is an error."""
    numbers = rows.column("block_number").to_pylist()
    assert sorted(numbers) == list(range(len(numbers))), "every block once, and none left out"
    return dict(zip(numbers, rows.column("block_hash").to_pylist(), strict=True))


async def seen_during(scene: QueryScene, order: list[tuple[str, Step]]) -> dict[int, bytes]:
    for moment, step in order:
        scene.hooks.at[moment].append(step)
    seen = by_block(await scene.query("blocks"))
    for moment in MOMENTS:
        await scene.hooks.reach(moment)
    return seen


async def check_all(scene: QueryScene, steps: Sequence[Step], settle: Step | None = None) -> None:
    """A block is as it was before these steps or after them; as it was before if all came later, as it is after if
    all came first."""
    for order in orders(steps):
        before = by_block(scene.rows(ChainTable.BLOCKS))
        seen = await seen_during(scene, order)
        after = by_block(scene.rows(ChainTable.BLOCKS))
        moments = [moment for moment, _ in order]
        assert len(seen) in {len(before), len(after)}, moments
        odd = {
            number: value
            for number, value in seen.items()
            if value not in (before.get(number), after[number])
        }
        assert not odd, moments
        if set(moments) == {"start"}:
            assert seen == after, moments
        if set(moments) == {"end"}:
            assert seen == before, moments
        if settle is not None:
            await settle()
        assert by_block(await scene.query("blocks")) == by_block(scene.rows(ChainTable.BLOCKS)), moments


async def test_a_commit_of_files_in_the_middle_of_a_query_doubles_nothing(query_scene: QueryScene) -> None:
    scene = query_scene
    await scene.deploy_chain()
    await scene.grow(25)

    async def grow() -> None:
        await scene.grow(10)

    async def compact() -> None:
        await scene.compact(1)

    await check_all(scene, [grow, compact])
    assert len(await scene.talk.scopes("compact")) > 2, "files were committed in between"


async def test_hot_rows_that_are_removed_after_their_files_were_committed_leave_no_gap(
    query_scene: QueryScene,
) -> None:
    scene = query_scene
    await scene.deploy_chain()
    await scene.grow(25)
    committed: list[tuple[int, int]] = []

    async def compact() -> None:
        committed.extend(await scene.compact(1))

    async def remove() -> None:
        assert scene.hot is not None
        scene.hot.delete(*committed[-1])

    async def grow() -> None:
        await scene.grow(10)

    await check_all(scene, [compact, remove], settle=grow)
    assert len(committed) >= 15


async def test_a_reorg_of_hot_blocks_in_the_middle_of_a_query_shows_each_block_once(
    query_scene: QueryScene,
) -> None:
    scene = query_scene
    await scene.deploy_chain()
    await scene.grow(35)
    await scene.compact()
    first = 0

    async def reorg() -> None:
        nonlocal first
        first = scene.reorg(2)

    async def said() -> None:
        await scene.announce_invalidation(first)

    await check_all(scene, [reorg, said])


async def test_files_that_are_taken_back_and_made_again_in_the_middle_of_a_query_leave_no_gap(
    query_scene: QueryScene,
) -> None:
    scene = query_scene
    await scene.deploy_chain()
    await scene.grow(35)
    await scene.compact()
    first = 0

    async def reorg() -> None:
        nonlocal first
        first = scene.reorg(8)

    async def said() -> None:
        held = len(await scene.talk.scopes("compact"))
        await scene.announce_invalidation(first)
        assert len(await scene.talk.scopes("compact")) < held, "it went down into what was final"

    async def compact() -> None:
        assert await scene.compact()

    await check_all(scene, [reorg, said, compact])


async def test_a_query_that_began_before_a_deploy_reads_one_version_throughout(
    query_scene: QueryScene,
) -> None:
    """The looks may find different versions; what is read is what the last of them found, whole."""
    scene = query_scene
    await scene.deploy_chain()
    await scene.grow(25)
    await scene.compact()
    before = by_block(scene.rows(ChainTable.BLOCKS))
    for moment in ("second look", "end"):
        seen = await seen_during(scene, [(moment, scene.replace_compaction)])
        assert seen == before, moment
        await scene.compact()
    for moment in ("first look", "snapshot"):
        assert await seen_during(scene, [(moment, scene.replace_compaction)]) == before, moment
        assert await scene.talk.scopes("compact") == []
        assert by_block(await scene.query("blocks")) == before, "all hot again"
