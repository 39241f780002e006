"""What an operator holds of the data database: a login of its attempt's own, that can fill its own staging tables
and read its own inputs. Nothing that it does by that runs as somebody else, reaches their rows or outlives it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import UUID, uuid4

import asyncpg
import pytest
import pytest_asyncio

from tests.support.databases import PASSWORD, install_data, role_dsn
from tests.support.hot_scene import (
    SCOPE,
    VERSION,
    Connection,
    Operators,
    output_of,
    rows,
    stage,
    staging_tables,
    writer,
)
from tracelake.domain.errors import Conflict, Invalid
from tracelake.embedded.postgres import Cluster
from tracelake.hot.commit import HotStore
from tracelake.hot.install import READER_ROLE, STAGING_ROLE, WRITER_ROLE, install, restore_roles
from tracelake.postgres.dsn import with_login
from tracelake.postgres.migrations import Schema
from tracelake.settings import Secret

OTHER = UUID("00000000-0000-4000-8000-0000000000cc")
PREPARED_OFF = "prepared transactions are disabled"

CODE = """CREATE FUNCTION {schema}.evil() RETURNS boolean LANGUAGE {language} AS
          $$ {body} $$"""
TRICKS = {
    # Code that a commit would run, on the table that it reads.
    "a policy": "CREATE POLICY evil ON staging.{own} USING (true)",
    "row security": "ALTER TABLE staging.{own} ENABLE ROW LEVEL SECURITY",
    "forced row security": "ALTER TABLE staging.{own} FORCE ROW LEVEL SECURITY",
    "a trigger": "CREATE TRIGGER evil AFTER INSERT ON staging.{own} EXECUTE FUNCTION RI_FKey_noaction_del()",
    "a rule": "CREATE RULE evil AS ON DELETE TO staging.{own} DO INSTEAD NOTHING",
    "a view in its place": "CREATE OR REPLACE VIEW staging.{own} AS SELECT 1 AS block_number",
    "another name": "ALTER TABLE staging.{own} RENAME TO {own}_x",
    "another schema": "ALTER TABLE staging.{own} SET SCHEMA data",
    "a generated column": "ALTER TABLE staging.{own} ADD COLUMN x int GENERATED ALWAYS AS (1) STORED",
    "a default": "ALTER TABLE staging.{own} ALTER COLUMN value SET DEFAULT current_user",
    "a column's type": "ALTER TABLE staging.{own} ALTER COLUMN value TYPE varchar USING current_user",
    "a check": "ALTER TABLE staging.{own} ADD CHECK (value <> '')",
    "an index on an expression": "CREATE INDEX ON staging.{own} (lower(value))",
    "a child": "CREATE TABLE staging.child () INHERITS (staging.{own})",
    "a temporary child": "CREATE TEMP TABLE child () INHERITS (staging.{own})",
    "a parent": "ALTER TABLE staging.{own} INHERIT data.{dataset}",
    "a partition": "ALTER TABLE data.{dataset} ATTACH PARTITION staging.{own} DEFAULT",
    "an owner": "ALTER TABLE staging.{own} OWNER TO {login}",
    "a drop": "DROP TABLE staging.{own}",
    "a truncate": "TRUNCATE staging.{own}",
    "a comment": "COMMENT ON TABLE staging.{own} IS 'evil'",
    "a label": "SECURITY LABEL ON TABLE staging.{own} IS 'evil'",
    "statistics": "CREATE STATISTICS staging.evil ON block_number, value FROM staging.{own}",
    "a publication": "CREATE PUBLICATION evil FOR TABLE staging.{own}",
    "the storage": "ALTER TABLE staging.{own} SET (autovacuum_enabled = off)",
    # Things of its own, anywhere.
    "a table of staging": "CREATE TABLE staging.mine (x int)",
    "a table of data": "CREATE TABLE data.mine (x int)",
    "a table of everybody": "CREATE TABLE public.mine (x int)",
    "a table of the platform": "CREATE TABLE tracelake.mine (x int)",
    "a schema": "CREATE SCHEMA mine",
    "a temporary table": "CREATE TEMP TABLE pg_class (x int)",
    "a temporary view": "CREATE TEMP VIEW pg_class AS SELECT 1",
    "a temporary function": CODE.format(schema="pg_temp", language="plpgsql", body="BEGIN RETURN true; END"),
    "a table by select": "SELECT 1 AS x INTO staging.mine",
    "a sequence": "CREATE SEQUENCE staging.mine",
    "a function": CODE.format(schema="staging", language="plpgsql", body="BEGIN RETURN true; END"),
    "a function in SQL": CODE.format(schema="staging", language="sql", body="SELECT true"),
    "a function in the catalog": CODE.format(schema="pg_catalog", language="sql", body="SELECT true"),
    "a block of code": "DO $$ BEGIN PERFORM 1; END $$",
    "a domain": "CREATE DOMAIN staging.mine AS bigint CHECK (VALUE > 0)",
    "a type": "CREATE TYPE staging.mine AS (x int)",
    "an enum": "CREATE TYPE staging.mine AS ENUM ('a')",
    "a range": "CREATE TYPE staging.mine AS RANGE (subtype = bigint)",
    "an operator": "CREATE OPERATOR staging.= (LEFTARG = bigint, RIGHTARG = text, FUNCTION = int8eq)",
    "a cast": "CREATE CAST (bigint AS boolean) WITH INOUT AS IMPLICIT",
    "an aggregate": "CREATE AGGREGATE staging.count (bigint) (SFUNC = int8pl, STYPE = bigint)",
    "a collation": 'CREATE COLLATION staging.mine FROM "C"',
    "a conversion": "CREATE CONVERSION staging.mine FOR 'UTF8' TO 'LATIN1' FROM utf8_to_iso8859_1",
    "an event trigger": "CREATE EVENT TRIGGER evil ON ddl_command_start EXECUTE FUNCTION tracelake.open_ticket()",
    "an extension": "CREATE EXTENSION dblink",
    "a language": "CREATE LANGUAGE mine HANDLER plpgsql_call_handler",
    "a foreign server": "CREATE FOREIGN DATA WRAPPER mine",
    "a large object": "SELECT lo_create(0)",
    "a large object of bytes": "SELECT lo_from_bytea(0, 'x')",
    "a large object of a file": "SELECT lo_import('/etc/passwd')",
    "a database": "CREATE DATABASE mine",
    "a tablespace": "CREATE TABLESPACE mine LOCATION '/tmp'",
    # Somebody else's role, and its own.
    "the writer": f"SET ROLE {WRITER_ROLE}",
    "the reader": f"SET ROLE {READER_ROLE}",
    "the owner of staging": f"SET ROLE {STAGING_ROLE}",
    "the session of the writer": f"SET SESSION AUTHORIZATION {WRITER_ROLE}",
    "the writer's password": f"ALTER ROLE {WRITER_ROLE} PASSWORD 'x'",
    "the writer's path": f"ALTER ROLE {WRITER_ROLE} SET search_path = staging",
    "the writer's property": f"DROP OWNED BY {WRITER_ROLE}",
    "the writer's table": f"REASSIGN OWNED BY {WRITER_ROLE} TO {{login}}",
    "membership": f"GRANT {WRITER_ROLE} TO {{login}}",
    "a role": "CREATE ROLE mine",
    "more rights": "ALTER ROLE {login} SUPERUSER",
    "roles": "ALTER ROLE {login} CREATEROLE",
    "row security off": "ALTER ROLE {login} BYPASSRLS",
    "for ever": "ALTER ROLE {login} VALID UNTIL 'infinity'",
    "more connections": "ALTER ROLE {login} CONNECTION LIMIT -1",
    "another name of its own": "ALTER ROLE {login} RENAME TO mine",
    "others' default privileges": f"ALTER DEFAULT PRIVILEGES FOR ROLE {WRITER_ROLE} GRANT ALL ON TABLES TO PUBLIC",
    "the database's settings": "ALTER DATABASE {database} SET search_path = staging",
    "the server's settings": "ALTER SYSTEM SET work_mem = '1GB'",
    "a superuser's setting": "SET session_replication_role = replica",
    "the limit of its files": "SET temp_file_limit = -1",
    # The platform's own.
    "the fences": "SELECT * FROM tracelake.fence",
    "a fence": "DELETE FROM tracelake.fence",
    "the tickets": "SELECT * FROM tracelake.ticket",
    "a version's lock": "SELECT tracelake.lock_version(gen_random_uuid())",
    "the row of that lock": "SELECT * FROM tracelake.version_lock FOR UPDATE",
    "a ticket of its own": "SELECT tracelake.open_ticket('x', 'x', gen_random_uuid(), 1, 1, '{{}}')",
    "a login": "SELECT tracelake.make_login('tracelake_t_{zeros}', 'x')",
    "somebody's login": "SELECT tracelake.drop_login('{other_login}')",
    "somebody's ticket": "SELECT tracelake.close_ticket('{other_login}')",
    "a commit": "SELECT tracelake.table_of(gen_random_uuid())",
    "the ledger of migrations": "SELECT * FROM public.schema_migration",
    # What others have.
    "rows of another dataset": "TABLE data.{unread}",
    "to write its own dataset": "DELETE FROM data.{dataset}",
    "to add to its own dataset": "INSERT INTO data.{dataset} VALUES (1, 'evil')",
    "to truncate its own dataset": "TRUNCATE data.{dataset}",
    "to lock its own dataset": "BEGIN; LOCK TABLE data.{dataset} IN SHARE MODE",
    "to lock rows of it": "SELECT * FROM data.{dataset} FOR SHARE",
    "to index its own dataset": "CREATE INDEX ON data.{dataset} (value)",
    "another attempt's rows": "TABLE staging.{other}",
    "rows for another attempt": "INSERT INTO staging.{other} VALUES (1, 'evil')",
    "to load for another attempt": "COPY staging.{other} FROM STDIN",
    "to lock another attempt's table": "BEGIN; LOCK TABLE staging.{other} IN ACCESS SHARE MODE",
    "to drop another attempt's table": "SELECT staging.discard(ARRAY['{other}'])",
    "a part of another attempt": "SELECT staging.open_like('{other}')",
    "a part of a dataset": "SELECT staging.open_like('{dataset}')",
    "its own rows again": "TABLE staging.{own}",
    "to change its own rows": "UPDATE staging.{own} SET value = 'evil'",
    # The server's.
    "a lock that others wait for": "SELECT pg_advisory_lock(8600002)",
    "a lock that others try": "SELECT pg_try_advisory_xact_lock_shared(8600002)",
    "a message into the log": "SELECT pg_logical_emit_message(false, 'x', repeat('x', 1000))",
    "a notification by function": "SELECT pg_notify('x', 'x')",
    "a prepared transaction": "BEGIN; INSERT INTO staging.{own} VALUES (1, 'x'); PREPARE TRANSACTION 'x'",
    "a file": "SELECT pg_read_file('postgresql.conf')",
    "a folder": "SELECT pg_ls_dir('.')",
    "a program": "COPY staging.{own} FROM PROGRAM 'id'",
    "a file into a table": "COPY staging.{own} FROM '/etc/passwd'",
    "passwords": "SELECT rolpassword FROM pg_authid",
    "a replication slot": "SELECT pg_create_logical_replication_slot('x', 'test_decoding')",
    "a library": "LOAD 'dblink'",
    "a checkpoint": "CHECKPOINT",
    "a vacuum of everything": "VACUUM tracelake.fence",
    "everybody's sessions": "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename <> current_user",
}
ONLY_WARNED = (
    "GRANT ALL ON staging.{own} TO PUBLIC",
    "GRANT SELECT ON data.{dataset} TO PUBLIC",
    "GRANT CREATE, TEMPORARY ON DATABASE {database} TO PUBLIC",
)
WRONG_COLUMNS = (
    '[["x", "staging.mine"]]',
    '[["x", "money"]]',
    '[["x", "bigint DEFAULT 1"]]',
    '[["x", "bigint); CREATE TABLE staging.y (z int"]]',
    '[["x", "numeric(1,1), y text"]]',
    '[["x", "text\\n"]]',
    '[["x", "text COLLATE \\"C\\""]]',
    '[["x", "int[]"]]',
    '[["x", "regclass"]]',
    '[["x", "pg_class"]]',
    '[["x"]]',
    '[["x", null]]',
    '["x"]',
    '{"x": "text"}',
    "[]",
    '[["ctid", "text"]]',
    '[["", "text"]]',
)
OWNED = """CREATE UNLOGGED TABLE staging.{name} (block_number bigint, value text{more});
           ALTER TABLE staging.{name} OWNER TO tracelake_staging;"""
EVIL = """CREATE FUNCTION staging.evil() RETURNS boolean LANGUAGE plpgsql AS
          $$ BEGIN INSERT INTO staging.witness VALUES (current_user); RETURN true; END $$;
          CREATE FUNCTION staging.evil_trigger() RETURNS trigger LANGUAGE plpgsql AS
          $$ BEGIN INSERT INTO staging.witness VALUES (current_user); RETURN NEW; END $$;
          CREATE TABLE staging.witness (who text);
          CREATE DOMAIN staging.spoilt AS text CHECK (staging.evil());
          GRANT ALL ON staging.witness TO PUBLIC; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA staging TO PUBLIC;"""
SHAPES = {
    "a policy": OWNED + "ALTER TABLE staging.{name} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;"
    "CREATE POLICY p ON staging.{name} USING (staging.evil())",
    "a trigger": OWNED + "CREATE TRIGGER t BEFORE DELETE ON staging.{name} EXECUTE FUNCTION staging.evil_trigger()",
    "a rule": OWNED + "CREATE RULE r AS ON DELETE TO staging.{name} DO ALSO SELECT staging.evil()",
    "a view": "CREATE VIEW staging.{name} AS SELECT 1::bigint AS block_number, staging.evil()::text AS value;"
    "ALTER VIEW staging.{name} OWNER TO tracelake_staging",
    "a materialized view": "CREATE MATERIALIZED VIEW staging.{name} AS SELECT 1::bigint AS block_number;"
    "ALTER TABLE staging.{name} OWNER TO tracelake_staging",
    "a default": OWNED + "ALTER TABLE staging.{name} ALTER COLUMN value SET DEFAULT staging.evil()::text",
    "a generated column": OWNED.replace("{more}", ", g bigint GENERATED ALWAYS AS (block_number + 1) STORED"),
    "an identity": OWNED.replace("{more}", ", g bigint GENERATED ALWAYS AS IDENTITY"),
    "a domain": OWNED.replace("{more}", ", d staging.spoilt"),
    "an array": OWNED.replace("{more}", ", d text[]"),
    "a dropped column": OWNED.replace("{more}", ", d text") + "ALTER TABLE staging.{name} DROP COLUMN d",
    "a check": OWNED + "ALTER TABLE staging.{name} ADD CHECK (staging.evil())",
    "an index": OWNED + "CREATE INDEX ON staging.{name} (lower(value))",
    "a child": OWNED + "CREATE TABLE staging.child () INHERITS (staging.{name})",
    "a parent": "CREATE TABLE staging.parent (block_number bigint, value text);" + OWNED
    + "ALTER TABLE staging.{name} INHERIT staging.parent",
    "a partitioned table": "CREATE TABLE staging.{name} (block_number bigint) PARTITION BY RANGE (block_number);"
    "ALTER TABLE staging.{name} OWNER TO tracelake_staging",
    "somebody else's": "CREATE UNLOGGED TABLE staging.{name} (block_number bigint, value text)",
    "a logged table": OWNED.replace("UNLOGGED ", ""),
}  # fmt: skip

REFUSED_LOCKS = {
    "a materialized view": "cannot lock relation",
    "somebody else's": "permission denied for table",
}
LEDGER = """CREATE TABLE schema_migration (version int PRIMARY KEY, name text, sha256 text,
                                           applied_at timestamptz DEFAULT now())"""


async def refused(connection: Connection, statement: str) -> bool:
    try:
        await connection.execute(statement)
    except asyncpg.InsufficientPrivilegeError:
        return True
    except asyncpg.ObjectNotInPrerequisiteStateError as error:
        return PREPARED_OFF in str(error)
    except asyncpg.PostgresError as error:
        # Refused before anybody looks at rights.
        return isinstance(error, (asyncpg.FeatureNotSupportedError, asyncpg.InvalidParameterValueError)) or (
            "no security label providers" in str(error)
        )
    finally:
        await connection.execute("ROLLBACK")
    return False


async def test_whatever_an_operator_tries_by_its_login_is_refused_and_its_commit_is_right(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    mine, theirs = writer(1), writer(1)
    await hot.begin(mine, VERSION, SCOPE)
    login = (await operator.ticket(mine, VERSION)).login
    connection = await operator.connection(mine)
    await hot.commit(mine, [output_of(await stage(operator, mine, 1))], SCOPE, [])
    await admin.execute(f"CREATE TABLE data.d_{OTHER.hex} (block_number bigint)")
    own, other = await stage(operator, mine, 5, value="mine"), await stage(operator, theirs, 6)
    names = {
        "own": own[0],
        "other": other[0],
        "login": login,
        "other_login": (await operator.ticket(theirs)).login,
        "dataset": f"d_{VERSION.hex}",
        "unread": f"d_{OTHER.hex}",
        "zeros": "0" * 24,
        "database": f'"{await admin.fetchval("SELECT current_database()")}"',
    }
    before = await catalogue(admin)
    accepted = [
        name for name, trick in TRICKS.items() if not await refused(connection, trick.format(**names))
    ]
    for statement in ONLY_WARNED:
        await connection.execute(statement.format(**names))
    for columns in WRONG_COLUMNS:
        with pytest.raises(asyncpg.PostgresError):
            await connection.fetchval("SELECT staging.open_table(0, $1::jsonb)", columns)
    assert accepted == []
    assert await catalogue(admin) == before
    assert len(await connection.fetch(f"TABLE data.{names['dataset']}")) == 1
    assert await hot.commit(mine, [output_of(own)], SCOPE, []) == [1]
    assert await rows(admin) == [(5, "mine")]


async def test_what_an_operator_may_do_to_itself_hurts_nobody_else(
    hot: HotStore, operator: Operators, admin: Connection, data_dsn: str
) -> None:
    """A role can't be kept from changing its own password and settings, nor from giving up what it has."""
    mine, theirs = writer(1), writer(1)
    for who in (mine, theirs):
        await hot.begin(who, VERSION, SCOPE)
    ticket = await operator.ticket(mine, VERSION)
    connection, other = await operator.connection(mine), await operator.connection(theirs, VERSION)
    for statement in (
        f"ALTER ROLE {ticket.login} PASSWORD 'mine'",
        f"ALTER ROLE {ticket.login} SET search_path = staging",
        "LISTEN x; NOTIFY x",
        f"DROP OWNED BY {ticket.login}",
    ):
        await connection.execute(statement)
    with pytest.raises(asyncpg.PostgresError):
        await asyncpg.connect(ticket.dsn.reveal())
    await hot.commit(theirs, [output_of(await stage(operator, theirs, 2))], SCOPE, [])
    assert len(await other.fetch(f"TABLE data.d_{VERSION.hex}")) == 1
    await operator.tickets.close(ticket)
    assert await rows(admin) == [(2, "x")]
    await (await asyncpg.connect(role_dsn(data_dsn, WRITER_ROLE))).close()


