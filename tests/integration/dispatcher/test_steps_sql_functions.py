"""The decisions that are made in SQL, held to a plain model of them on generated data."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, LiteralString
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.conversation import Conversation, dag, reactive, source
from tests.support.databases import ORG
from tracelake.dispatcher.runtimes import RuntimeRegistry
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.entropy import Entropy
from tracelake.objects.directory import DirectoryStore
from tracelake.store.db import Database, open_pool
from tracelake.store.jobs import JobDefinitions
from tracelake.tokens.signing import PemKeyring

Span = tuple[int, int]
spans = st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1]))
ON_DATABASE = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class World:
    """A join, an update, and the versions they read, in a transaction that each example rolls back."""

    def __init__(self, dsn: str) -> None:
        self._connection = psycopg.connect(dsn)
        self.jobs = dict(self._all("SELECT name, job_id FROM job"))
        self.versions = dict(
            self._all("SELECT j.name, v.dataset_version FROM job j JOIN dataset_version v USING (job_id)")
        )

    def __enter__(self) -> World:
        self._connection.rollback()
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.rollback()

    def close(self) -> None:
        self._connection.close()

    def take_back(self, job: str, ranges: list[Span]) -> None:
        version = self.versions[job]
        for revision, (start, end) in enumerate(ranges, 1):
            self._run(
                "INSERT INTO invalidation (dataset_version, invalidation_id, range_start, range_end,"
                " revision) VALUES (%s, %s, %s, %s, %s)",
                (version, str(revision), start, end, revision),
            )
        raised = "UPDATE dataset_version SET revision = %s WHERE dataset_version = %s"
        self._run(raised, (len(ranges), version))

    def announce(self, job: str, ranges: set[Span], *, current: bool = True) -> None:
        for start, end in ranges:
            self._run(
                "INSERT INTO partition (dataset_version, version_no, range_start, range_end, stored, current,"
                " revision) VALUES (%s, 0, %s, %s, false, %s, 0)",
                (self.versions[job], start, end, current),
            )

    def cursor(self, job: str, cursor: int) -> None:
        at = "INSERT INTO dataset_cursor (dataset_version, cursor) VALUES (%s, %s)"
        self._run(at, (self.versions[job], cursor))

    def consumed(self, job: str, cursor: int, undo: int | None) -> None:
        self._run(
            "UPDATE consumer_cursor SET cursor = %s, inv_revision = %s WHERE job_id = %s",
            (cursor, undo, self.jobs[job]),
        )

    def call(self, function: str, *args: object) -> Any:
        calls: dict[str, LiteralString] = {
            "scope_revision": "SELECT scope_revision(%s, %s, %s)",
            "scope_key": "SELECT scope_key(%s, %s, %s)",
            "frontier": "SELECT frontier(%s, %s)",
            "has_updates": "SELECT has_updates(%s)",
        }
        [(value,)] = self._all(calls[function], args)
        return value

    def _all(self, sql: LiteralString, args: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, args).fetchall()

    def _run(self, sql: LiteralString, args: tuple[object, ...]) -> None:
        self._connection.execute(sql, args)


@pytest.fixture
def world(state_dsn: str, tmp_path: Path) -> Iterator[World]:
    async def build() -> None:
        pool = await open_pool(state_dsn, min_size=1, max_size=2)
        ctx = StepContext(
            db=Database(pool),
            entropy=Entropy(),
            definitions=JobDefinitions(),
            objects=DirectoryStore(tmp_path / "objects"),
            signer=PemKeyring(tmp_path / "keys"),
            runtimes=RuntimeRegistry(),
            org_id=ORG,
        )
        jobs = (
            source("a"),
            source("b"),
            reactive("join", "a", "b"),
            reactive("up", "a", strategy="PerUpdate"),
        )
        await Conversation(ctx).deploy(dag(*jobs))
        await pool.close()

    asyncio.run(build())
    world = World(state_dsn)
    yield world
    world.close()


def revision(ranges: list[Span], scope: Span) -> int:
    """The last invalidation that touches the scope; they are numbered from 1."""
    return max((n for n, r in enumerate(ranges, 1) if r[0] <= scope[1] and scope[0] <= r[1]), default=0)


@ON_DATABASE
@given(ranges=st.lists(spans, max_size=6), scope=spans)
def test_the_revision_of_a_scope_is_the_last_invalidation_that_touched_it(
    world: World, ranges: list[Span], scope: Span
) -> None:
    with world:
        world.take_back("a", ranges)
        assert world.call("scope_revision", world.versions["a"], *scope) == revision(ranges, scope)
        assert world.call("scope_revision", uuid4(), *scope) == 0


@ON_DATABASE
@given(
    left=st.lists(spans, max_size=4),
    right=st.lists(spans, max_size=4),
    own=st.lists(spans, max_size=4),
    scope=spans,
)
def test_a_scopes_key_holds_the_revisions_of_its_inputs_and_of_what_it_writes(
    world: World, left: list[Span], right: list[Span], own: list[Span], scope: Span
) -> None:
    with world:
        for job, ranges in (("a", left), ("b", right), ("join", own)):
            world.take_back(job, ranges)
        expected = f"{revision(left, scope)},{revision(right, scope)};{revision(own, scope)}"
        assert world.call("scope_key", world.jobs["join"], *scope) == expected
        job: UUID = world.jobs["a"]
        assert world.call("scope_key", job, *scope) == f";{revision(left, scope)}"


def frontier(current: set[Span], after: int) -> int | None:
    """Step from partition to partition, always the longest, until there is a gap."""
    first = min((start for start, _ in current), default=None) if after < 0 else after + 1
    last = None
    while first is not None and (ends := [end for start, end in current if start == first]):
        last = max(ends)
        first = last + 1
    return last


@ON_DATABASE
@given(current=st.sets(spans, max_size=12), old=st.sets(spans, max_size=4), after=st.integers(-1, 35))
def test_the_frontier_is_where_the_first_gap_begins(
    world: World, current: set[Span], old: set[Span], after: int
) -> None:
    with world:
        world.announce("a", current)
        world.announce("a", old, current=False)
        world.announce("b", old)
        assert world.call("frontier", world.versions["a"], after) == frontier(current, after)


@ON_DATABASE
@given(
    current=st.sets(spans, max_size=8),
    cursor=st.none() | st.integers(0, 40),
    consumed=st.integers(-1, 40),
    undo=st.none() | st.integers(1, 3),
)
def test_an_update_is_due_when_there_is_something_to_read_or_to_undo(
    world: World, current: set[Span], cursor: int | None, consumed: int, undo: int | None
) -> None:
    with world:
        world.announce("a", current)
        if cursor is not None:
            world.cursor("a", cursor)
        world.consumed("up", consumed, undo)
        reach = cursor if cursor is not None else frontier(current, consumed)
        expected = undo is not None or (reach is not None and reach > consumed)
        if cursor is None and consumed < 0:
            expected = undo is not None or bool(current)
        assert world.call("has_updates", world.jobs["up"]) == expected
