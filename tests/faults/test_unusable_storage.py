"""Storage that can't be used: a clear refusal while it lasts, and nothing to repair afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg

from tests.support.load import Load
from tests.support.processes import DispatcherProcess
from tests.support.site import Databases, open_single_task, open_site


async def test_a_state_database_that_turned_read_only_is_an_outage(
    databases: Databases, tmp_path: Path
) -> None:
    """As after a failover to a standby, or when the server's disk is full and somebody pulled the brake."""
    name = urlsplit(databases.state_dsn).path[1:]
    async with (
        open_site(databases, tmp_path) as site,
        Load(site.replicas, databases.queue_dsn, seed=9) as load,
    ):
        load.begin()
        await load.made_progress(20)
        connection = await asyncpg.connect(databases.queue_dsn)
        try:
            await connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
            await cut_sessions(connection, name)
            before = load.ledger.repeats["StateUnavailable"]
            async with asyncio.timeout(30):
                while load.ledger.repeats["StateUnavailable"] < before + 20:
                    await asyncio.sleep(0.05)
            await connection.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
            await cut_sessions(connection, name)
        finally:
            await connection.close()
        await load.made_progress(20)
        await load.finish()
        await site.verify(load.ledger)


async def cut_sessions(connection: asyncpg.Connection, name: str) -> None:
    await connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name
    )


async def test_keys_that_vanish_stop_nobody_who_has_them(databases: Databases, tmp_path: Path) -> None:
    async with open_site(databases, tmp_path) as site, open_single_task(site.replicas[0]) as task:
        one, other = site.replicas
        keys, away = tmp_path / "keys", tmp_path / "keys-away"
        keys.rename(away)
        claim = await task.claimed(one)
        assert (await task.beat(other, claim)).status_code == 200
        keys.mkdir(mode=0o700)
        assert (await task.claimed(other))["lease_token"] == claim["lease_token"]
        keys.rmdir()
        away.rename(keys)
        assert (await task.complete(other, claim)).status_code == 200


async def test_a_damaged_key_is_named_at_the_start(databases: Databases, tmp_path: Path) -> None:
    late = DispatcherProcess(tmp_path, state_dsn=databases.state_dsn, queue_dsn=databases.queue_dsn)
    (tmp_path / "keys").mkdir(mode=0o700)
    key = tmp_path / "keys" / "key-000000000000.pem"
    key.write_bytes(b"not a key")
    key.chmod(0o600)
    late.launch()
    assert await late.ended(timeout=30) != 0
    assert "key-000000000000.pem" in late.log()
    assert "Traceback" not in late.log()


async def test_files_that_are_not_there_refuse_the_completion_and_nothing_else(
    databases: Databases, tmp_path: Path
) -> None:
    async with (
        open_site(databases, tmp_path, replicas=1) as site,
        open_single_task(site.replicas[0], storage="parquet") as task,
    ):
        [replica] = site.replicas
        claim = await task.claimed(replica)
        answer = await task.complete(replica, claim, row_count=1)
        assert (answer.status_code, answer.json()["reason"]) == (422, "OutputMissing")
        assert (await task.beat(replica, claim)).status_code == 200
        assert (await task.complete(replica, claim, row_count=0)).status_code == 200