async def test_a_session_that_holds_its_own_role_keeps_neither_its_login_nor_others_waiting(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    """It may be an accomplice's, who got the address from the operator."""
    mine, theirs = writer(1), writer(1)
    ticket = await operator.ticket(mine, VERSION)
    holding = await asyncpg.connect(ticket.dsn.reveal())
    await holding.execute(f"BEGIN; ALTER ROLE {ticket.login} PASSWORD 'mine'")
    await admin.execute(f"SET lock_timeout = '50ms'; SELECT tracelake.extend_login('{ticket.login}')")
    await operator.tickets.close(ticket)
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await holding.execute("SELECT 1")
    with pytest.raises(asyncpg.PostgresError):
        await asyncpg.connect(ticket.dsn.reveal())
    assert not await admin.fetchval("SELECT count(*) FROM pg_roles WHERE rolname = $1", ticket.login)
    await operator.ticket(theirs, VERSION)


async def test_a_table_that_the_platform_did_not_make_so_is_not_read(
    hot: HotStore, admin: Connection
) -> None:
    """Nobody but an administrator can make one of these; that no code runs doesn't rest on that alone."""
    who = writer(1)
    await hot.begin(who, VERSION, SCOPE)
    await admin.execute(EVIL)
    for number, (shape, statement) in enumerate(SHAPES.items()):
        name = f"staging_{who.task_id.hex}_0_{who.epoch}_{number:08x}"
        await admin.execute(statement.replace("{more}", "").format(name=name))
        with pytest.raises(Invalid) as reason:
            await hot.commit(who, [output_of((name, 0))], SCOPE, [])
        # Two of these the writer can't even lock.
        expected = REFUSED_LOCKS.get(shape, "as the platform makes them")
        assert expected in reason.value.message, shape
    assert await admin.fetchval("SELECT count(*) FROM staging.witness") == 0
    assert await rows(admin) == []


async def test_an_attempt_reads_its_inputs_also_those_that_come_later_and_nothing_else(
    hot: HotStore, operator: Operators
) -> None:
    producer, reader, stranger = writer(1), writer(1), writer(1)
    await hot.begin(producer, VERSION, SCOPE)
    early = await operator.connection(reader, VERSION)
    await hot.commit(producer, [output_of(await stage(operator, producer, 1))], SCOPE, [])
    late = await operator.connection(writer(1), VERSION)
    for connection in (early, late):
        assert len(await connection.fetch(f"TABLE data.d_{VERSION.hex}")) == 1
    for nobody in (await operator.connection(stranger, OTHER), await operator.connection(producer)):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await nobody.execute(f"TABLE data.d_{VERSION.hex}")


async def test_nothing_is_left_of_an_attempt_that_is_over(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    who = writer(1)
    await hot.begin(who, VERSION, SCOPE)
    ticket, connection = await operator.ticket(who, VERSION), await operator.connection(who)
    await hot.commit(who, [output_of(await stage(operator, who, 1))], SCOPE, [])
    await stage(operator, who, 2)
    await connection.execute("BEGIN")
    await connection.execute(f"TABLE data.d_{VERSION.hex}")
    await operator.tickets.close(ticket)
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, ConnectionError)):
        await connection.execute("SELECT 1")
    with pytest.raises(asyncpg.PostgresError):
        await asyncpg.connect(ticket.dsn.reveal())
    await operator.tickets.close(ticket)
    assert await staging_tables(admin) == []
    assert await admin.fetchval("SELECT count(*) FROM pg_roles WHERE rolname = $1", ticket.login) == 0
    rights = await admin.fetchval("SELECT relacl::text FROM pg_class WHERE relname = $1", f"d_{VERSION.hex}")
    assert "tracelake_t_" not in rights


