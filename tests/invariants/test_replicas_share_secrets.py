"""Replicas share their installation's secrets: each joins, leaves and dies without changing them for the others."""

from __future__ import annotations

import asyncio
import json
import shutil
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from tests.support.dev_stack import tracelake
from tests.support.processes import DispatcherProcess
from tests.support.site import Databases, alarms_in
from tracelake.dev.handle import settle
from tracelake.dev.home import Home
from tracelake.dispatcher.loops.keep_installation import queue_password, state_logins
from tracelake.domain.errors import Conflict, Invalid
from tracelake.embedded.postgres import Cluster
from tracelake.postgres.dsn import with_login
from tracelake.postgres.roles import SharedLogins
from tracelake.queue.postgres_install import QUEUE_ROLE, queue_logins
from tracelake.settings import Secret
from tracelake.store.db import Transaction
from tracelake.store.installation import agree, join_by_dsn
from tracelake.store.query_roles import AUDIT_ROLE, CATALOG_ROLE
from tracelake.tokens.home_copies import Shared
from tracelake.tokens.opaque_tokens import new_worker_token

ROLES = (QUEUE_ROLE, CATALOG_ROLE, AUDIT_ROLE)
NOTHING_GIVEN = dict.fromkeys(
    ("TRACELAKE_QUEUE_PASSWORD", "TRACELAKE_CATALOG_PASSWORD", "TRACELAKE_AUDIT_PASSWORD"), ""
)
DAG = """
name: shared
jobs:
  - { name: src, activation: source, runtime: dispatcher, source: { kind: manual }, outputs: 1 }
  - name: work
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{ from: { job: src, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("replicas") / "state", name="replicas", throwaway=True) as running:
        yield running


@pytest.fixture
async def databases(cluster: Cluster) -> AsyncIterator[Databases]:
    """Of an installation that is the only one on its server: roles belong to the whole of it."""
    made = Databases.create(cluster)
    yield made
    admin = await asyncpg.connect(cluster.dsn())
    try:
        for row in await admin.fetch("SELECT datname FROM pg_database WHERE datname ~ '^(state|queue)_'"):
            await admin.execute(f"DROP DATABASE {row['datname']} WITH (FORCE)")
        for role in ROLES:
            await admin.execute(f"DROP ROLE IF EXISTS {role}")
    finally:
        await admin.close()


@asynccontextmanager
async def replicas_on(
    databases: Databases, *homes: Path, together: bool = False
) -> AsyncIterator[list[DispatcherProcess]]:
    made = [
        DispatcherProcess(
            home,
            state_dsn=databases.state_dsn,
            queue_dsn=databases.queue_dsn,
            name=f"replica{number}",
            environment=NOTHING_GIVEN,
        )
        for number, home in enumerate(homes)
    ]
    try:
        if together:
            await asyncio.gather(*(each.start() for each in made))
        else:
            for each in made:
                await each.start()
        yield made
        assert [line for each in made for line in alarms_in(each.log())] == []
    finally:
        for each in made:
            await each.close()


async def verifiers(databases: Databases) -> dict[str, str]:
    connection = await asyncpg.connect(databases.state_dsn)
    try:
        rows = await connection.fetch(
            "SELECT rolname, rolpassword FROM pg_authid WHERE rolname = ANY($1::text[])", list(ROLES)
        )
        return {row["rolname"]: row["rolpassword"] for row in rows}
    finally:
        await connection.close()


def logins(databases: Databases, home: Path) -> dict[str, str]:
    """By what the home says, as its workers and its Query Service would."""
    place = Home(home)
    return {
        QUEUE_ROLE: with_login(databases.queue_dsn, QUEUE_ROLE, place.secrets().queue_password),
        CATALOG_ROLE: with_login(databases.state_dsn, CATALOG_ROLE, place.query_secrets().catalog_password),
        AUDIT_ROLE: with_login(databases.state_dsn, AUDIT_ROLE, place.query_secrets().audit_password),
    }


async def opens(dsn: str) -> bool:
    try:
        connection = await asyncpg.connect(dsn)
    except asyncpg.InvalidPasswordError:
        return False
    await connection.close()
    return True


async def all_open(databases: Databases, home: Path) -> bool:
    return all([await opens(dsn) for dsn in logins(databases, home).values()])


async def eventually(what: str, look: Callable[[], Awaitable[bool]]) -> None:
    try:
        async with asyncio.timeout(60):
            while not await look():
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None


async def jwks(replica: DispatcherProcess) -> list[str]:
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.get(f"{replica.internal_url}/internal/jwks/task")
        return sorted(key["kid"] for key in answer.json()["keys"])


async def knows_worker(replica: DispatcherProcess, token: str) -> bool:
    claim = {"task_id": "00000000-0000-0000-0000-000000000000", "worker_id": "w", "claim_key": "k"}
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(
            f"{replica.internal_url}/internal/task-claim", json=claim, headers={"X-Trace-Worker-Token": token}
        )
        return answer.status_code != 401


async def claimed_at(replica: DispatcherProcess, start: int) -> dict[str, Any]:
    """A task that the replica was asked for and gave away."""
    async with httpx.AsyncClient(base_url=replica.user_url, trust_env=False, timeout=30) as http:
        deployed = await http.post("/v1/dags", content=DAG, headers=replica.user_headers)
        assert deployed.status_code in (200, 201), deployed.text
        scope = {"start": start, "end": start + 9}
        answer = await http.post("/v1/sources/shared/src/trigger", json=scope, headers=replica.user_headers)
        assert answer.status_code == 202, answer.text

        async def queued() -> bool:
            listed = (await http.get("/v1/tasks?status=Queued", headers=replica.user_headers)).json()
            found[:] = [task["task_id"] for task in listed["tasks"]]
            return bool(found)

        found: list[str] = []
        await eventually("the task waits", queued)
        claim = {"task_id": found[0], "worker_id": "w", "claim_key": f"k{start}"}
        answer = await http.post(
            f"{replica.internal_url}/internal/task-claim", json=claim, headers=replica.worker_headers
        )
    claimed: dict[str, Any] = answer.json()
    assert claimed["status"] == "Claimed", claimed
    return claimed


async def finished_at(replica: DispatcherProcess, claimed: dict[str, Any], headers: dict[str, str]) -> None:
    """By the attempt's own token, and by a worker of another home."""
    fence = {name: claimed[name] for name in ("task_id", "attempt", "lease_token")}
    read = claimed["task"]["inputs"][0]
    output = {"output_index": 0, "row_count": 0, "start": read["start"], "end": read["end"]}
    async with httpx.AsyncClient(base_url=replica.internal_url, trust_env=False, timeout=30) as http:
        asked = await http.post(
            "/v1/task/heartbeat",
            json=fence,
            headers={"X-Trace-Task-Capability": claimed["capability_token"]},
        )
        assert asked.status_code == 200, asked.text
        answer = await http.post(
            "/internal/task-complete",
            json={**fence, "status": "Completed", "outputs": [output]},
            headers=headers,
        )
        assert answer.status_code == 200, answer.text


