"""From the names in a query to its rows: pinned, pruned, pushed down, bounded, and closed again."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql

from tests.support.conversation import dag, reactive, source
from tests.support.query_scene import EVERYTHING, QueryScene, content
from tracelake.contracts.dispatcher_api import OutputIn
from tracelake.domain.errors import Conflict, Invalid, NotFound, TracelakeError, Unavailable
from tracelake.domain.where_parse import parse_where
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.schemas import TABLES
from tracelake.objects.directory import DirectoryStore
from tracelake.query.engine.messages import RelationUse
from tracelake.query.hot_rows import HotDatabase
from tracelake.query.open_relation import RelationOpener

COLUMNS = {"a": "text", "severity": "text", "amount": "numeric", "seen": "timestamptz", "more": "jsonb"}
ALERTS = {"storage": "postgres", "write_mode": "buffered", "schema": {"columns": COLUMNS, "unique": ["a"]}}


def use(where: str | None = None, *columns: str) -> RelationUse:
    tree = None if where is None else parse_where(where).tree
    return RelationUse(tuple(sorted(columns)) or None, tree)


def ordered(rows: pa.Table, *names: str) -> pa.Table:
    return rows.sort_by([(name, "ascending") for name in names or ("block_number", "log_index")])


def open_files(scene: QueryScene) -> list[str]:
    """The files of the scene, and memory of hot rows; connections and the object root are kept."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(path for path in found if path.startswith(f"{scene.root}/") or "memfd:hot-rows" in path)


async def chain(scene: QueryScene, blocks: int = 35) -> QueryScene:
    await scene.deploy_chain()
    await scene.grow(blocks)
    await scene.compact()
    return scene


async def refusal(scene: QueryScene, *args: Any, **fields: Any) -> TracelakeError:
    with pytest.raises(TracelakeError) as error:
        await scene.query(*args, **fields)
    assert open_files(scene) == [], "nothing stays open"
    return error.value


async def test_files_and_hot_rows_are_one_table(query_scene: QueryScene) -> None:
    scene = await chain(query_scene)
    for name in (ChainTable.BLOCKS, ChainTable.TRANSACTIONS, ChainTable.LOGS):
        seen = await scene.query(name.value)
        order = {"blocks": ("block_number",), "transactions": ("block_number", "transaction_index")}
        names = order.get(name.value, ("block_number", "log_index"))
        # The digits of a uint256 are read from files alone, which sums need them for.
        digits = list(TABLES[name].digits)
        expected = ordered(scene.rows(name), *names).drop_columns(digits)
        assert ordered(seen, *names).drop_columns(digits).equals(expected), name
    assert await scene.talk.scopes("compact") == [(0, 9), (10, 19), (20, 29)]
    hot = await scene.query("hot_logs")
    assert ordered(hot).equals(ordered(scene.rows(ChainTable.LOGS)))


async def test_only_needed_files_are_opened_and_only_needed_hot_rows_are_read(
    query_scene: QueryScene,
) -> None:
    scene = await chain(query_scene)
    wanted = use("block_number >= 15 and log_index = 0", "block_number", "log_index", "address", "nowhere")
    async with scene.opener.open(scene.user, {"logs": wanted}, seconds=20) as opened:
        [logs] = opened.relations
        assert logs.columns.equals(TABLES[ChainTable.LOGS].arrow), "the relation has all its columns"
        assert len(logs.files) == 2
        [table] = logs.tables
        with pa.memory_map(f"/proc/self/fd/{table}") as memory:
            read = pa.ipc.open_stream(memory).read_all()
        assert read.column_names == ["block_number", "log_index", "address"]
        hot = scene.rows(ChainTable.LOGS, 30).to_pylist()
        expected = [row["block_number"] for row in hot if row["log_index"] == 0]
        assert read.column("block_number").to_pylist() == expected
        assert len(expected) < len(hot)
        assert opened.hot_bytes == os.fstat(table).st_size
        assert [(one.name, one.revision) for one in opened.datasets] == [("logs", 0)]