async def test_tickets_of_a_wrapper_that_is_gone_are_swept_and_a_living_one_gets_its_own_again(
    operator: Operators, admin: Connection
) -> None:
    who = writer(1)
    ticket = await operator.ticket(who)
    await operator.tickets.sweep()
    await operator.tickets.renew([ticket])
    await admin.execute("UPDATE tracelake.ticket SET alive_until = now() - interval '1 second'")
    await operator.tickets.sweep()
    with pytest.raises(asyncpg.PostgresError):
        await asyncpg.connect(ticket.dsn.reveal())
    await operator.tickets.renew([ticket])
    await (await asyncpg.connect(ticket.dsn.reveal())).close()
    await admin.execute("DELETE FROM tracelake.ticket")
    await operator.tickets.sweep()
    assert await admin.fetchval("SELECT count(*) FROM pg_roles WHERE rolname = $1", ticket.login) == 0


async def test_a_later_attempt_takes_the_earlier_ones_ticket_and_never_the_other_way_round(
    hot: HotStore, operator: Operators
) -> None:
    task_id = uuid4()
    old, new = writer(1, task_id), writer(2, task_id)
    earlier = await operator.ticket(old)
    await operator.ticket(new)
    with pytest.raises(asyncpg.PostgresError):
        await asyncpg.connect(earlier.dsn.reveal())
    await operator.tickets.renew([earlier])
    with pytest.raises(asyncpg.PostgresError):
        await asyncpg.connect(earlier.dsn.reveal())
    with pytest.raises(Conflict):
        await operator.tickets.open(earlier.holder)
    assert await (await operator.connection(new)).fetchval("SELECT 1") == 1


