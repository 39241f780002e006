"""What holds for the ``pg`` driver beyond the contract: its role, its schema, its plans, its outages."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import pytest

from tests.support.postgres import CloneDatabase
from tracelake.domain.errors import Conflict, Invalid, Unavailable
from tracelake.embedded.postgres import Cluster
from tracelake.postgres import scram, sqlfiles
from tracelake.queue.postgres import FRONT, SESSION, Floors, PostgresQueue
from tracelake.queue.postgres_install import SCHEMA, close_to_public, install, migrate
from tracelake.queue.wakeups import Wakeups

PASSWORD = "correct horse / battery: staple"
QUERIES = sqlfiles.load("tracelake.queue", "sql/messages.sql")
NAMES = [migration.name for migration in SCHEMA.migrations()]
OLD_LEDGER = """CREATE SCHEMA tracelake_queue;
                CREATE TABLE tracelake_queue.schema_version (
                    version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now()
                )"""
OLD_MESSAGE = """INSERT INTO tracelake_queue.messages (enqueued_at, visible_at, queue, body)
                 VALUES (now(), now(), 'work', '{"n": 1}')"""
# Beyond any test's patience, so that neither a fallback poll nor the end of a wait can be what succeeds.
FOREVER = 3600.0
PATIENCE = 30.0


@asynccontextmanager
async def connected(dsn: str, **settings: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(dsn, server_settings=settings)
    try:
        yield connection
    finally:
        await connection.close()


def build(dsn: str) -> None:
    async def migrated() -> None:
        async with connected(dsn) as connection:
            assert await migrate(connection) == NAMES

    asyncio.run(migrated())


@pytest.fixture
def admin_dsn(clone_database: CloneDatabase) -> str:
    return clone_database("queue", build)


@pytest.fixture
def empty_database(clone_database: CloneDatabase) -> str:
    return clone_database("empty", lambda _dsn: None)


@pytest.fixture
async def role(admin_dsn: str) -> AsyncIterator[str]:
    name = f"queue_user_{uuid4().hex[:12]}"
    await install(admin_dsn, role=name, password=PASSWORD)
    yield name
    async with connected(admin_dsn) as admin:
        await admin.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


@asynccontextmanager
async def as_role(dsn: str, role: str, password: str = PASSWORD) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(dsn, user=role, password=password)
    try:
        yield connection
    finally:
        await connection.close()


@pytest.fixture
async def queue(admin_dsn: str) -> AsyncIterator[PostgresQueue]:
    client = await PostgresQueue.open(admin_dsn, fallback_poll_seconds=FOREVER)
    await client.listening()
    yield client
    await client.close()


def database_of(dsn: str) -> str:
    return urlsplit(dsn).path[1:]


class TestRole:
    @pytest.mark.parametrize(
        "statement",
        [
            "CREATE TABLE public.mine (n int)",
            "CREATE TABLE tracelake_queue.mine (n int)",
            "CREATE TEMP TABLE mine (n int)",
            "CREATE SCHEMA mine",
            "CREATE FUNCTION pg_temp.f() RETURNS int LANGUAGE sql RETURN 1",
            "DO $$ BEGIN PERFORM 1; END $$",
            "CREATE DATABASE mine",
            "CREATE ROLE mine",
            "SELECT * FROM pg_authid",
            "SELECT * FROM pg_shadow",
            "SELECT pg_read_file('postgresql.conf')",
            "COPY (SELECT 1) TO PROGRAM 'true'",
            "SELECT lo_create(0)",
            "SELECT lo_from_bytea(0, 'x')",
            "TRUNCATE tracelake_queue.messages",
            "DROP TABLE tracelake_queue.messages",
            "CREATE TRIGGER t BEFORE UPDATE ON tracelake_queue.messages"
            " FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()",
            "ALTER TABLE tracelake_queue.messages DISABLE TRIGGER ALL",
            "INSERT INTO tracelake_queue.schema_migration VALUES (999, 'later.sql', 'x')",
            "SET ROLE pg_read_all_data",
        ],
    )
    async def test_can_do_nothing_but_use_the_queue(self, admin_dsn: str, role: str, statement: str) -> None:
        async with as_role(admin_dsn, role) as connection:
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(statement)

    async def test_is_shown_which_other_databases_it_could_enter_until_they_are_closed(
        self, admin_dsn: str, role: str, empty_database: str
    ) -> None:
        state = database_of(empty_database)
        assert state in await install(admin_dsn, role=role, password=PASSWORD)
        async with as_role(empty_database, role):
            pass
        await close_to_public(admin_dsn, [state])
        assert state not in await install(admin_dsn, role=role, password=PASSWORD)
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="permission denied for database"):
            await asyncpg.connect(empty_database, user=role, password=PASSWORD)

    async def test_nobody_else_enters_the_queue_database(self, admin_dsn: str, role: str) -> None:
        stranger = f"stranger_{uuid4().hex[:12]}"
        async with connected(admin_dsn) as admin:
            await admin.execute(f"CREATE ROLE {stranger} LOGIN PASSWORD 'x'")
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await asyncpg.connect(admin_dsn, user=stranger, password="x")
            await admin.execute(f"DROP ROLE {stranger}")

    async def test_has_the_password_given_last_and_the_server_never_sees_it(
        self, admin_dsn: str, role: str
    ) -> None:
        await install(admin_dsn, role=role, password="another")
        async with as_role(admin_dsn, role, "another") as connection:
            assert await connection.fetchval("SELECT current_user") == role
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(admin_dsn, user=role, password=PASSWORD)
        async with connected(admin_dsn) as admin:
            stored = await admin.fetchval("SELECT rolpassword FROM pg_authid WHERE rolname = $1", role)
        assert stored.startswith("SCRAM-SHA-256$4096:")
        assert "another" not in scram.verifier("another")

    @pytest.mark.parametrize(
        "grant", ["ALTER ROLE {} CREATEDB", "GRANT pg_monitor TO {}", "CREATE SCHEMA mine AUTHORIZATION {}"]
    )
    async def test_that_is_somebodys_already_is_refused(self, admin_dsn: str, role: str, grant: str) -> None:
        async with connected(admin_dsn) as admin:
            await admin.execute(grant.format(role))
        with pytest.raises(Conflict) as refused:
            await install(admin_dsn, role=role, password="stolen")
        assert refused.value.reason == "RoleInUse"
        async with as_role(admin_dsn, role):
            pass

    @pytest.mark.parametrize("password", ["", "päss", "line\nbreak"])
    async def test_with_a_password_that_clients_would_hash_differently_is_refused(
        self, admin_dsn: str, password: str
    ) -> None:
        with pytest.raises(Invalid):
            await install(admin_dsn, role="whoever", password=password)


class TestSchema:
    async def test_a_newer_schema_than_the_code_is_refused_by_driver_and_installer(
        self, admin_dsn: str
    ) -> None:
        async with connected(admin_dsn) as admin:
            await admin.execute("INSERT INTO tracelake_queue.schema_migration VALUES (999, 'later.sql', 'x')")
            with pytest.raises(Conflict) as by_installer:
                await migrate(admin)
        with pytest.raises(Conflict) as by_driver:
            await PostgresQueue.open(admin_dsn)
        assert by_driver.value.reason == by_installer.value.reason == "SchemaTooNew"
        assert "999" in by_driver.value.message

    async def test_a_database_without_the_schema_is_refused(self, empty_database: str) -> None:
        with pytest.raises(Conflict) as refused:
            await PostgresQueue.open(empty_database)
        assert refused.value.reason == "SchemaTooOld"

    async def test_a_wrong_password_is_said_so_and_not_repeated(self, admin_dsn: str) -> None:
        user, _, rest = admin_dsn.removeprefix("postgresql://").partition(":")
        server = rest.partition("@")[2]
        with pytest.raises(Invalid) as refused:
            await PostgresQueue.open(f"postgresql://{user}:not-this-one@{server}")
        assert refused.value.reason == "QueueRefused"
        assert "not-this-one" not in refused.value.message

    async def test_is_applied_once_by_many_at_once(self, empty_database: str) -> None:
        async with AsyncExitStack() as stack:
            connections = [await stack.enter_async_context(connected(empty_database)) for _ in range(5)]
            steps = await asyncio.gather(*(migrate(connection) for connection in connections))
        assert sorted(steps) == [[], [], [], [], NAMES]

    async def test_a_queue_of_the_runner_without_hashes_is_adopted_as_it_is(
        self, empty_database: str
    ) -> None:
        async with connected(empty_database) as admin:
            await admin.execute(OLD_LEDGER)
            for migration in SCHEMA.migrations():
                await admin.execute(migration.sql)
                await admin.execute(
                    "INSERT INTO tracelake_queue.schema_version (version) VALUES ($1)", migration.version
                )
            await admin.execute(OLD_MESSAGE)
            with pytest.raises(Conflict) as before:
                await PostgresQueue.open(empty_database)
            assert before.value.reason == "SchemaTooOld"
            assert [await migrate(admin), await migrate(admin)] == [[], []]
            ledger = await admin.fetch("SELECT version, name, sha256 FROM tracelake_queue.schema_migration")
            assert [tuple(row) for row in ledger] == [
                (migration.version, migration.name, migration.sha256) for migration in SCHEMA.migrations()
            ]
        queue = await PostgresQueue.open(empty_database)
        [message] = await queue.receive("work")
        assert message.body == {"n": 1}
        await queue.close()

    async def test_a_queue_half_way_through_the_runner_without_hashes_gets_the_rest(
        self, empty_database: str
    ) -> None:
        first, *rest = SCHEMA.migrations()
        async with connected(empty_database) as admin:
            await admin.execute(OLD_LEDGER)
            await admin.execute(first.sql)
            await admin.execute("INSERT INTO tracelake_queue.schema_version (version) VALUES (1)")
            assert await migrate(admin) == [migration.name for migration in rest]

    async def test_a_newer_queue_of_the_runner_without_hashes_is_refused(self, empty_database: str) -> None:
        async with connected(empty_database) as admin:
            await admin.execute(OLD_LEDGER)
            await admin.execute(
                "INSERT INTO tracelake_queue.schema_version (version) SELECT generate_series(1, 99)"
            )
            with pytest.raises(Conflict) as refused:
                await migrate(admin)
            assert refused.value.reason == "SchemaTooNew"
            assert await admin.fetchval("SELECT count(*) FROM tracelake_queue.schema_migration") == 0

    async def test_an_installer_of_the_runner_without_hashes_that_is_at_work_gets_to_its_end_first(
        self, empty_database: str
    ) -> None:
        async with connected(empty_database) as old, connected(empty_database) as new:
            await old.execute(OLD_LEDGER)
            await old.execute("BEGIN; LOCK TABLE tracelake_queue.schema_version IN SHARE ROW EXCLUSIVE MODE")
            waiting = asyncio.ensure_future(migrate(new))
            async with asyncio.timeout(PATIENCE):
                while not await old.fetchval(
                    "SELECT cardinality(pg_blocking_pids($1)) > 0", new.get_server_pid()
                ):
                    await asyncio.wait([waiting], timeout=0.01)
            for migration in SCHEMA.migrations():
                await old.execute(migration.sql)
                await old.execute(
                    "INSERT INTO tracelake_queue.schema_version (version) VALUES ($1)", migration.version
                )
            await old.execute("COMMIT")
            assert await waiting == []


async def receive_plan(connection: asyncpg.Connection[Any], queue: str) -> tuple[str, int]:
    """The receive's plan under the driver's own settings, and how many buffers it touched; undone."""
    transaction = connection.transaction()
    await transaction.start()
    rows = await connection.fetch(
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + QUERIES.receive, queue, 10, 60.0, 10, FRONT, None
    )
    await transaction.rollback()
    [plan] = json.loads(rows[0][0])
    top = plan["Plan"]
    return json.dumps(plan), top["Shared Hit Blocks"] + top["Shared Read Blocks"]


class TestPlans:
    async def test_a_receive_reads_only_what_it_takes(self, admin_dsn: str, queue: PostgresQueue) -> None:
        for name in ("busy", "other"):
            for _ in range(20):
                await queue.publish(name, [{"n": n} for n in range(1000)])
        while await queue.receive("busy", max_messages=1000, visibility_seconds=600):
            pass
        await queue.publish("busy", [{"n": n} for n in range(20)])
        async with connected(admin_dsn, **SESSION) as connection:
            await connection.execute("VACUUM tracelake_queue.messages")
            plan, buffers = await receive_plan(connection, "busy")
        assert "messages_due" in plan
        assert "Seq Scan" not in plan
        assert buffers < 200, plan

    async def test_a_held_snapshot_neither_hides_nor_repeats_nor_slows_a_backlog(
        self, admin_dsn: str, queue: PostgresQueue
    ) -> None:
        async with connected(admin_dsn) as holder, holder.transaction(isolation="repeatable_read"):
            assert await holder.fetchval("SELECT count(*) FROM tracelake_queue.messages") == 0
            seen: list[int] = []
            for start in range(0, 10_000, 500):
                await queue.publish("work", [{"n": n} for n in range(start, start + 500)])
                messages = await queue.receive("work", max_messages=500, visibility_seconds=600)
                seen += [message.body["n"] for message in messages]
                assert await queue.ack([message.receipt for message in messages]) == []
            assert seen == list(range(10_000))
            assert await queue.receive("work") == []
            async with connected(admin_dsn, **SESSION) as connection:
                await connection.execute("VACUUM tracelake_queue.messages")
                await queue.publish("work", [{"n": -1}])
                plan, _ = await receive_plan(connection, "work")
            assert "Seq Scan" not in plan
            assert await holder.fetchval("SELECT count(*) FROM tracelake_queue.messages") == 0


class TestSignals:
    async def test_a_receiver_that_was_served_passes_a_second_signal_on(self) -> None:
        wakeups = Wakeups(_never_connects, 0.0)
        with wakeups.waiter("work") as other:
            with wakeups.waiter("work") as served:
                wakeups.wake("work")
                wakeups.wake("work")
                other.signal.clear()
                assert served.signal.is_set()
            assert other.signal.is_set()

    async def test_a_cancelled_receiver_passes_on_what_it_may_have_consumed(self) -> None:
        wakeups = Wakeups(_never_connects, 0.0)
        with wakeups.waiter("work") as other:
            with pytest.raises(asyncio.CancelledError), wakeups.waiter("work"):
                raise asyncio.CancelledError
            assert other.signal.is_set()

    async def test_one_signal_wakes_one_receiver_of_its_queue(self) -> None:
        wakeups = Wakeups(_never_connects, 0.0)
        with (
            wakeups.waiter("work") as first,
            wakeups.waiter("work") as second,
            wakeups.waiter("other") as other,
        ):
            wakeups.wake("work")
            assert [w.signal.is_set() for w in (first, second, other)] == [True, False, False]
            wakeups.wake("work")
            assert [w.signal.is_set() for w in (first, second, other)] == [True, True, False]
            first.signal.clear()
            second.signal.clear()


async def _never_connects() -> asyncpg.Connection[Any]:
    raise ConnectionRefusedError


class TestFloor:
    def test_is_dropped_a_second_after_the_last_look_from_the_front(self) -> None:
        now = [100.0]
        floors = Floors(lambda: now[0])
        early, late = datetime(2030, 1, 1, tzinfo=UTC), datetime(2030, 1, 2, tzinfo=UTC)
        assert floors.of("work") == FRONT
        floors.raise_to("work", early, looked_from=FRONT)
        now[0] += 0.9
        floors.raise_to("work", late, looked_from=early)
        assert floors.of("work") == late
        assert floors.of("other") == FRONT
        now[0] += 0.2
        assert floors.of("work") == FRONT

    def test_is_not_raised_again_by_a_look_that_began_before_it_was_dropped(self) -> None:
        floors = Floors(lambda: 0.0)
        floor = datetime(2030, 1, 1, tzinfo=UTC)
        floors.raise_to("work", floor, looked_from=FRONT)
        floors.drop("work")
        floors.raise_to("work", floor, looked_from=floor)
        assert floors.of("work") == FRONT

    async def test_never_hides_a_message_that_was_committed_late(
        self, admin_dsn: str, queue: PostgresQueue
    ) -> None:
        """Its time is from before the floor, as with a publisher that was stopped in mid-transaction."""
        await queue.publish("work", [{"n": n} for n in range(2)])
        assert len(await queue.receive("work", max_messages=2)) == 2
        async with connected(admin_dsn) as admin:
            await admin.execute(
                "INSERT INTO tracelake_queue.messages (queue, enqueued_at, visible_at, body)"
                " VALUES ('work', now(), now() - interval '1 hour', '{\"n\": 2}')"
            )
        [message] = await queue.receive("work")
        assert message.body == {"n": 2}


async def until_available(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await call()
            except Unavailable:
                await asyncio.sleep(0.02)


async def terminate_everybody(admin_dsn: str) -> int:
    async with connected(admin_dsn) as admin:
        return int(
            await admin.fetchval(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                " WHERE application_name = 'tracelake-queue' AND datname = current_database()"
            )
        )


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A server that a test may break; it writes its log lazily, so that only durable commits are on disk."""
    cluster = Cluster(
        tmp_path / "cluster", name="own", throwaway=True, settings={"wal_writer_delay": "10000ms"}
    )
    cluster.start()
    build(cluster.dsn())
    yield cluster
    cluster.stop(timeout=0.0)


