"""The Query Service's way into the state database: two roles that can do their one thing, and what they see."""

from __future__ import annotations

from collections.abc import AsyncIterator
from hashlib import sha256
from uuid import UUID, uuid4

import asyncpg
import pytest
import pytest_asyncio

from tests.support.conversation import Conversation
from tests.support.databases import ORG, PASSWORD
from tests.support.query_scene import chain_dag, install_roles
from tests.support.surfaces import create_token
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import Conflict, Unavailable
from tracelake.postgres import sqlfiles
from tracelake.postgres.sessions import open_statement_pool
from tracelake.query.audit import AuditEntry, AuditLog, DatasetRead, QueryOutcome
from tracelake.query.caller import QueryCaller, TaskCaller, UserCaller
from tracelake.query.catalog import Catalog, WantedBlocks, WantedRelation
from tracelake.settings import Secret
from tracelake.store import users
from tracelake.store.db import DeployLock
from tracelake.store.query_roles import install_query_roles

catalog_sql = sqlfiles.load("tracelake.query", "sql/catalog.sql")
VIEWS = {"dataset_version", "partition", "file", "task", "user_token"}


@pytest_asyncio.fixture
async def reader(catalog_dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(catalog_dsn)
    yield connection
    await connection.close()


@pytest_asyncio.fixture
async def writer(audit_dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(audit_dsn)
    yield connection
    await connection.close()


async def relations(connection: asyncpg.Connection) -> list[tuple[str, str]]:
    rows = await connection.fetch(
        "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE c.relkind IN ('r', 'v', 'p', 'm', 'S') AND n.nspname IN ('public', 'catalog')"
    )
    return [(row[0], row[1]) for row in rows]


async def refused(connection: asyncpg.Connection, statement: str) -> bool:
    try:
        await connection.execute(statement)
    except (asyncpg.InsufficientPrivilegeError, asyncpg.ReadOnlySQLTransactionError):
        return True
    return False


async def test_the_catalog_role_reads_the_views_and_nothing_else(reader: asyncpg.Connection) -> None:
    everything = await relations(reader)
    assert {"task", "user_token", "partition"} <= {name for schema, name in everything if schema == "public"}
    readable = {
        (schema, name) for schema, name in everything if not await refused(reader, f'TABLE {schema}."{name}"')
    }
    assert readable == {("catalog", name) for name in VIEWS}


async def test_the_catalog_role_writes_nothing_also_when_it_takes_the_lock_off(
    reader: asyncpg.Connection,
) -> None:
    assert await reader.fetchval("SHOW default_transaction_read_only") == "on"
    assert await reader.fetchval("SHOW statement_timeout") == "10s"
    await reader.execute("SET default_transaction_read_only = off")
    rights = await reader.fetch(
        "SELECT c.relname FROM pg_class c WHERE c.relnamespace <> 'pg_catalog'::regnamespace "
        "AND has_table_privilege(c.oid, 'INSERT, UPDATE, DELETE, TRUNCATE')"
    )
    assert rights == []
    for statement in (
        "CREATE TABLE catalog.mine (a int)",
        "CREATE TABLE public.mine (a int)",
        "CREATE TEMPORARY TABLE mine (a int)",
        "CREATE FUNCTION catalog.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "CREATE SCHEMA mine",
        "SELECT lo_create(0)",
        "SELECT lo_from_bytea(0, 'x')",
        "COPY (SELECT 1) TO PROGRAM 'cat'",
        "SELECT pg_read_file('PG_VERSION')",
        "SET ROLE tracelake_audit",
        "INSERT INTO catalog.task (task_id) VALUES (gen_random_uuid())",
        "UPDATE catalog.task SET attempt = 9",
    ):
        assert await refused(reader, statement), statement


async def test_the_audit_role_adds_rows_and_can_do_nothing_else(writer: asyncpg.Connection) -> None:
    for schema, name in await relations(writer):
        assert await refused(writer, f'TABLE {schema}."{name}"'), (schema, name)
    for statement in (
        "DELETE FROM catalog.query_audit",
        "UPDATE catalog.query_audit SET rows = 0",
        "TRUNCATE catalog.query_audit",
        "CREATE TEMPORARY TABLE mine (a int)",
        "CREATE TABLE catalog.mine (a int)",
        "SELECT lo_create(0)",
    ):
        assert await refused(writer, statement), statement


async def test_installing_again_renews_the_password(state_dsn: str, catalog_dsn: str) -> None:
    await install_roles(state_dsn)
    await (await asyncpg.connect(catalog_dsn)).close()


async def test_a_role_that_is_somebody_s_is_left_alone(
    state_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = f"tracelake_taken_{uuid4().hex[:8]}"
    monkeypatch.setattr("tracelake.store.query_roles.CATALOG_ROLE", taken)
    admin = await asyncpg.connect(state_dsn)
    try:
        await admin.execute(f"CREATE ROLE {taken} CREATEDB")
        with pytest.raises(Conflict) as error:
            await install_query_roles(
                admin, dsn=Secret(state_dsn), catalog_password=PASSWORD, audit_password=PASSWORD
            )
        assert error.value.reason == "RoleInUse"
        assert not await admin.fetchval("SELECT rolcanlogin FROM pg_roles WHERE rolname = $1", taken)
    finally:
        await admin.execute(f"DROP ROLE {taken}")
        await admin.close()


async def test_a_user_is_known_by_a_token_until_it_is_revoked(ctx: StepContext, catalog_dsn: str) -> None:
    now = 0.0
    catalog = Catalog(await open_statement_pool(Secret(catalog_dsn), 2, "test"), clock=lambda: now)
    try:
        user_id = await ctx.db.run(lambda tx: users.ensure_user(tx, ORG, "ada"), lock=DeployLock.NONE)
        token = await ctx.db.run(lambda tx: create_token(tx, user_id, "test"), lock=DeployLock.NONE)
        assert await catalog.user(token) == UserCaller(user_id, ORG, "ada")
        assert await catalog.user(token + "x") is None
        assert await catalog.user("nothing like a token") is None
        assert await catalog.user("tlu_" + "\N{SNOWMAN}") is None
        await ctx.db.run(lambda tx: users.revoke_token(tx, token), lock=DeployLock.NONE)
        now = 4.9
        assert await catalog.user(token) is not None, "remembered for a few seconds"
        now = 5.0
        assert await catalog.user(token) is None
    finally:
        await catalog.close()


async def test_one_look_finds_tasks_versions_and_hot_counterparts(ctx: StepContext, catalog_dsn: str) -> None:
    talk = Conversation(ctx)
    await talk.deploy(chain_dag())
    lease = await talk.lease("follower")
    catalog = await Catalog.open(Secret(catalog_dsn))
    everything = WantedBlocks()
    try:
        cold = (await talk.output("compact", 1))["dataset_version"]
        wanted = [
            WantedRelation("transactions", None, everything),
            WantedRelation("mine", cold, everything),
            WantedRelation("nobody", None, everything),
        ]
        look = await catalog.look(ORG, lease.task_id, wanted, max_files=10)
        assert look.task is not None
        assert (look.task.attempt, look.task.status.value) == (1, "Running")
        assert [(one.name, one.dataset, one.dataset_version) for one in look.relations] == [
            ("transactions", "transactions", cold),
            ("mine", "transactions", cold),
        ]
        assert look.relations[0].hot_version == (await talk.output("follower", 1))["dataset_version"]
        elsewhere = await catalog.look(uuid4(), lease.task_id, wanted, max_files=10)
        assert (elsewhere.task, elsewhere.relations) == (None, []), "another organisation sees nothing"
        assert await catalog.names(ORG) == ["blocks", "hot_logs", "logs", "ranges", "transactions"]
        await catalog.check()
    finally:
        await catalog.close()


MANY = """
INSERT INTO partition (dataset_version, version_no, range_start, range_end, stored, current, revision, row_count,
                       manifest)
SELECT $1, 1000000, n * 10, n * 10 + 9, true, true, 0, 10, jsonb_build_object('schema_hash', 'x', 'files',
       jsonb_build_array(jsonb_build_object('location', 'file:///' || n, 'rows', 10, 'bytes', 1,
                                            'min_block', n * 10, 'max_block', n * 10 + 9)))
FROM generate_series(0, 4999) n
"""


async def test_a_few_blocks_of_very_many_are_found_by_an_index(
    ctx: StepContext, state_dsn: str, catalog_dsn: str
) -> None:
    talk = Conversation(ctx)
    await talk.deploy(chain_dag())
    admin = await asyncpg.connect(state_dsn, server_settings={"plan_cache_mode": "force_generic_plan"})
    catalog = await Catalog.open(Secret(catalog_dsn))
    try:
        await admin.execute(MANY, (await talk.output("compact"))["dataset_version"])
        await admin.execute("ANALYZE")
        wanted = [WantedRelation("blocks", None, WantedBlocks(40_005, 40_012))]
        [found] = (await catalog.look(ORG, None, wanted, max_files=10)).relations
        assert [file.location for file in found.files or ()] == ["file:///4000", "file:///4001"]
        assert [(span.start, span.end) for span in found.cold or ()] == [(40_000, 40_019)]
        assert found.sample is not None
        look = catalog_sql.look.replace("$1", "NULL::uuid").replace("$2", f"'{ORG}'::uuid")
        for number, value in (
            (3, "'{blocks}'"),
            (4, "'{NULL}'"),
            (5, "'{40005}'"),
            (6, "'{40012}'"),
            (7, "10"),
        ):
            look = look.replace(f"${number}", value)
        plan = "\n".join(row[0] for row in await admin.fetch(f"EXPLAIN (ANALYZE, TIMING OFF) {look}"))
        assert "Seq Scan on partition" not in plan
        [many] = (
            await catalog.look(ORG, None, [WantedRelation("blocks", None, WantedBlocks())], max_files=10)
        ).relations
        assert len(many.files or ()) == 11, "one too many shows that there are more"
    finally:
        await catalog.close()
        await admin.close()


async def test_a_database_that_is_gone_is_said_to_be() -> None:
    nowhere = Secret("postgresql://nobody:nothing@127.0.0.1:1/nowhere")
    catalog, audit = await Catalog.open(nowhere), await AuditLog.open(nowhere)
    try:
        with pytest.raises(Unavailable) as error:
            await catalog.check()
        assert error.value.reason == "CatalogUnavailable"
        assert "nothing" not in str(error.value), "no password in it"
        with pytest.raises(Unavailable) as error:
            await audit.record(entry(UserCaller(uuid4(), ORG, "ada")))
        assert error.value.reason == "AuditUnavailable"
        with pytest.raises(Unavailable):
            await audit.check()
    finally:
        await catalog.close()
        await audit.close()


READ = DatasetRead("blocks", uuid4(), uuid4(), 3)


def entry(caller: QueryCaller, query_id: UUID | None = None) -> AuditEntry:
    return AuditEntry(
        caller=caller,
        sql_sha256=sha256(b"SELECT 'a secret'").digest(),
        outcome=QueryOutcome.COMPLETED,
        datasets=[READ],
        rows=7,
        bytes_scanned=1000,
        duration_ms=12,
        query_id=query_id or uuid4(),
    )


async def test_every_query_leaves_a_row_that_says_who_and_what_but_not_the_sql(
    ctx: StepContext, audit_dsn: str
) -> None:
    audit = await AuditLog.open(Secret(audit_dsn))
    try:
        await audit.check()
        user, task = UserCaller(uuid4(), ORG, "ada"), TaskCaller(uuid4(), 2, ORG, ())
        one = entry(user)
        await audit.record(one)
        await audit.record(entry(task))
        with pytest.raises(Unavailable):
            await audit.record(one)
    finally:
        await audit.close()
    rows = await Conversation(ctx).query("SELECT * FROM catalog.query_audit ORDER BY caller DESC")
    first, second = (dict(row) for row in rows)
    assert (first["caller"], first["user_id"], first["task_id"]) == ("user", user.user_id, None)
    assert (second["caller"], second["task_id"], second["attempt"]) == ("task", task.task_id, 2)
    assert first["datasets"] == [
        {
            "name": "blocks",
            "dataset_uuid": str(READ.dataset_uuid),
            "dataset_version": str(READ.dataset_version),
            "revision": 3,
        }
    ]
    assert (first["outcome"], first["rows"], first["bytes_scanned"], first["duration_ms"]) == (
        "completed",
        7,
        1000,
        12,
    )
    assert not any("SELECT" in str(value) for row in (first, second) for value in row.values())
