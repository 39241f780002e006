"""``tracelake database``: restored databases are safe to use, and one of your own gets its tables and roles."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import asyncpg
import msgspec
import psycopg
import pytest
from typer.testing import CliRunner

from tests.support.databases import PASSWORD, role_dsn
from tests.support.hot_scene import SCOPE, VERSION, Connection, Operators, output_of, rows, stage, writer
from tests.support.postgres import CloneDatabase
from tracelake.cli.main import app
from tracelake.dev.home import DataSecrets, Home, ReadingSecrets
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Conflict
from tracelake.hot.commit import HotStore
from tracelake.hot.install import READER_ROLE, WRITER_ROLE, forget_fences
from tracelake.store.installation import LEAP, advance_epochs


async def test_epochs_go_on_beyond_those_that_a_backup_doesnt_know(state_dsn: str) -> None:
    connection = await asyncpg.connect(state_dsn)
    try:
        lost = await connection.fetchval("SELECT nextval('epoch_seq')") + 1_000
        assert await advance_epochs(state_dsn) > lost
        assert await connection.fetchval("SELECT nextval('epoch_seq')") > LEAP
    finally:
        await connection.close()


async def test_who_began_before_the_restore_commits_nothing_and_keeps_nobody_away(
    hot: HotStore, operator: Operators, admin: Connection, data_dsn: str
) -> None:
    """A fence of the lost past may name a higher revision of an input than the restored state has."""
    before = writer(7, revision=3)
    await hot.begin(before, VERSION, SCOPE)
    staged = output_of(await stage(operator, before, 1, value="of the lost past"))
    after = writer(LEAP, revision=2)
    with pytest.raises(Conflict):
        await hot.begin(after, VERSION, SCOPE)

    assert await forget_fences(data_dsn) == 1
    with pytest.raises(Conflict):
        await hot.commit(before, [staged], SCOPE, [])
    await hot.begin(after, VERSION, BlockRange(0, 9))
    assert await hot.commit(after, [output_of(await stage(operator, after, 2))], SCOPE, []) == [1]
    assert await rows(admin) == [(2, "x")]


async def test_the_wrong_database_is_told_apart(state_dsn: str, data_dsn: str) -> None:
    with pytest.raises(Conflict, match="no state database"):
        await advance_epochs(data_dsn)
    with pytest.raises(Conflict, match="no data database"):
        await forget_fences(state_dsn)


async def test_the_command_does_both(state_dsn: str, data_dsn: str) -> None:
    arguments = ["database", "restored", "--state-dsn", state_dsn, "--data-owner-dsn", data_dsn, "--json"]
    said = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert said.exit_code == 0, said.output
    assert '"fences": 0' in said.output


async def test_the_former_name_of_an_option_goes_on_working(state_dsn: str, data_dsn: str) -> None:
    arguments = ["database", "restored", "--state-dsn", state_dsn, "--data-dsn", data_dsn, "--json"]
    said = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert said.exit_code == 0, said.output


async def test_a_data_database_of_ones_own_is_set_up_and_its_addresses_open_it(
    clone_database: CloneDatabase, tmp_path: Path
) -> None:
    """Roles belong to the server, which all tests share: the home brings the tests' own passwords."""
    dsn, home, shared = clone_database("bare", lambda _: None), Home(tmp_path / "home"), PASSWORD.reveal()
    home.write(home.folder / "data_secrets.json", msgspec.json.encode(DataSecrets(shared)))
    home.write(home.folder / "reading_secrets.json", msgspec.json.encode(ReadingSecrets(shared)))
    addresses = tmp_path / "workers.env"
    arguments = ["database", "install", "--home", str(home.folder), "--env-file", str(addresses)]
    for name in ("state", "queue", "data-owner"):
        arguments += [f"--{name}-dsn", dsn]
    for _ in range(2):
        said = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert said.exit_code == 0, said.output
    assert stat.S_IMODE(addresses.stat().st_mode) == 0o600
    lines = dict(line.split("=", 1) for line in addresses.read_text(encoding="utf-8").splitlines())
    with psycopg.connect(lines["TRACELAKE_DATA_READ_DSN"].strip("'")) as reader:
        assert reader.execute("SELECT current_user").fetchone() == ("tracelake_reader",)


async def test_a_further_home_takes_the_passwords_that_the_data_database_has(
    clone_database: CloneDatabase, tmp_path: Path
) -> None:
    """Installing from another home locks nobody out: the database owns the passwords, and homes have copies."""
    dsn, shared = clone_database("bare", lambda _: None), PASSWORD.reveal()
    first, second = Home(tmp_path / "first"), Home(tmp_path / "second")
    first.keep_data_secrets(shared, shared)
    assert second.data_secrets().writer_password != shared
    for home in (first, second):
        arguments = ["database", "install", "--home", str(home.folder), "--data-owner-dsn", dsn]
        said = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert said.exit_code == 0, said.output
    assert second.data_secrets() == first.data_secrets() == DataSecrets(shared)
    assert second.reading_secrets() == ReadingSecrets(shared)
    for role in (WRITER_ROLE, READER_ROLE):
        with (
            psycopg.connect(role_dsn(dsn, role)) as guest,
            pytest.raises(psycopg.errors.InsufficientPrivilege),
        ):
            guest.execute("SELECT password FROM installation.login")