async def test_a_uint256_that_is_one_number_in_the_hot_table_comes_as_the_columns_of_files(
    query_scene: QueryScene,
) -> None:
    scene = await chain(query_scene, 12)
    wanted = use("block_number >= 10", "value_f64", "value_string", "block_number", "transaction_index")
    seen = await scene.query("transactions", wanted)
    names = ["block_number", "transaction_index", "value_string", "value_f64"]
    expected = scene.rows(ChainTable.TRANSACTIONS, 10, 12).select(names)
    seen = seen.filter(pa.compute.greater_equal(seen.column("block_number"), 10))
    assert ordered(seen.select(names), *names[:2]).equals(ordered(expected, *names[:2]))


async def test_counting_rows_reads_one_column(query_scene: QueryScene) -> None:
    scene = await chain(query_scene, 12)
    async with scene.opener.open(scene.user, {"hot_logs": RelationUse(())}, seconds=20) as opened:
        [logs] = opened.relations
        assert content(logs).num_rows == scene.rows(ChainTable.LOGS).num_rows
        with pa.memory_map(f"/proc/self/fd/{logs.tables[0]}") as memory:
            assert len(pa.ipc.open_stream(memory).schema) == 1


async def test_blocks_that_are_all_in_files_need_no_data_database(query_scene: QueryScene) -> None:
    scene = await chain(query_scene)
    scene.opener = RelationOpener(scene.catalog, HotDatabase(None), DirectoryStore(scene.root))
    seen = await scene.query("logs", use("block_number = 12"))
    assert scene.catalog.looks == 1, "one round trip"
    assert ordered(seen).equals(ordered(scene.rows(ChainTable.LOGS, 10, 19)))
    assert (await refusal(scene, "logs")).reason == "NoDataDatabase"


async def test_files_that_say_nothing_of_blocks_are_never_left_out(query_scene: QueryScene) -> None:
    scene = query_scene
    await scene.talk.deploy(
        dag(
            source(),
            reactive("days", "src", storage="parquet"),
            publish={"days": {"from": {"job": "days", "output": 0}}},
        )
    )
    await scene.talk.trigger(0, 9)
    await scene.talk.trigger(10, 19)
    for day, task in enumerate(await scene.talk.queued("days")):
        lease = await scene.talk.lease(task)
        rows = pa.table({"day": [day, day]})
        start, end = lease.read.start, lease.read.end
        await scene.talk.complete(lease, scene.write(lease, 0, rows, int(str(start)), int(str(end))))
    seen = await scene.query("days", use("block_number = 3 and day = 1"))
    assert seen.column("day").to_pylist() == [0, 0, 1, 1], "block_number is somebody else's column"


async def test_blocks_of_a_column_that_isn_t_there_leave_no_file_out(query_scene: QueryScene) -> None:
    """A worker that reports blocks of rows that don't carry them: what was left out by them is looked at again."""
    scene = query_scene
    job = reactive("days", "src", storage="parquet")
    await scene.talk.deploy(dag(source(), job, publish={"days": {"from": {"job": "days", "output": 0}}}))
    await scene.talk.trigger(0, 9)
    lease = await scene.talk.lease("days")
    output = scene.write(lease, 0, pa.table({"day": [1]}), 0, 9, min_block=0, max_block=9)
    await scene.talk.complete(lease, output)
    assert (await scene.query("days", use("block_number = 30"))).num_rows == 1


async def test_a_name_that_isn_t_there_is_refused_with_those_that_are(query_scene: QueryScene) -> None:
    scene = await chain(query_scene, 12)
    error = await refusal(scene, "block")
    assert isinstance(error, NotFound)
    assert error.reason == "UnknownRelation"
    assert str(error) == "no dataset 'block': there are blocks, logs, hot_logs, ranges, transactions"
    async with scene.opener.open(scene.user, {}, seconds=20) as opened:
        assert opened.relations == [], "a query needs no relation"