class TestOutages:
    async def test_a_waiting_receiver_survives_the_end_of_its_sessions(
        self, admin_dsn: str, queue: PostgresQueue
    ) -> None:
        waiting = asyncio.create_task(queue.receive("work", wait_seconds=FOREVER))
        assert await queue.receive("work") == []
        assert await terminate_everybody(admin_dsn) >= 2
        other = await PostgresQueue.open(admin_dsn)
        while not await other.depths():
            await until_available(lambda: other.publish("work", [{"n": 1}]))
        await until_available(queue.depths)
        await queue.listening()
        [message] = await asyncio.wait_for(waiting, PATIENCE)
        assert message.body == {"n": 1}
        await other.close()

    async def test_signals_are_heard_again_after_the_listener_was_cut_off(
        self, admin_dsn: str, queue: PostgresQueue
    ) -> None:
        await terminate_everybody(admin_dsn)
        await until_available(queue.depths)
        async with asyncio.timeout(PATIENCE):
            while not await _listens(admin_dsn):
                await asyncio.sleep(0.02)
        other = await PostgresQueue.open(admin_dsn)
        await other.listening()
        waiting = asyncio.create_task(queue.receive("work", wait_seconds=FOREVER))
        await other.publish("work", [{"n": 1}])
        [message] = await asyncio.wait_for(waiting, PATIENCE)
        assert message.body == {"n": 1}
        await other.close()

    async def test_a_restart_within_the_wait_goes_unnoticed_and_loses_nothing(
        self, own_cluster: Cluster
    ) -> None:
        queue = await PostgresQueue.open(own_cluster.dsn(), fallback_poll_seconds=FOREVER)
        await queue.publish("kept", [{"n": 1}])
        waiting = asyncio.create_task(queue.receive("work", wait_seconds=FOREVER))
        assert await queue.receive("work") == []
        await asyncio.to_thread(own_cluster.stop)
        with pytest.raises(Unavailable):
            await queue.publish("work", [{"n": 0}])
        with pytest.raises(Unavailable) as refused:
            await queue.receive("work", wait_seconds=0.1)
        assert refused.value.reason == "QueueUnavailable"
        await asyncio.to_thread(own_cluster.start)
        await until_available(lambda: queue.publish("work", [{"n": 1}]))
        [message] = await asyncio.wait_for(waiting, PATIENCE)
        assert message.body == {"n": 1}
        [kept] = await queue.receive("kept")
        assert kept.body == {"n": 1}
        await queue.close()

    async def test_durable_calls_survive_a_crash_of_the_server(self, own_cluster: Cluster) -> None:
        queue = await PostgresQueue.open(own_cluster.dsn())
        await queue.publish("buffer", [{"n": 1}, {"n": 2}], durable=True)
        [first] = await queue.receive("buffer", max_messages=1, visibility_seconds=0)
        assert await queue.ack([first.receipt], durable=True) == []
        pid = own_cluster.pid
        assert pid is not None
        os.kill(pid, signal.SIGQUIT)
        await asyncio.to_thread(own_cluster.stop, 0.0)
        await asyncio.to_thread(own_cluster.start)
        [left] = await until_available(lambda: queue.receive("buffer"))
        assert left.body == {"n": 2}
        await queue.close()

    async def test_a_receipt_of_a_delivery_that_a_crash_undid_is_stale(self, own_cluster: Cluster) -> None:
        queue = await PostgresQueue.open(own_cluster.dsn())
        await queue.publish("buffer", [{"n": 1}], durable=True)
        [before] = await queue.receive("buffer", visibility_seconds=0)
        pid = own_cluster.pid
        assert pid is not None
        os.kill(pid, signal.SIGQUIT)
        await asyncio.to_thread(own_cluster.stop, 0.0)
        await asyncio.to_thread(own_cluster.start)
        [after] = await until_available(lambda: queue.receive("buffer"))
        assert after.id == before.id
        assert await queue.ack([before.receipt]) == [before.receipt]
        assert await queue.ack([after.receipt]) == []
        await queue.close()

    async def test_opening_without_a_server_is_unavailable(self, own_cluster: Cluster) -> None:
        dsn = own_cluster.dsn()
        await asyncio.to_thread(own_cluster.stop)
        with pytest.raises(Unavailable):
            await PostgresQueue.open(dsn)

    async def test_a_closed_queue_is_unavailable_and_its_receivers_do_not_hang(self, admin_dsn: str) -> None:
        queue = await PostgresQueue.open(admin_dsn, fallback_poll_seconds=FOREVER)
        waiting = asyncio.create_task(queue.receive("work", wait_seconds=FOREVER))
        assert await queue.receive("work") == []
        await queue.close()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(waiting, PATIENCE)
        with pytest.raises(Unavailable):
            await queue.publish("work", [{}])


async def _listens(admin_dsn: str) -> bool:
    async with connected(admin_dsn) as admin:
        return bool(
            await admin.fetchval(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE application_name = 'tracelake-queue' AND datname = current_database()"
                " AND query LIKE 'LISTEN%'"
            )
        )


async def test_the_password_in_a_dsn_shows_in_no_error_and_no_repr(
    admin_dsn: str, queue: PostgresQueue
) -> None:
    wrong = urlunsplit(urlsplit(admin_dsn)._replace(netloc="nobody:hunter2@127.0.0.1:1"))
    with pytest.raises(Unavailable) as refused:
        await PostgresQueue.open(wrong)
    assert "hunter2" not in f"{refused.value!r} {refused.value.message} {queue!r}"