async def test_two_homes_on_one_installation_work_together_through_deaths(
    databases: Databases, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    async with replicas_on(databases, first) as [one]:
        before = await verifiers(databases)
        worker = await asyncpg.connect(logins(databases, first)[QUEUE_ROLE])
        async with replicas_on(databases, second) as [two]:
            assert await verifiers(databases) == before, "who joins changes nothing"
            assert await all_open(databases, first)
            assert await all_open(databases, second)
            assert await jwks(one) == await jwks(two)
            assert one.worker_headers == two.worker_headers
            async with httpx.AsyncClient(trust_env=False) as http:
                for at in (one, two):
                    for whose in (one, two):
                        answer = await http.get(f"{at.user_url}/v1/tasks", headers=whose.user_headers)
                        assert answer.status_code == 200, answer.text

            await finished_at(two, await claimed_at(one, 0), two.worker_headers)
            await finished_at(one, await claimed_at(two, 10), one.worker_headers)

            left = await claimed_at(one, 20)
            await one.kill()
            await finished_at(two, left, two.worker_headers)
            await finished_at(two, await claimed_at(two, 30), two.worker_headers)
            assert await worker.fetchval("SELECT 1") == 1
            assert await all_open(databases, first)
            await one.start()
            assert await verifiers(databases) == before
            await finished_at(one, await claimed_at(two, 40), one.worker_headers)
        assert await all_open(databases, first)
        await worker.close()


async def test_replicas_that_start_together_agree(databases: Databases, tmp_path: Path) -> None:
    homes = [tmp_path / name for name in "abc"]
    async with replicas_on(databases, *homes, together=True) as found:
        assert len({each.worker_headers["X-Trace-Worker-Token"] for each in found}) == 1
        assert len({tuple(await jwks(each)) for each in found}) == 1
        for home in homes:
            assert await all_open(databases, home)


async def test_rotations_at_one_home_reach_the_others(databases: Databases, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    async with replicas_on(databases, first, second) as [one, two]:
        old_keys = await jwks(one)
        rotated = await asyncio.to_thread(tracelake, "keys", "rotate", "--home", first, "--json")
        new = json.loads(rotated.stdout)["kid"]

        async def published() -> bool:
            return await jwks(two) == sorted([*old_keys, new]) == await jwks(one)

        await eventually("the new key is published by both", published)

        file, old = first / "worker_tokens", one.worker_headers["X-Trace-Worker-Token"]
        added = new_worker_token()
        file.write_text(f"# moved\n{file.read_text()}{added}\n")
        await eventually("the new token is good at both", lambda: knows_worker(two, added))
        assert await knows_worker(two, old)
        other = second / "worker_tokens"
        other.write_text(f"{added}\n")

        async def revoked() -> bool:
            return not await knows_worker(one, old) and not await knows_worker(two, old)

        await eventually("the old token is good at none", revoked)
        assert await knows_worker(one, added)
        assert file.read_text().startswith("# moved\n"), "comments are the user's own"

        await one.kill()
        newest = new_worker_token()
        file.write_text(f"{newest}\n")
        await one.start()
        assert not await knows_worker(one, added), "what was removed while nobody looked stays removed"

        async def carried_over() -> bool:
            return not await knows_worker(two, added) and await knows_worker(two, newest)

        await eventually("the other replica follows", carried_over)


CHANGES = (
    "ALTER ROLE {role} PASSWORD 'mine'",
    "ALTER ROLE {role} PASSWORD NULL",
    "ALTER ROLE {role} SET statement_timeout = 1",
    "ALTER ROLE {role} SET search_path = nowhere",
    "ALTER ROLE {role} IN DATABASE {database} SET default_transaction_read_only = on",
    "ALTER ROLE {role} IN DATABASE {database} RESET ALL",
)


async def test_a_login_that_changed_itself_locks_nobody_out(databases: Databases, tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with replicas_on(databases, home) as [replica]:
        before = {role: await settings_of(databases, role) for role in ROLES}
        for change in CHANGES:
            for role, dsn in logins(databases, home).items():
                login = await asyncpg.connect(dsn)
                await login.execute("SET default_transaction_read_only = off")
                database = await login.fetchval("SELECT current_database()")
                await login.execute(change.format(role=role, database=database))
                await login.close()

            async def restored() -> bool:
                after = {role: await settings_of(databases, role) for role in ROLES}
                return after == before and await all_open(databases, home)

            await eventually(f"restored after {change}", restored)
        assert "a shared login was restored" in replica.log()


async def settings_of(databases: Databases, role: str) -> list[tuple[Any, ...]]:
    connection = await asyncpg.connect(databases.state_dsn)
    try:
        rows = await connection.fetch(
            "SELECT setdatabase, setconfig FROM pg_db_role_setting WHERE setrole = $1::regrole ORDER BY 1",
            role,
        )
        return [(row["setdatabase"], sorted(row["setconfig"])) for row in rows]
    finally:
        await connection.close()


async def test_the_rotated_passwords_of_logins_reach_every_home(databases: Databases, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    async with replicas_on(databases, first, second):
        before = logins(databases, first)
        said = await asyncio.to_thread(
            tracelake, "database", "rotate", "queue", TRACELAKE_STATE_DSN=databases.state_dsn
        )
        assert said.returncode == 0, said.stderr

        async def rotated() -> bool:
            after = [logins(databases, home) for home in (first, second)]
            return (
                after[0] == after[1]
                and after[0][QUEUE_ROLE] != before[QUEUE_ROLE]
                and not await opens(before[QUEUE_ROLE])
                and await all_open(databases, first)
            )

        await eventually("the new password is everywhere", rotated)
        assert logins(databases, first)[CATALOG_ROLE] == before[CATALOG_ROLE]


async def join(databases: Databases, home: Path, **given: str) -> bool:
    """What a Dispatcher does first; whether the home had something else."""
    return await join_by_dsn(databases.state_dsn, Home(home).copies, given)


async def test_a_password_that_differs_from_the_installations_is_refused_and_changes_nothing(
    databases: Databases, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    await join(databases, first, catalog_password="given-once")
    before = Home(first).copies.read()
    assert before.passwords["catalog_password"] == "given-once"
    with pytest.raises(Invalid, match="TRACELAKE_CATALOG_PASSWORD isn't what the installation has"):
        await join(databases, second, catalog_password="another")
    assert list(second.iterdir()) == []
    assert not await join(databases, first)
    assert Home(first).copies.read() == before
    await join(databases, second, catalog_password="given-once")
    assert Home(second).copies.read().passwords == before.passwords


async def test_a_home_of_another_installation_is_refused(
    databases: Databases, cluster: Cluster, tmp_path: Path
) -> None:
    ours, theirs, older = (tmp_path / name for name in ("ours", "theirs", "older"))
    await join(databases, ours)
    before = Home(ours).copies.read()
    await join(Databases.create(cluster), theirs)
    # One from before homes knew their installation: nobody here knows its first user's token.
    Home(older).secrets()
    for home in (theirs, older):
        kept = Home(home).copies.read()
        with pytest.raises(Conflict, match="belongs to another installation") as refused:
            await join(databases, home)
        assert refused.value.reason == "HomeOfAnotherInstallation"
        assert Home(home).copies.read() == kept
    assert not await join(databases, ours)
    assert Home(ours).copies.read() == before


async def test_an_installation_from_before_keeps_its_secrets(databases: Databases, tmp_path: Path) -> None:
    """Its home has them, its database has none."""
    home, second = Home(tmp_path / "first"), Home(tmp_path / "second")
    secrets, query = home.secrets(), home.query_secrets()
    tokens = home.worker_tokens.read_text()
    assert not await join(databases, home.folder)
    assert (home.secrets(), home.query_secrets()) == (secrets, query)
    assert home.worker_tokens.read_text() == tokens
    await join(databases, second.folder)
    mine, theirs = home.copies.read(), second.copies.read()
    assert (mine.passwords, mine.worker_tokens, mine.keys) == (
        theirs.passwords,
        theirs.worker_tokens,
        theirs.keys,
    )
    assert mine.user_token != theirs.user_token


async def test_copies_that_were_lost_come_back_and_replace_nothing(
    databases: Databases, tmp_path: Path
) -> None:
    home = Home(tmp_path / "home")
    await join(databases, home.folder)
    before = home.copies.read()
    for name in ("secrets.json", "query_secrets.json", "worker_tokens"):
        (home.folder / name).unlink()
    shutil.rmtree(home.keys)
    # What `tracelake dev` does before its database is up.
    home.secrets(), home.query_secrets()
    assert home.worker_tokens.read_text()
    assert await join(databases, home.folder), "whoever was told the made-up ones must be told again"
    after = home.copies.read()
    assert (after.passwords, after.worker_tokens, after.keys) == (
        before.passwords,
        before.worker_tokens,
        before.keys,
    )


async def test_another_installation_on_the_same_server_does_not_lock_the_first_one_out(
    databases: Databases, cluster: Cluster, tmp_path: Path
) -> None:
    async def take(of: Databases, home: Path, **given: str) -> None:
        await join_by_dsn(of.state_dsn, Home(home).copies, given)
        state, queue = await asyncpg.connect(of.state_dsn), await asyncpg.connect(of.queue_dsn)
        try:
            async with state.transaction():
                shared = await agree(Transaction(state), Home(home).copies, Home(home).copies.read())
            await state_logins(Secret(of.state_dsn), shared, state).take(state)
            await queue_login(of, shared).take(queue)
        finally:
            await state.close()
            await queue.close()

    await take(databases, tmp_path / "first")
    before = await verifiers(databases)
    others = Databases.create(cluster)
    with pytest.raises(Conflict, match="serves another installation"):
        await take(others, tmp_path / "other")
    assert await verifiers(databases) == before
    assert await all_open(databases, tmp_path / "first")
    # Two that were given the same passwords don't disturb each other.
    await take(
        Databases.create(cluster), tmp_path / "third", **Home(tmp_path / "first").copies.read().passwords
    )
    assert await verifiers(databases) == before


def queue_login(of: Databases, shared: Shared) -> SharedLogins:
    return queue_logins(
        Secret(of.queue_dsn), installation_id=shared.installation_id, password=queue_password(shared)
    )


@asynccontextmanager
async def taken(databases: Databases, folder: Path) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """The roles are in place, as after a Dispatcher's start; what is given restores them once."""
    home = Home(folder)
    await join_by_dsn(databases.state_dsn, home.copies, {})
    state, queue = await asyncpg.connect(databases.state_dsn), await asyncpg.connect(databases.queue_dsn)
    try:
        async with state.transaction():
            shared = await agree(Transaction(state), home.copies, home.copies.read())
        kept = (
            (state, state_logins(Secret(databases.state_dsn), shared, state)),
            (queue, queue_login(databases, shared)),
        )
        for connection, logins_of in kept:
            await logins_of.take(connection)

        async def restore() -> None:
            for connection, logins_of in kept:
                await logins_of.restore(connection)

        yield restore
    finally:
        await state.close()
        await queue.close()


async def test_a_login_that_holds_its_own_role_is_restored_all_the_same(
    databases: Databases, tmp_path: Path
) -> None:
    async with taken(databases, tmp_path) as restore:
        held: list[asyncpg.Connection[Any]] = []
        for role, dsn in logins(databases, tmp_path).items():
            first, second = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
            held += [first, second]
            for session in (first, second):
                await session.execute(
                    "SET default_transaction_read_only = off; SET idle_in_transaction_session_timeout = 0"
                )
            # Which makes it no owner of anything.
            await first.execute("ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO PUBLIC")
            await first.execute(f"ALTER ROLE {role} PASSWORD 'mine'")
            await second.execute(f"BEGIN; ALTER ROLE {role} PASSWORD 'mine too'")
        assert not await all_open(databases, tmp_path)
        async with asyncio.timeout(10):
            await restore()
        assert await all_open(databases, tmp_path)
        for session in held:
            session.terminate()


NOT_FOR_GUESTS = (
    "SELECT pg_advisory_lock(8600143)",
    "SELECT pg_try_advisory_xact_lock_shared(1)",
    "DO $$ BEGIN PERFORM 1; END $$",
    "SELECT pg_logical_emit_message(false, 'x', 'y')",
    "SELECT lo_create(0)",
    "CREATE TEMP TABLE x (y int)",
    "CREATE FUNCTION pg_temp.f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "LOCK TABLE public.deploy_lock IN ACCESS SHARE MODE",
    "LOCK TABLE public.schema_migration IN ACCESS SHARE MODE",
    "LOCK TABLE installation.secret IN ACCESS SHARE MODE",
    "LOCK TABLE tracelake_queue.schema_migration IN SHARE ROW EXCLUSIVE MODE",
    "LOCK TABLE tracelake_queue.schema_migration IN ROW SHARE MODE",
)


async def test_guests_take_no_lock_that_the_platform_waits_for_and_run_no_code(
    databases: Databases, tmp_path: Path
) -> None:
    async with taken(databases, tmp_path) as restore:
        before = await rights(databases)
        for role, dsn in logins(databases, tmp_path).items():
            connection = await asyncpg.connect(dsn)
            await connection.execute("SET default_transaction_read_only = off")
            for statement in NOT_FOR_GUESTS:
                assert await is_refused(connection, statement), f"{role}: {statement}"
            # What a login may give up isn't what it needs.
            await connection.execute(f"DROP OWNED BY {role}")
            await connection.close()
        assert await rights(databases) == before
        admin = await asyncpg.connect(databases.state_dsn)
        limits = await admin.fetch(
            "SELECT rolname, rolconnlimit FROM pg_roles WHERE rolname = ANY($1::text[])", list(ROLES)
        )
        await admin.close()
        assert {row["rolname"]: row["rolconnlimit"] for row in limits} == {
            QUEUE_ROLE: 120, CATALOG_ROLE: 60, AUDIT_ROLE: 60,
        }  # fmt: skip
        await restore()


async def is_refused(connection: asyncpg.Connection[Any], statement: str) -> bool:
    """As a thing that the role may not do, or doesn't see."""
    await connection.execute("BEGIN")
    try:
        await connection.execute(statement)
    except (
        asyncpg.InsufficientPrivilegeError,
        asyncpg.UndefinedTableError,
        asyncpg.InvalidSchemaNameError,
    ):
        return True
    finally:
        await connection.execute("ROLLBACK")
    return False


async def rights(databases: Databases) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for dsn in (databases.state_dsn, databases.queue_dsn):
        admin = await asyncpg.connect(dsn)
        rows = await admin.fetch(
            """SELECT relname::text, relacl::text FROM pg_class WHERE relacl::text ~ 'tracelake_'
               UNION SELECT nspname, nspacl::text FROM pg_namespace
               UNION SELECT datname, datacl::text FROM pg_database ORDER BY 1"""
        )
        found += [tuple(row) for row in rows]
        await admin.close()
    return found


async def test_an_owner_who_may_not_read_verifiers_notices_by_logging_in(
    databases: Databases, cluster: Cluster, tmp_path: Path
) -> None:
    """As on a managed Postgres, where the owner may make roles and isn't a superuser."""
    name = databases.state_dsn.rpartition("/")[2].partition("?")[0]
    admin = await asyncpg.connect(databases.state_dsn)
    await admin.execute("CREATE ROLE owner LOGIN CREATEROLE PASSWORD 'owner'")
    await admin.execute(f"ALTER DATABASE {name} OWNER TO owner; ALTER SCHEMA public OWNER TO owner")
    dsn, home = with_login(databases.state_dsn, "owner", "owner"), Home(tmp_path / "home")
    await join_by_dsn(dsn, home.copies)
    owner = await asyncpg.connect(dsn)
    try:
        async with owner.transaction():
            shared = await agree(Transaction(owner), home.copies, home.copies.read())
        kept = state_logins(Secret(dsn), shared, owner)
        await kept.take(owner)
        catalog = with_login(dsn, CATALOG_ROLE, shared.passwords["catalog_password"])
        before = await verifiers(databases)
        await kept.restore(owner)
        assert await verifiers(databases) == before, "nothing was changed, so nothing is restored"
        login = await asyncpg.connect(catalog)
        await login.execute("SET default_transaction_read_only = off")
        await login.execute(f"ALTER ROLE {CATALOG_ROLE} PASSWORD 'mine'")
        await login.close()
        assert not await opens(catalog)
        await kept.restore(owner)
        assert await opens(catalog)
    finally:
        await owner.close()
        await admin.execute("REASSIGN OWNED BY owner TO postgres; DROP OWNED BY owner")
        for role in (CATALOG_ROLE, AUDIT_ROLE):
            await admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
        await admin.execute("DROP ROLE owner")
        await admin.close()


# A Dispatcher as far as its address in the home is concerned: told to, it looks, and ends.
ADDRESS = """
import os, sys
from pathlib import Path
from tracelake.dev.handle import DispatcherFiles, settle
from tracelake.dev.handle import DispatcherHandle
home = Path(sys.argv[1])
files = DispatcherFiles(home)
files.publish(DispatcherHandle("http://user", "http://internal", "token", "token", os.getpid()))
print("ready", flush=True)
for line in sys.stdin:
    settle(home)
    print("looked", flush=True)
files.withdraw()
"""


class Published:
    def __init__(self, home: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ADDRESS, str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        self.heard()

    def heard(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline()

    def look(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("look\n")
        self.process.stdin.flush()
        self.heard()

    def stop(self) -> None:
        self.process.communicate(timeout=60)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


def test_a_homes_address_is_that_of_a_dispatcher_that_lives(tmp_path: Path) -> None:
    file = tmp_path / "dispatcher.json"

    def named() -> int:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        return int(json.loads(file.read_bytes())["pid"])

    one, two = Published(tmp_path), Published(tmp_path)
    assert named() == one.pid, "the first one's address stays"
    two.stop()
    assert named() == one.pid, "whoever leaves takes only their own"
    two = Published(tmp_path)
    one.stop()
    assert named() == two.pid, "the one that stays takes over"
    one = Published(tmp_path)
    one.kill()
    two.look()
    assert named() == two.pid
    one = Published(tmp_path)
    two.kill()
    one.look()
    assert named() == one.pid, "a killed one's address doesn't stay"
    one.stop()
    assert not file.exists()
    one = Published(tmp_path)
    one.kill()
    settle(tmp_path)
    assert not file.exists()
    assert list((tmp_path / "dispatchers").iterdir()) == []