async def test_a_task_reads_the_datasets_of_its_token_and_no_others(query_scene: QueryScene) -> None:
    scene = await chain(query_scene, 12)
    caller, lease = await scene.task_caller("reader")
    expected = ordered(scene.rows(ChainTable.LOGS))
    for name in ("logs", "input_1"):
        assert ordered(await scene.query(name, caller=caller)).equals(expected), name
    for name in ("blocks", "hot_logs", "input_2"):
        error = await refusal(scene, name, caller=caller)
        assert str(error) == f"no dataset {name!r}: there are " + str(error).partition("there are ")[2]
        assert sorted(str(error).partition("there are ")[2].split(", ")) == [
            "input_0",
            "input_1",
            "logs",
            "ranges",
        ]
    assert (await refusal(scene, "input_0", caller=caller)).reason == "NoRows"
    await scene.talk.complete_scope(lease)
    assert (await refusal(scene, "logs", caller=caller)).reason == "StaleLease"


async def test_a_task_keeps_its_version_when_a_deploy_makes_another_current(query_scene: QueryScene) -> None:
    scene = await chain(query_scene, 12)
    caller, _ = await scene.task_caller("reader")
    await scene.replace_compaction()
    async with scene.opener.open(caller, {"logs": EVERYTHING}, seconds=20) as opened:
        assert len(opened.relations[0].files) == 1
    async with scene.opener.open(scene.user, {"logs": EVERYTHING}, seconds=20) as opened:
        assert opened.relations[0].files == [], "a user reads the new version, of which nothing is compacted"


async def test_an_attempt_that_is_over_reads_nothing(query_scene: QueryScene) -> None:
    scene = await chain(query_scene, 12)
    caller, lease = await scene.task_caller("reader")
    await scene.talk.fail(lease)
    assert (await refusal(scene, "logs", caller=caller)).reason == "StaleLease"
    await scene.talk.pass_time(3600)
    await scene.talk.lease(lease.task_id)
    error = await refusal(scene, "logs", caller=caller)
    assert isinstance(error, Conflict)
    assert (error.status, error.reason) == (409, "StaleAttempt")
    with pytest.raises(Conflict):
        async with scene.opener.open(caller, {}, seconds=20):
            pass
    await scene.talk.cancel(lease.task_id)
    again = type(caller)(caller.task_id, 2, caller.org_id, caller.datasets)
    assert (await refusal(scene, "logs", caller=again)).reason == "Canceled"


async def test_an_attempt_that_was_given_up_may_read_until_another_is_claimed(
    query_scene: QueryScene,
) -> None:
    scene = await chain(query_scene, 12)
    caller, lease = await scene.task_caller("reader")
    await scene.talk.reap()
    assert await scene.talk.status(lease.task_id) == "Queued"
    assert (await scene.query("logs", caller=caller)).num_rows == scene.rows(ChainTable.LOGS).num_rows


async def test_a_dataset_without_rows_has_its_columns(query_scene: QueryScene) -> None:
    scene = query_scene
    await scene.deploy_chain()
    assert scene.hot is not None
    for name in (ChainTable.BLOCKS, ChainTable.LOGS):
        assert (await scene.query(name.value)).schema.equals(TABLES[name].arrow), "an empty table"
        scene.hot.execute(name, "DROP TABLE {}")
        assert (await scene.query(name.value)).schema.equals(TABLES[name].arrow), "none at all"
    assert (await refusal(scene, "ranges")).reason == "NoRows"
    job = reactive("days", "src", storage="parquet")
    await scene.talk.deploy(
        dag(source(), job, name="more", publish={"days": {"from": {"job": "days", "output": 0}}})
    )
    error = await refusal(scene, "days")
    assert (error.status, error.reason) == (409, "NothingCommitted")


async def test_an_empty_window_of_a_hot_table_has_the_table_s_columns(query_scene: QueryScene) -> None:
    scene = query_scene
    job = reactive("events", "src", storage="postgres")
    await scene.talk.deploy(dag(source(), job, publish={"events": {"from": {"job": "events", "output": 0}}}))
    [row] = await scene.talk.query(
        "SELECT dataset_version FROM catalog.dataset_version WHERE dataset = 'events'"
    )
    with psycopg.connect(scene.data_dsn, autocommit=True) as admin:
        admin.execute(
            f'CREATE TABLE data."d_{row["dataset_version"].hex}" AS SELECT 7::bigint AS block_number'
        )
    scene.let_read()
    assert (await scene.query("events", use("block_number = 7"))).num_rows == 1
    crossed = await scene.query("events", use("block_number > 7 and block_number <= 7"))
    assert (crossed.num_rows, crossed.column_names) == (0, ["block_number"])


