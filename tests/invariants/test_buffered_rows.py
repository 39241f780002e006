"""Buffered tables: what a table holds follows from which messages came, whatever their order and however often."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.databases import role_dsn
from tests.support.hot_scene import Connection
from tracelake.domain.block_range import BlockRange
from tracelake.domain.buffers import PLATFORM_COLUMNS, BufferSchema
from tracelake.domain.dag.model import Column, ColumnType
from tracelake.domain.errors import Conflict, Invalid
from tracelake.hot.buffers import EVERYTHING, Batch, BufferStore, BufferTable, Retraction
from tracelake.hot.commit import Writer
from tracelake.hot.install import READER_ROLE, WRITER_ROLE
from tracelake.settings import Secret

COLUMNS = {"key": ColumnType.TEXT, "block_number": ColumnType.BIGINT, "note": ColumnType.TEXT}
OWN_REVISION = {**COLUMNS, "revision": ColumnType.BIGINT}
READ = """SELECT key, block_number, note, position, producer, scope_start, scope_end, revision, made_at_revision,
                 retracted_at IS NOT NULL AS retracted FROM data.d_{} ORDER BY position"""
RETRACTED = "SELECT key FROM data.d_{} WHERE retracted_at IS NOT NULL"
COUNT = "SELECT count(*) FROM data.d_{}"
DELETE = "DELETE FROM data.d_{}"
Said = Batch | Retraction


def schema_of(columns: dict[str, ColumnType], *unique: str) -> BufferSchema:
    return BufferSchema(tuple(Column(name, kind) for name, kind in columns.items()), unique or ("key",))


def table_of(schema: BufferSchema, version: UUID | None = None) -> BufferTable:
    return BufferTable(dataset_uuid=uuid4(), dataset_version=version or uuid4(), schema=schema)


def batch(
    *rows: tuple[Any, ...], revision: int = 0, producer: str = "dag/job", scope: tuple[int, int] = (0, 9)
) -> Batch:
    return Batch(producer=producer, revision=revision, scope=BlockRange(*scope), rows=rows)


def retraction(revision: int, scope: tuple[int, int] = (0, 9), producer: str = "dag/job") -> Retraction:
    return Retraction(producer=producer, revision=revision, scope=BlockRange(*scope))


@pytest_asyncio.fixture
async def store(data_dsn: str) -> AsyncIterator[BufferStore]:
    opened = BufferStore(Secret(role_dsn(data_dsn, WRITER_ROLE)))
    yield opened
    await opened.close()


class Sink:
    """The writer of one table, and a look at it."""

    def __init__(self, store: BufferStore, table: BufferTable, admin: Connection) -> None:
        self.store, self.table, self.admin = store, table, admin
        self.writer = Writer(task_id=uuid4(), epoch=1, inputs={})

    @classmethod
    async def begin(cls, store: BufferStore, admin: Connection, table: BufferTable | None = None) -> Sink:
        sink = cls(store, table or table_of(schema_of(COLUMNS)), admin)
        await store.begin(sink.writer, sink.table.dataset_version, EVERYTHING)
        await store.ensure(sink.table)
        return sink

    async def takes(self, *said: Said) -> Any:
        return await self.store.merge(
            self.writer,
            self.table,
            [each for each in said if isinstance(each, Batch)],
            [each for each in said if isinstance(each, Retraction)],
        )

    async def rows(self) -> list[dict[str, Any]]:
        found = await self.admin.fetch(READ.format(self.table.dataset_version.hex))
        return [dict(row) for row in found]

    async def notes(self) -> dict[str, tuple[str, bool]]:
        """By key what is stored, and whether it is retracted."""
        return {row["key"]: (row["note"], row["retracted"]) for row in await self.rows()}


@pytest_asyncio.fixture
async def sink(store: BufferStore, admin: Connection) -> Sink:
    return await Sink.begin(store, admin)


async def test_a_row_is_replaced_by_a_higher_revision_and_by_nothing_else(sink: Sink) -> None:
    assert (await sink.takes(batch(("a", 1, "first"), ("b", 2, "other")))).written == 2
    assert (await sink.takes(batch(("a", 1, "same revision")))).written == 0
    assert (await sink.takes(batch(("a", 1, "newer"), revision=2, scope=(0, 5)))).written == 1
    assert (await sink.takes(batch(("a", 1, "older"), revision=1))).written == 0
    assert [(row["key"], row["note"], row["revision"], row["scope_end"]) for row in await sink.rows()] == [
        ("b", "other", 0, 9),
        ("a", "newer", 2, 5),
    ]


async def test_of_one_key_in_one_commit_the_highest_revision_counts_and_else_the_first(sink: Sink) -> None:
    await sink.takes(
        batch(("a", 1, "first"), ("a", 1, "second"), ("b", 1, "old")),
        batch(("b", 1, "new"), revision=3),
        batch(("b", 1, "between"), revision=2),
    )
    assert await sink.notes() == {"a": ("first", False), "b": ("new", False)}


async def test_positions_rise_with_every_insert_replacement_and_retraction(sink: Sink) -> None:
    reached = [
        (await sink.takes(said)).position
        for said in (
            batch(("a", 1, "x"), ("b", 2, "x")),
            batch(("a", 1, "again")),
            batch(("b", 2, "newer"), revision=1),
            retraction(1),
            retraction(1),
            batch(),
        )
    ]
    assert reached == [2, 2, 3, 4, 4, 4]
    assert [(row["key"], row["position"]) for row in await sink.rows()] == [("b", 3), ("a", 4)]


async def test_the_event_is_kept_with_the_rows_also_when_nothing_was_inserted(sink: Sink) -> None:
    first = await sink.takes(batch(("a", 1, "x")))
    again = await sink.takes(batch(("a", 1, "x")))
    [pending] = await sink.store.pending_events(sink.writer.task_id)
    assert (pending.outbox_id, [event.cursor for event in pending.events]) == (again.outbox_id, [1])
    assert pending.events[0].dataset_version == sink.table.dataset_version
    assert again.outbox_id != first.outbox_id
    await sink.store.mark_delivered(pending.outbox_id)
    assert await sink.store.pending_events(sink.writer.task_id) == []


async def test_a_retraction_marks_what_was_not_published_again(sink: Sink) -> None:
    await sink.takes(
        batch(("gone", 3, "x"), ("kept", 4, "x"), ("outside", 12, "x"), scope=(0, 19)),
        batch(("theirs", 3, "x"), producer="dag/other"),
        batch(("no block", None, "x"), scope=(2, 8)),
        batch(("no block, too wide", None, "x"), scope=(2, 19)),
    )
    await sink.takes(batch(("kept", 4, "y"), revision=1))
    assert (await sink.takes(retraction(1))).retracted == 2
    assert await sink.notes() == {
        "outside": ("x", False),
        "theirs": ("x", False),
        "no block, too wide": ("x", False),
        "kept": ("y", False),
        "gone": ("x", True),
        "no block": ("x", True),
    }


async def test_a_batch_that_comes_after_its_retraction_is_retracted_as_it_comes(sink: Sink) -> None:
    await sink.takes(retraction(2, (0, 99)))
    await sink.takes(batch(("late", 5, "x"), revision=1), batch(("outside", 500, "x"), revision=1))
    await sink.takes(batch(("new", 5, "x"), revision=2))
    assert await sink.notes() == {"late": ("x", True), "outside": ("x", False), "new": ("x", False)}
    await sink.takes(batch(("late", 5, "again"), revision=2))
    assert (await sink.notes())["late"] == ("again", False)


async def test_a_retraction_by_scope_alone_where_rows_have_no_block(
    store: BufferStore, admin: Connection
) -> None:
    schema = schema_of({"key": ColumnType.TEXT, "note": ColumnType.TEXT})
    sink = await Sink.begin(store, admin, table_of(schema))
    await sink.takes(retraction(5, (100, 199)))
    early = batch(("early", "x"), revision=4, scope=(120, 130))
    await sink.takes(
        early,
        batch(("wide", "x"), scope=(90, 110)),
        Batch(producer="p", revision=0, scope=None, rows=[("n", "x")]),
    )
    found = await admin.fetch(RETRACTED.format(sink.table.dataset_version.hex))
    assert [row["key"] for row in found] == ["early"]


async def test_a_schema_that_declares_revision_has_the_last_word_on_which_record_stays(
    store: BufferStore, admin: Connection
) -> None:
    sink = await Sink.begin(store, admin, table_of(schema_of(OWN_REVISION)))
    await sink.takes(batch(("a", 1, "own", 7), ("b", 1, "platform's", None), revision=3))
    await sink.takes(batch(("a", 1, "lower", 6), ("b", 1, "higher", 4), revision=9))
    assert [(row["note"], row["revision"], row["made_at_revision"]) for row in await sink.rows()] == [
        ("own", 7, 3),
        ("higher", 4, 9),
    ]


@pytest_asyncio.fixture
async def own_revisions(store: BufferStore, admin: Connection) -> Sink:
    """A table whose records count their revisions themselves, here far from how the platform does."""
    return await Sink.begin(store, admin, table_of(schema_of(OWN_REVISION)))


async def test_a_retraction_goes_by_when_rows_were_made_and_not_by_their_own_revision(
    own_revisions: Sink,
) -> None:
    sink = own_revisions
    await sink.takes(batch(("gone", 3, "x", 1000)), batch(("newer", 3, "x", 0), revision=5))
    assert (await sink.takes(retraction(5))).retracted == 1
    await sink.takes(batch(("late", 3, "x", 1000), revision=4), batch(("in time", 3, "x", 0), revision=5))
    assert {key: retracted for key, (_, retracted) in (await sink.notes()).items()} == {
        "newer": False,
        "gone": True,
        "late": True,
        "in time": False,
    }


async def test_a_row_that_is_published_again_with_its_own_revision_unchanged_is_not_retracted(
    own_revisions: Sink,
) -> None:
    sink = own_revisions
    reached = (await sink.takes(batch(("a", 3, "x", 7), ("b", 3, "x", 7)))).position
    assert (await sink.takes(batch(("a", 3, "x", 7), revision=2))).position == reached
    assert (await sink.takes(retraction(2))).retracted == 1
    assert await sink.notes() == {"a": ("x", False), "b": ("x", True)}
    before = {row["key"]: row["position"] for row in await sink.rows()}
    await sink.takes(batch(("b", 3, "x", 7), revision=2))
    found = {row["key"]: row for row in await sink.rows()}
    assert (found["b"]["retracted"], found["b"]["made_at_revision"]) == (False, 2)
    assert found["b"]["position"] > before["b"], "its consumers hear that it is back"
    assert found["a"]["position"] == before["a"], "and of what is as it was they don't"


async def test_what_is_said_again_of_another_block_is_about_that_block(own_revisions: Sink) -> None:
    sink = own_revisions
    await sink.takes(batch(("a", 3, "x", 7)))
    first = (await sink.rows())[0]["position"]
    await sink.takes(batch(("a", 4, "x", 7), revision=1))
    assert (await sink.takes(retraction(2, (3, 3)))).retracted == 0
    assert (await sink.takes(batch(("a", 3, "x", 7)))).written == 0
    [row] = await sink.rows()
    assert (row["block_number"], row["position"] > first, row["retracted"]) == (4, True, False)
    assert (await sink.takes(retraction(2, (4, 4)))).retracted == 1


async def test_a_sink_that_was_superseded_merges_nothing(sink: Sink) -> None:
    await sink.takes(batch(("a", 1, "x")))
    newer = Writer(task_id=sink.writer.task_id, epoch=2, inputs={})
    await sink.store.begin(newer, sink.table.dataset_version, EVERYTHING)
    with pytest.raises(Conflict) as refused:
        await sink.takes(batch(("b", 1, "x")))
    assert refused.value.reason == "StaleEpoch"
    assert await sink.notes() == {"a": ("x", False)}


async def test_rows_that_the_database_refuses_leave_nothing_behind(sink: Sink) -> None:
    with pytest.raises(Invalid) as refused:
        await sink.takes(batch(("fine", 1, "x")), batch((None, 1, "x")))
    assert refused.value.reason == "RowsRefused"
    with pytest.raises(Invalid):
        await sink.takes(batch(("fine", 2**63, "x")))
    assert await sink.rows() == []
    assert await sink.store.pending_events(sink.writer.task_id) == []
    assert (await sink.takes(batch(("fine", 1, "x")))).position == 1


async def test_columns_may_be_added_and_nothing_else_may_change(sink: Sink, store: BufferStore) -> None:
    await sink.takes(batch(("old", 1, "x")))
    version = sink.table.dataset_version
    more = table_of(schema_of({**COLUMNS, "amount": ColumnType.NUMERIC}), version)
    await store.ensure(more)
    await store.ensure(sink.table)
    await sink.takes(batch(("older schema", 2, "x")))
    await store.merge(sink.writer, more, [batch(("new", 3, "x", 12))], [])
    assert list(await sink.notes()) == ["old", "older schema", "new"]
    for changed, why in (
        (schema_of({**COLUMNS, "note": ColumnType.BYTEA}), "note is text, not bytea"),
        (schema_of(COLUMNS, "key", "block_number"), "the key can't change from (key) to (key, block_number)"),
    ):
        with pytest.raises(Invalid) as refused:
            await store.ensure(table_of(changed, version))
        assert (refused.value.reason, why in refused.value.message) == ("SchemaRefused", True)


async def test_the_table_has_the_declared_and_the_platforms_columns_and_its_indexes(
    store: BufferStore, admin: Connection
) -> None:
    columns = {kind.value: kind for kind in ColumnType} | {"key": ColumnType.TEXT}
    table = table_of(schema_of({**columns, "block_number": ColumnType.BIGINT}, "key", "uuid"))
    await store.ensure(table)
    name = f"d_{table.dataset_version.hex}"
    found = await admin.fetch(
        "SELECT column_name, udt_name FROM information_schema.columns WHERE table_name = $1", name
    )
    spelt = {row["column_name"]: row["udt_name"] for row in found}
    assert spelt.keys() == columns.keys() | PLATFORM_COLUMNS.keys() | {"block_number"}
    assert (spelt["double"], spelt["numeric"], spelt["position"]) == ("float8", "numeric", "int8")
    indexes = await admin.fetch("SELECT indexdef FROM pg_indexes WHERE tablename = $1", name)
    assert {row["indexdef"].split("USING btree ")[1] for row in indexes} == {
        "(block_number)",
        "(key, uuid)",
        '("position")',
        "(producer, scope_end)",
    }


async def test_the_reading_role_reads_a_buffered_table_and_can_not_write_it(
    sink: Sink, data_dsn: str
) -> None:
    await sink.takes(batch(("a", 1, "x")))
    reader = await asyncpg.connect(role_dsn(data_dsn, READER_ROLE))
    try:
        assert await reader.fetchval(COUNT.format(sink.table.dataset_version.hex)) == 1
        with pytest.raises(asyncpg.PostgresError):
            await reader.execute(DELETE.format(sink.table.dataset_version.hex))
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await reader.fetch("SELECT * FROM tracelake.buffer")
    finally:
        await reader.close()


batches = st.builds(
    lambda rows, revision, producer: batch(*rows, revision=revision, producer=producer),
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.just("x"), st.none() | st.integers(0, 2)),
        max_size=3,
        unique_by=lambda row: row[0],
    ),
    st.integers(0, 3),
    st.just("dag/job"),
)
retractions = st.builds(
    lambda revision, start, width: retraction(revision, (start, start + width)),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 3),
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
async def test_any_order_and_any_repetition_of_messages_gives_the_same_table(
    store: BufferStore, admin: Connection, data: st.DataObject
) -> None:
    columns = data.draw(st.sampled_from([COLUMNS, OWN_REVISION]))
    drawn = data.draw(st.lists(batches | retractions, min_size=1, max_size=6))
    said: Sequence[Said] = _told_apart(drawn, own=columns is OWN_REVISION)
    again = data.draw(st.permutations([*said, *data.draw(st.lists(st.sampled_from(said), max_size=4))]))
    cut = data.draw(st.integers(1, 4))
    states = []
    for order, size in ((said, 1), (again, cut)):
        sink = await Sink.begin(store, admin, table_of(schema_of(columns)))
        for start in range(0, len(order), size):
            await sink.takes(*order[start : start + size])
        found = await sink.rows()
        compared = ("key", "note", "block_number", "revision", "made_at_revision", "retracted")
        states.append(sorted(tuple(row[name] for name in compared) for row in found))
        assert len({row["position"] for row in found}) == len(found)
        await admin.execute(f"DROP TABLE data.d_{sink.table.dataset_version.hex}")
    assert states[0] == states[1]


def _told_apart(said: Sequence[Said], *, own: bool) -> list[Said]:
    """Of one key and revision there is one content: of two, the first to come stays, which is its order's. ``own``
    when records have their own revisions, beside the batch's."""
    seen: set[tuple[str, int, int]] = set()
    kept: list[Said] = []
    for each in said:
        if isinstance(each, Batch):
            rows = []
            for key, block, _, theirs in each.rows:
                counted = each.revision if theirs is None or not own else theirs
                if (key, counted, each.revision) not in seen:
                    seen.add((key, counted, each.revision))
                    rows.append((key, block, f"{key}{counted}.{each.revision}", *([theirs] if own else [])))
            each = batch(*rows, revision=each.revision)
        kept.append(each)
    return kept
