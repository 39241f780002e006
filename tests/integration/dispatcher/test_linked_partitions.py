"""Links of a chain's partitions: no two neighbours are current together unless one is the parent of the other."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import asyncpg
import pytest

from tests.support.conversation import Conversation, Lease, dag, reactive, source
from tests.support.interleave import Interleaver
from tracelake.contracts.dispatcher_api import CompleteResponse, OutputIn
from tracelake.contracts.manifest import ChainEdges, Manifest, ManifestFile
from tracelake.contracts.user_api import PartitionQuery, PartitionSummary
from tracelake.dispatcher.steps.complete_task import complete_tasks
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import Invalid, TracelakeError, Unavailable
from tracelake.store import datasets, reads
from tracelake.store.db import Connection, Database, Row

CONTENT = b"PAR1 rows PAR1"
HASH = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
async def talk(ctx: StepContext) -> Conversation:
    talk = Conversation(ctx)
    outputs = [{"name": "blocks", "storage": "parquet"}, {"name": "logs", "storage": "parquet"}]
    await talk.deploy(dag(source(), reactive("ingest", "src", outputs=outputs), reactive("next", "ingest")))
    return talk


@pytest.fixture
def both(talk: Conversation, pool: asyncpg.Pool) -> Interleaver:
    return Interleaver(talk, pool)


def block_hash(number: int, fork: str = "a") -> str:
    return "0x" + hashlib.sha256(f"{fork}/{number}".encode()).hexdigest()


def edges(start: int, end: int, fork: str = "a", below: str | None = None) -> ChainEdges:
    """A range of fork ``fork`` on top of fork ``below``, its own unless given."""
    return ChainEdges(
        parent_hash=block_hash(start - 1, below or fork),
        first_hash=block_hash(start, fork),
        last_hash=block_hash(end, fork),
    )


def outputs(lease: Lease, linked: ChainEdges | None) -> list[OutputIn]:
    start, end = lease.read.start, lease.read.end
    assert isinstance(start, int)
    assert isinstance(end, int)
    listed = []
    for output in lease.payload.outputs:
        assert output.staging is not None
        name = f"{output.name}_{start}_{end}.parquet"
        file = Path(unquote(urlsplit(output.staging).path)) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(CONTENT)
        listed_file = ManifestFile(
            location=output.staging + name, rows=1, bytes=len(CONTENT), content_hash=HASH
        )
        manifest = Manifest(files=(listed_file,), schema_hash=HASH, verified="full", edges=linked)
        listed.append(OutputIn(output.output_index, start=start, end=end, row_count=1, manifest=manifest))
    return listed


async def claimed(talk: Conversation, start: int, end: int) -> Lease:
    await talk.trigger(start, end)
    return await talk.lease("ingest")


async def commit(talk: Conversation, start: int, end: int, fork: str = "a", below: str | None = None) -> None:
    lease = await claimed(talk, start, end)
    await talk.complete(lease, *outputs(lease, edges(start, end, fork, below)))


async def remake(talk: Conversation, fork: str = "a") -> Lease:
    """Make the only queued range again, as ``fork`` has it."""
    lease = await talk.lease("ingest")
    start, end = lease.read.start, lease.read.end
    assert isinstance(start, int)
    assert isinstance(end, int)
    await talk.complete(lease, *outputs(lease, edges(start, end, fork)))
    return lease


async def invalidations(talk: Conversation, output: int = 0) -> list[tuple[int, int, str]]:
    version = (await talk.output("ingest", output))["dataset_version"]
    rows = await talk.query(
        "SELECT range_start, range_end, reason FROM invalidation WHERE dataset_version = $1 ORDER BY revision",
        version,
    )
    return [(row["range_start"], row["range_end"], row["reason"]) for row in rows]


async def test_partitions_that_link_up_are_committed_whatever_the_order(talk: Conversation) -> None:
    for start in (10, 30, 0, 20):
        await commit(talk, start, start + 9)
    assert await talk.scopes("ingest") == [(0, 9), (10, 19), (20, 29), (30, 39)]
    assert await invalidations(talk) == []


async def test_the_edges_and_the_level_are_recorded_in_the_manifest(talk: Conversation) -> None:
    await commit(talk, 10, 19)
    rows = await talk.query("SELECT manifest FROM partition WHERE stored")
    for row in rows:
        assert row["manifest"]["edges"] == {
            "parent_hash": block_hash(9),
            "first_hash": block_hash(10),
            "last_hash": block_hash(19),
        }
        assert row["manifest"]["verified"] == "full"


async def test_the_partitions_of_a_range_are_listed_with_level_edges_and_files(talk: Conversation) -> None:
    for start in (0, 10, 20):
        await commit(talk, start, start + 9)
    uuid = str(await talk.dataset("ingest"))

    async def listed(query: PartitionQuery) -> list[PartitionSummary]:
        page = await talk.ctx.db.run(lambda tx: reads.partitions(tx, talk.ctx.org_id, uuid, query))
        return page.partitions

    [only] = await listed(PartitionQuery(start=12, end=12, details=True))
    assert (only.partition_key, only.verified, only.edges) == ("10-19", "full", edges(10, 19))
    assert only.details is not None
    [file] = only.details
    assert (file.location, file.bytes, file.content_hash) == (only.files[0], len(CONTENT), HASH)
    assert [each.details for each in await listed(PartitionQuery(start=5, end=10))] == [None, None]
    assert len(await listed(PartitionQuery())) == 3


@pytest.mark.parametrize(("older", "newer"), [(0, 10), (10, 0)])
async def test_the_newer_of_two_that_do_not_link_up_is_invalidated_with_a_reason(
    talk: Conversation, older: int, newer: int
) -> None:
    await commit(talk, older, older + 9)
    await commit(talk, newer, newer + 9, "b")
    for output in (0, 1):
        assert await talk.scopes("ingest", output) == [(older, older + 9)]
        [(start, end, reason)] = await invalidations(talk, output)
        assert (start, end) == (newer, newer + 9)
        assert "block 10 names" in reason
        assert "but block 9 is" in reason
    await remake(talk)
    assert await talk.scopes("ingest") == [(0, 9), (10, 19)], "made again, it links up"
    assert len(await invalidations(talk)) == 1


async def test_the_older_one_is_made_again_when_the_newer_one_comes_back_the_same(talk: Conversation) -> None:
    """A partition of a fork that the chain has left: everything after it contradicts it."""
    await commit(talk, 0, 9, "left")
    await commit(talk, 10, 19)
    await remake(talk)
    assert await talk.scopes("ingest") == [(10, 19)]
    assert [found[:2] for found in await invalidations(talk)] == [(10, 19), (0, 9)]
    await remake(talk)
    assert await talk.scopes("ingest") == [(0, 9), (10, 19)]


async def test_endpoints_that_contradict_each_other_for_good_are_left_to_a_person(talk: Conversation) -> None:
    await commit(talk, 0, 9, "left")
    await commit(talk, 10, 19)
    await remake(talk)
    lease = await talk.lease("ingest")
    with pytest.raises(Invalid) as refused:
        await talk.complete(lease, *outputs(lease, edges(0, 9, "left")))
    assert refused.value.reason == "PartitionUnlinked"
    assert "both 0-9 and 10-19 were made again" in refused.value.message
    assert await talk.scopes("ingest") == [(10, 19)], "an unlinked pair doesn't stay"


async def test_partitions_without_recorded_edges_go_on_working(talk: Conversation) -> None:
    """Those that an older version has committed."""
    lease = await claimed(talk, 0, 9)
    await talk.complete(lease, *outputs(lease, None))
    await commit(talk, 10, 19)
    assert await talk.scopes("ingest") == [(0, 9), (10, 19)]


async def test_dependents_of_an_unlinked_partition_wait_for_the_one_that_links_up(talk: Conversation) -> None:
    await commit(talk, 0, 9)
    await talk.run("next")
    await commit(talk, 10, 19, "b")
    for task in await talk.queued("next"):
        assert (await talk.claim(task)).status == "NotClaimed", "there is nothing to read"
    await remake(talk)
    [again] = [task for task in await talk.queued("next") if (await talk.claim(task)).status == "Claimed"]
    assert await talk.status(again) == "Running"


async def test_two_neighbours_in_one_call_are_linked_too(talk: Conversation) -> None:
    await talk.trigger(0, 9)
    await talk.trigger(10, 19)
    first, second = [await talk.lease(task) for task in await talk.queued("ingest")]
    answers = await complete_tasks(
        talk.ctx,
        [
            first.completion(*outputs(first, edges(0, 9))),
            second.completion(*outputs(second, edges(10, 19, "b"))),
        ],
    )
    assert not [answer for answer in answers if isinstance(answer, TracelakeError)]
    assert await talk.scopes("ingest") == [(0, 9)]
    assert [found[:2] for found in await invalidations(talk)] == [(10, 19)]


async def test_two_neighbours_that_commit_at_once_do_not_both_stay(
    talk: Conversation, both: Interleaver
) -> None:
    await talk.trigger(0, 9)
    await talk.trigger(10, 19)
    first, second = [await talk.lease(task) for task in await talk.queued("ingest")]
    seen = await both.run(
        lambda c: c.complete(first, *outputs(first, edges(0, 9))),
        lambda c: c.complete(second, *outputs(second, edges(10, 19, "b"))),
    )
    assert seen.second_waited
    assert isinstance(seen.first, CompleteResponse)
    assert isinstance(seen.second, CompleteResponse)
    assert await talk.scopes("ingest") == [(0, 9)]
    assert [found[:2] for found in await invalidations(talk)] == [(10, 19)]
    await remake(talk)
    assert await talk.scopes("ingest") == [(0, 9), (10, 19)]


async def test_a_neighbour_that_commits_between_the_look_and_the_locks_is_found(
    talk: Conversation, both: Interleaver
) -> None:
    await talk.trigger(0, 9)
    await talk.trigger(10, 19)
    first, second = [await talk.lease(task) for task in await talk.queued("ingest")]
    seen = await both.run(
        lambda c: c.complete(first, *outputs(first, edges(0, 9))),
        lambda c: c.complete(second, *outputs(second, edges(10, 19, "b"))),
        hold=datasets.SQL.hold_versions,
    )
    assert isinstance(seen.first, CompleteResponse)
    assert await talk.scopes("ingest") == [(10, 19)]
    assert [found[:2] for found in await invalidations(talk)] == [(0, 9)], "the first one is the newer one"


async def test_a_crash_at_any_statement_leaves_no_unlinked_pair(
    talk: Conversation, pool: asyncpg.Pool
) -> None:
    await commit(talk, 0, 9)
    lease = await claimed(talk, 10, 19)
    unlinked = outputs(lease, edges(10, 19, "b"))
    before = await talk.everything()
    for statement in count(1):
        dying = Conversation(replace(talk.ctx, db=Database(DyingConnections(pool, statement))))
        try:
            await dying.complete(lease, *unlinked)
        except Unavailable:
            assert await talk.everything() == before
            continue
        break
    assert statement > 10, "it dies in the middle of the commit too"
    assert await talk.scopes("ingest") == [(0, 9)]
    assert [found[:2] for found in await invalidations(talk)] == [(10, 19)]


class DyingConnections:
    """Sessions that are lost right before the nth statement of all."""

    def __init__(self, pool: asyncpg.Pool, last: int) -> None:
        self._pool = pool
        self._left = last

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        async with self._pool.acquire() as connection:
            yield _DyingConnection(connection, self)

    def count(self, query: str) -> None:
        if query == "ROLLBACK":
            return
        self._left -= 1
        if self._left == 0:
            raise asyncpg.ConnectionDoesNotExistError("the server is gone")


class _DyingConnection:
    def __init__(self, connection: Connection, dying: DyingConnections) -> None:
        self._connection = connection
        self._dying = dying

    async def fetch(self, query: str, *args: Any) -> list[Row]:
        self._dying.count(query)
        return await self._connection.fetch(query, *args)

    async def execute(self, query: str, *args: Any) -> str:
        self._dying.count(query)
        return await self._connection.execute(query, *args)

    def is_closed(self) -> bool:
        return self._connection.is_closed()

    def terminate(self) -> None:
        self._connection.terminate()


async def test_a_neighbour_that_is_invalidated_meanwhile_is_no_reason_to_make_this_one_again(
    talk: Conversation, both: Interleaver
) -> None:
    """The order of the race: one replaces the stale neighbour, the other still saw it before its locks."""
    await commit(talk, 0, 9, "left")
    await commit(talk, 10, 19)
    again = await talk.lease("ingest")
    await talk.trigger(20, 29)
    beyond = await talk.lease("ingest")
    seen = await both.run(
        lambda c: c.complete(again, *outputs(again, edges(10, 19))),
        lambda c: c.complete(beyond, *outputs(beyond, edges(20, 29))),
    )
    assert isinstance(seen.second, CompleteResponse)
    assert await talk.scopes("ingest") == [(10, 19), (20, 29)]
    await remake(talk)
    assert await talk.scopes("ingest") == [(0, 9), (10, 19), (20, 29)]