async def test_a_buffered_dataset_is_read_with_the_platform_s_columns(query_scene: QueryScene) -> None:
    scene = query_scene
    await scene.talk.deploy(dag(source(), publish={"alerts": ALERTS}))
    empty = await scene.query("alerts")
    assert empty.num_rows == 0
    assert set(COLUMNS) | {"position", "producer", "retracted_at"} <= set(empty.column_names)
    assert empty.schema.field("amount").type == pa.string()
    assert empty.schema.field("retracted_at").type == pa.timestamp("us", "UTC")
    [row] = await scene.talk.query(
        "SELECT dataset_version FROM catalog.dataset_version WHERE dataset = 'alerts' AND is_current"
    )
    table = f'data."d_{row["dataset_version"].hex}"'
    with psycopg.connect(scene.data_dsn, autocommit=True) as admin:
        admin.execute(
            f"CREATE TABLE {table} (position bigint, a text, severity text, amount numeric, seen date)"
        )
        with admin.cursor().copy(f"COPY {table} FROM STDIN") as rows:
            rows.write_row((1, "x", "low", "1.50", "2024-02-03"))
            rows.write_row((2, "y", "critical", 2**255, "2024-02-03"))
            rows.write_row((3, None, "critical", None, None))
    scene.let_read()
    seen = await scene.query("alerts", use("severity = 'critical'"))
    assert seen.column("a").to_pylist() == ["y", None]
    assert seen.column("amount").to_pylist() == [str(2**255), None]
    assert seen.column("more").to_pylist() == [None, None], "declared, and not in the table yet"


async def test_columns_that_are_only_read_as_text_are_compared_by_the_engine(query_scene: QueryScene) -> None:
    scene = query_scene
    await scene.talk.deploy(dag(source(), publish={"alerts": ALERTS}))
    [row] = await scene.talk.query(
        "SELECT dataset_version FROM catalog.dataset_version WHERE dataset = 'alerts'"
    )
    table = f'data."d_{row["dataset_version"].hex}"'
    with psycopg.connect(scene.data_dsn, autocommit=True) as admin:
        admin.execute(
            f"CREATE TABLE {table} AS SELECT 'x' AS a, 1::numeric AS amount, '[]'::jsonb AS more, "
            "gen_random_uuid() AS id"
        )
    scene.let_read()
    for where in ("amount = '1'", "more = '[]'", "id = 'x'", "a = 'x'"):
        assert (await scene.query("alerts", use(where))).num_rows == 1, where


async def test_more_hot_rows_than_a_query_may_read_are_refused_with_a_hint(query_scene: QueryScene) -> None:
    scene = await chain(query_scene, 12)
    scene.opener = RelationOpener(
        scene.catalog, scene.hot_database, DirectoryStore(scene.root), max_hot_bytes=2000
    )
    error = await refusal(scene, "hot_logs")
    assert error.reason == "TooMuchHotData"
    assert "block_number" in str(error)
    fewer = await scene.query("hot_logs", use("block_number < 9", "block_number"))
    assert fewer.num_rows == scene.rows(ChainTable.LOGS, 0, 8).num_rows > 0


async def test_more_files_than_a_query_may_open_are_refused_with_a_hint(query_scene: QueryScene) -> None:
    scene = await chain(query_scene)
    scene.opener = RelationOpener(scene.catalog, scene.hot_database, DirectoryStore(scene.root), max_files=2)
    error = await refusal(scene, "blocks")
    assert error.reason == "TooManyFiles"
    assert "block_number" in str(error)
    assert (await scene.query("blocks", use("block_number < 20"))).num_rows == 20