async def test_many_attempts_at_once_get_their_tickets(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    whose = [writer(1) for _ in range(12)]
    await hot.begin(whose[0], VERSION, SCOPE)
    await hot.commit(whose[0], [output_of(await stage(operator, whose[0], 1))], SCOPE, [])
    tickets = await asyncio.gather(*(operator.ticket(who, VERSION) for who in whose[1:]))
    await asyncio.gather(*(operator.tickets.close(ticket) for ticket in tickets))
    assert await admin.fetchval("SELECT count(*) FROM tracelake.ticket") == 1


async def test_an_attempt_has_so_many_tables_and_no_more(operator: Operators, admin: Connection) -> None:
    connection = await operator.connection(writer(1))
    many = 'SELECT staging.open_table(0, \'[["x", "text"]]\') FROM generate_series(1, 200)'
    with pytest.raises(asyncpg.ProgramLimitExceededError, match="one transaction"):
        await connection.execute(many)
    assert await staging_tables(admin) == []


async def test_no_function_of_the_platform_takes_names_from_its_caller_and_everybody_may_call_four(
    admin: Connection,
) -> None:
    unsafe = await admin.fetch(
        """SELECT oid::regprocedure::text AS name FROM pg_proc
           WHERE pronamespace IN ('tracelake'::regnamespace, 'staging'::regnamespace)
             AND NOT coalesce(proconfig, '{}') @> ARRAY['search_path=pg_catalog, pg_temp']"""
    )
    assert [row["name"] for row in unsafe] == []
    public = await admin.fetch(
        """SELECT proname FROM pg_proc
           WHERE pronamespace IN ('tracelake'::regnamespace, 'staging'::regnamespace)
             AND has_function_privilege('public', oid, 'EXECUTE') ORDER BY 1"""
    )
    assert [row["proname"] for row in public] == ["discard", "discard_output", "open_like", "open_table"]
    languages = """SELECT lanname FROM pg_language
                   WHERE lanpltrusted AND has_language_privilege('public', oid, 'USAGE')"""
    assert await admin.fetch(languages) == []


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Roles belong to a server: what is done to those that all tests share is done elsewhere."""
    with Cluster(tmp_path_factory.mktemp("roles") / "data", name="data", throwaway=True) as cluster:
        yield cluster


@pytest_asyncio.fixture
async def server(own_cluster: Cluster) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(own_cluster.dsn())
    yield connection
    await connection.close()


async def test_an_owner_that_is_no_superuser_can_install_if_it_can_create_roles(
    own_cluster: Cluster, server: Connection
) -> None:
    await server.execute("CREATE ROLE landlord LOGIN PASSWORD 'x'")
    await server.execute("CREATE DATABASE rented OWNER landlord")
    dsn = with_login(own_cluster.dsn("rented"), "landlord", "x")
    with pytest.raises(Conflict, match="ALTER ROLE landlord CREATEROLE"):
        await install(dsn, writer_password=PASSWORD, reader_password=PASSWORD)
    await server.execute("ALTER ROLE landlord CREATEROLE")
    for _ in range(2):
        await install(dsn, writer_password=PASSWORD, reader_password=PASSWORD)
    hot = HotStore(Secret(role_dsn(dsn, WRITER_ROLE)))
    operator, who = Operators(hot), writer(1)
    try:
        await hot.begin(who, VERSION, SCOPE)
        ticket = await operator.ticket(who, VERSION)
        connection = await operator.connection(who)
        assert await hot.commit(who, [output_of(await stage(operator, who, 1))], SCOPE, []) == [1]
        assert len(await connection.fetch(f"TABLE data.d_{VERSION.hex}")) == 1
        await operator.tickets.close(ticket)
        assert await server.fetchval("SELECT count(*) FROM pg_roles WHERE rolname = $1", ticket.login) == 0
    finally:
        await operator.close()
        await hot.close()
        await server.execute("DROP DATABASE rented WITH (FORCE)")
        for role in (STAGING_ROLE, WRITER_ROLE, READER_ROLE, "landlord"):
            await server.execute(f"DROP ROLE {role}")


async def test_an_owner_that_may_not_replace_functions_is_refused_with_a_way_out(
    own_cluster: Cluster, server: Connection
) -> None:
    await server.execute("CREATE ROLE landlord LOGIN CREATEROLE PASSWORD 'x'")
    await server.execute("CREATE DATABASE rented OWNER landlord")
    dsn = with_login(own_cluster.dsn("rented"), "landlord", "x")
    superuser = await asyncpg.connect(own_cluster.dsn("rented"))
    try:
        await install(dsn, writer_password=PASSWORD, reader_password=PASSWORD)
        await superuser.execute("REVOKE USAGE ON LANGUAGE plpgsql, sql FROM PUBLIC")
        await install(dsn, writer_password=PASSWORD, reader_password=PASSWORD)
        await superuser.execute("UPDATE installation.function_set SET sha256 = 'an older one'")
        with pytest.raises(Conflict, match="GRANT USAGE ON LANGUAGE plpgsql, sql") as refused:
            await install(dsn, writer_password=PASSWORD, reader_password=PASSWORD)
        assert refused.value.reason == "CantPutFunctions"
        await superuser.execute("GRANT USAGE ON LANGUAGE plpgsql, sql TO landlord")
        await install(dsn, writer_password=PASSWORD, reader_password=PASSWORD)
        assert await superuser.fetchval("SELECT count(*) FROM installation.function_set") == 2
    finally:
        await superuser.close()
        await server.execute("DROP DATABASE rented WITH (FORCE)")
        for role in (STAGING_ROLE, WRITER_ROLE, READER_ROLE, "landlord"):
            await server.execute(f"DROP ROLE {role}")


async def test_what_operators_had_made_by_a_shared_login_is_gone_after_an_upgrade(
    own_cluster: Cluster, server: Connection
) -> None:
    await server.execute("CREATE DATABASE old")
    admin = await asyncpg.connect(own_cluster.dsn("old"))
    schema = Schema("data", "tracelake.hot.migrations")
    for migration in schema.migrations()[:4]:
        await admin.execute(migration.sql)
    await admin.execute(f"CREATE ROLE {STAGING_ROLE} LOGIN PASSWORD 'shared'")
    await admin.execute(f"GRANT CREATE, USAGE ON SCHEMA staging TO {STAGING_ROLE}")
    shared = await asyncpg.connect(with_login(own_cluster.dsn("old"), STAGING_ROLE, "shared"))
    await shared.execute(
        """CREATE FUNCTION staging.evil() RETURNS boolean LANGUAGE sql AS 'SELECT true';
           CREATE TABLE staging.x (y int); ALTER TABLE staging.x FORCE ROW LEVEL SECURITY;
           CREATE POLICY p ON staging.x USING (staging.evil())"""
    )
    await admin.execute(LEDGER)
    for migration in schema.migrations()[:4]:
        await admin.execute(
            "INSERT INTO schema_migration VALUES ($1, $2, $3)",
            migration.version,
            migration.name,
            migration.sha256,
        )
    await asyncio.to_thread(install_data, own_cluster.dsn("old"))
    assert await staging_tables(admin) == []
    assert await admin.fetchval("SELECT to_regprocedure('staging.evil()')") is None
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, ConnectionError)):
        await shared.execute("SELECT 1")
    with pytest.raises(asyncpg.InvalidAuthorizationSpecificationError):
        await asyncpg.connect(with_login(own_cluster.dsn("old"), STAGING_ROLE, "shared"))
    await admin.close()


async def test_a_password_that_a_role_has_changed_is_restored(
    own_cluster: Cluster, server: Connection
) -> None:
    await server.execute("CREATE DATABASE changed")
    dsn = own_cluster.dsn("changed")
    await asyncio.to_thread(install_data, dsn)
    given = {"writer_password": PASSWORD, "reader_password": PASSWORD}
    assert await restore_roles(dsn, **given) == []
    reader = await asyncpg.connect(role_dsn(dsn, READER_ROLE))
    await reader.execute("SET default_transaction_read_only = off")
    for spoilt in ("PASSWORD 'mine'", "SET statement_timeout = 1", "IN DATABASE changed SET search_path = x"):
        await reader.execute(f"ALTER ROLE {READER_ROLE} {spoilt}")
        assert await restore_roles(dsn, **given) == [READER_ROLE]
        assert await restore_roles(dsn, **given) == []
    await reader.close()


HELD = (
    "REVOKE CONNECT ON DATABASE {database} FROM {login}",
    "REVOKE SELECT ON data.{dataset} FROM {login}",
    "DROP OWNED BY {login}",
    "ALTER ROLE {login} PASSWORD 'mine'",
)


@pytest.mark.parametrize("statement", HELD)
async def test_a_transaction_that_a_guest_leaves_open_keeps_no_attempt_waiting(
    hot: HotStore, operator: Operators, admin: Connection, statement: str
) -> None:
    """Every login may change its own role and give up its own rights, and a change that isn't committed makes
    others wait who change the same row of a catalogue: that of the database, for whoever opens a ticket."""
    mine, theirs = writer(1), writer(1)
    await hot.begin(theirs, VERSION, SCOPE)
    await hot.commit(theirs, [output_of(await stage(operator, theirs, 2))], SCOPE, [])
    ticket = await operator.ticket(mine, VERSION)
    held = await asyncpg.connect(ticket.dsn.reveal())
    database = await admin.fetchval("SELECT current_database()")
    await held.execute("SET idle_in_transaction_session_timeout = 0; BEGIN")
    await held.execute(statement.format(database=database, login=ticket.login, dataset=f"d_{VERSION.hex}"))
    async with asyncio.timeout(5):
        await operator.tickets.close(await operator.ticket(writer(1), VERSION))
        await operator.tickets.close(ticket)
    held.terminate()


async def test_a_login_that_holds_its_own_role_is_restored_all_the_same(
    own_cluster: Cluster, server: Connection
) -> None:
    await server.execute("CREATE DATABASE held")
    dsn = own_cluster.dsn("held")
    await asyncio.to_thread(install_data, dsn)
    given = {"writer_password": PASSWORD, "reader_password": PASSWORD}
    for role in (READER_ROLE, WRITER_ROLE):
        for put_back in (restore_roles, install):
            sessions = [await asyncpg.connect(role_dsn(dsn, role)) for _ in range(4)]
            for session in sessions:
                await session.execute(
                    "SET default_transaction_read_only = off; SET idle_in_transaction_session_timeout = 0"
                )
            await sessions[0].execute(f"ALTER ROLE {role} PASSWORD 'mine'")
            queued = [
                asyncio.ensure_future(session.execute(f"BEGIN; ALTER ROLE {role} PASSWORD 'mine'"))
                for session in sessions[1:]
            ]
            await asyncio.wait(queued, return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(8):
                await put_back(dsn, **given)
            await (await asyncpg.connect(role_dsn(dsn, role))).close()
            for session in sessions:
                session.terminate()
            await asyncio.gather(*queued, return_exceptions=True)


TAKEN_AWAY = {
    READER_ROLE: (
        "REVOKE SELECT ON ALL TABLES IN SCHEMA data FROM tracelake_reader",
        "REVOKE CONNECT ON DATABASE given_up FROM tracelake_reader",
        "ALTER DEFAULT PRIVILEGES FOR ROLE tracelake_writer IN SCHEMA data "
        "REVOKE SELECT ON TABLES FROM tracelake_reader",
    ),
    WRITER_ROLE: (
        "REVOKE CONNECT ON DATABASE given_up FROM tracelake_writer",
        "REVOKE tracelake_staging FROM tracelake_writer",
        "REVOKE INSERT ON tracelake.fence FROM tracelake_writer",
    ),
}


async def test_rights_that_a_login_gave_up_come_back_and_no_new_table_needs_them(
    own_cluster: Cluster, server: Connection
) -> None:
    await server.execute("CREATE DATABASE given_up")
    dsn = own_cluster.dsn("given_up")
    await asyncio.to_thread(install_data, dsn)
    given = {"writer_password": PASSWORD, "reader_password": PASSWORD}
    hot = HotStore(Secret(role_dsn(dsn, WRITER_ROLE)))
    operators, who = Operators(hot), writer(1)
    reader = await asyncpg.connect(role_dsn(dsn, READER_ROLE))
    owner = await asyncpg.connect(dsn)
    try:
        await reader.execute("SET default_transaction_read_only = off")
        await reader.execute(f"DROP OWNED BY {READER_ROLE}")
        await hot.begin(who, VERSION, SCOPE)
        await hot.commit(who, [output_of(await stage(operators, who, 1))], SCOPE, [])
        assert len(await reader.fetch(f"TABLE data.d_{VERSION.hex}")) == 1
        assert await restore_roles(dsn, **given) == [READER_ROLE]
        assert await restore_roles(dsn, **given) == []
        for role, statements in TAKEN_AWAY.items():
            for statement in statements:
                await owner.execute(statement)
                assert await restore_roles(dsn, **given) == [role], statement
        assert await restore_roles(dsn, **given) == []
    finally:
        await operators.close()
        await hot.close()
        await reader.close()
        await owner.close()


async def test_a_null_passes_no_check_of_a_function_that_runs_as_somebody_else(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    await operator.ticket(writer(1))
    connection = await operator.connection(writer(1))
    columns = '[["x", "text"]]'
    for call in (
        f"staging.open_table(NULL, '{columns}')",
        "staging.open_table(0, NULL)",
        "staging.open_table(NULL, NULL)",
        "staging.open_table(0, 'null')",
        "staging.open_table(0, '[null]')",
        "staging.open_table(0, '[[null, null]]')",
        "staging.open_like(NULL)",
        "staging.discard(NULL)",
        "staging.discard(ARRAY[NULL])",
        "staging.discard_output(NULL)",
    ):
        with pytest.raises(asyncpg.PostgresError):
            await connection.execute(f"SELECT {call}")
    assert await staging_tables(admin) == []
    definers = await admin.fetch(
        """SELECT oid::regproc::text AS name, pronargs FROM pg_proc
           WHERE pronamespace IN ('tracelake'::regnamespace, 'staging'::regnamespace) AND prosecdef"""
    )
    assert len(definers) > 10
    for each in definers:
        with pytest.raises(asyncpg.PostgresError):
            await admin.execute(f"SELECT {each['name']}({', '.join(['NULL'] * each['pronargs'])})")


async def test_a_commit_takes_tables_of_its_own_output_alone(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    who = writer(1)
    await hot.begin(who, VERSION, SCOPE)
    staged = await stage(operator, who, 1)
    with pytest.raises(Invalid, match="isn't a staging table of output 1 of this attempt"):
        await hot.commit(who, [output_of(staged, output_index=1)], SCOPE, [])
    assert await hot.commit(who, [output_of(staged)], SCOPE, []) == [1]


async def test_prepared_transactions_are_refused_at_the_install(tmp_path: Path) -> None:
    settings = {"max_prepared_transactions": "2"}
    with (
        Cluster(tmp_path / "data", name="data", settings=settings, throwaway=True) as cluster,
        pytest.raises(Conflict, match="max_prepared_transactions is 2"),
    ):
        await install(cluster.dsn(), writer_password=PASSWORD, reader_password=PASSWORD)


async def catalogue(admin: Connection) -> list[tuple[object, ...]]:
    """Everything that a trick could have left, and the writer's password."""
    found = await admin.fetch(
        """SELECT 'class', oid::text, relname::text, relowner::text, relkind::text || relhasrules || relhastriggers
                  || relrowsecurity || relforcerowsecurity || relhassubclass || relhasindex, relacl::text
           FROM pg_class WHERE relnamespace::regnamespace::text !~ '^pg_'
           UNION ALL SELECT 'proc', oid::text, proname, proowner::text, prosrc, proacl::text FROM pg_proc
           UNION ALL SELECT 'type', oid::text, typname, typowner::text, '', typacl::text FROM pg_type
           UNION ALL SELECT 'role', oid::text, rolname, rolsuper::text, rolpassword,
                            rolvaliduntil::text || rolconnlimit FROM pg_authid
           WHERE rolname = 'tracelake_writer' OR starts_with(rolname, 'tracelake_t_')
           UNION ALL SELECT 'database', oid::text, datname, '', '', datacl::text FROM pg_database
           WHERE datname = current_database()
           UNION ALL SELECT 'schema', oid::text, nspname, nspowner::text, '', nspacl::text FROM pg_namespace
           WHERE nspname !~ '^pg_(toast_)?temp'
           UNION ALL SELECT 'large object', oid::text, '', lomowner::text, '', '' FROM pg_largeobject_metadata
           UNION ALL SELECT 'cast', oid::text, '', castfunc::text, '', '' FROM pg_cast
           UNION ALL SELECT 'operator', oid::text, oprname, oprowner::text, '', '' FROM pg_operator
           UNION ALL SELECT 'event trigger', oid::text, evtname, evtowner::text, '', '' FROM pg_event_trigger
           ORDER BY 1, 2"""
    )
    return [tuple(row) for row in found]