async def test_a_committed_file_that_is_gone_or_elsewhere_is_said_so(
    query_scene: QueryScene, tmp_path: Path
) -> None:
    scene = await chain(query_scene)
    files = sorted(scene.root.rglob("logs_10_19.parquet"))
    content_of = files[0].read_bytes()
    files[0].unlink()
    error = await refusal(scene, "logs")
    assert isinstance(error, Unavailable)
    assert error.reason == "FileMissing"
    assert str(scene.root) not in str(error)
    outside = tmp_path / "outside.parquet"
    outside.write_bytes(content_of)
    files[0].symlink_to(outside)
    assert (await refusal(scene, "logs")).reason == "FileMissing"
    await scene.talk.query(
        "UPDATE partition SET manifest = replace(manifest::text, 'file://', 's3://bucket')::jsonb "
        "WHERE range_start = 10 RETURNING 1"
    )
    error = await refusal(scene, "logs")
    assert isinstance(error, Invalid)
    assert error.reason == "ObjectsNotLocal"


async def test_hot_rows_are_handed_on_in_memory_that_nobody_can_change(query_scene: QueryScene) -> None:
    scene = await chain(query_scene, 12)
    async with scene.opener.open(scene.user, {"hot_logs": EVERYTHING}, seconds=20) as opened:
        [table] = opened.relations[0].tables
        with pytest.raises(PermissionError):
            os.pwrite(table, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(table, 0)
        inside = {
            name: os.get_inheritable(int(name)) for name in map(str, [table, *opened.relations[0].files])
        }
        assert not any(inside.values())
    assert opened.relations[0].tables == []


async def test_a_query_that_is_given_up_leaves_a_connection_that_works(
    query_scene: QueryScene,
) -> None:
    scene = await chain(query_scene, 12)
    async with scene.hot_database.snapshot(20) as snapshot:
        began = asyncio.Event()
        loop = asyncio.get_running_loop()

        def sleep(connection: psycopg.Connection) -> None:
            loop.call_soon_threadsafe(began.set)
            connection.execute("SELECT pg_sleep(60)")

        running = asyncio.create_task(snapshot.run(sleep))
        await began.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert (await scene.query("hot_logs")).num_rows == scene.rows(ChainTable.LOGS).num_rows
    assert open_files(scene) == []


async def test_time_that_is_over_while_hot_rows_are_read_is_said_so(query_scene: QueryScene) -> None:
    scene = await chain(query_scene, 12)
    version = (await scene.talk.output("follower", 2))["dataset_version"].hex
    slow = sql.SQL("CREATE VIEW data.{} AS SELECT fast.* FROM data.fast, pg_sleep(60)")
    with psycopg.connect(scene.data_dsn) as admin:
        admin.execute(f'ALTER TABLE data."d_{version}" RENAME TO fast')
        admin.execute(slow.format(sql.Identifier(f"d_{version}")))
    scene.let_read()
    with pytest.raises(Invalid) as error:
        async with scene.opener.open(scene.user, {"hot_logs": EVERYTHING}, seconds=0.3):
            pass
    assert error.value.reason == "QueryTimeout"


async def test_a_lost_connection_is_replaced(query_scene: QueryScene) -> None:
    scene = await chain(query_scene, 12)
    await scene.query("hot_logs")
    with psycopg.connect(scene.data_dsn, autocommit=True) as admin:
        admin.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid() AND usename = 'tracelake_reader'"
        )
    assert (await scene.query("hot_logs")).num_rows == scene.rows(ChainTable.LOGS).num_rows


async def test_an_empty_commit_hides_hot_rows_as_any_other_does(query_scene: QueryScene) -> None:
    """What counts is the committed range, not whether it has a file."""
    scene = query_scene
    await scene.deploy_chain()
    await scene.grow(15)
    lease = await scene.talk.lease("compact")
    await scene.talk.complete(lease, *[OutputIn(place, start=0, end=9, row_count=0) for place in range(3)])
    seen = await scene.query("blocks")
    assert sorted(seen.column("block_number").to_pylist()) == list(range(10, 16))
