"""pytest plugin: a state database and a data database per test, migrated once per run and cloned per test.

``data_dsn`` is the administrator's; ``role_dsn(data_dsn, READER_ROLE)`` and so on are the roles'. Roles belong
to the server, which all tests share, so all of them use the same password.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import asyncpg
import pytest
import pytest_asyncio

from tests.support.postgres import CloneDatabase
from tracelake.dispatcher.runtimes import RuntimeRegistry
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.entropy import Entropy
from tracelake.hot.install import install
from tracelake.objects.directory import DirectoryStore
from tracelake.postgres.dsn import with_login
from tracelake.settings import Secret
from tracelake.store.db import Database, open_pool
from tracelake.store.installation import migrate
from tracelake.store.jobs import JobDefinitions
from tracelake.tokens.signing import PemKeyring

ORG = UUID("00000000-0000-4000-8000-000000000001")
PASSWORD = Secret("a-password-of-the-tests")


def build_state_template(dsn: str) -> None:
    """An empty state database: the current schema and the one organisation."""

    async def build() -> None:
        connection = await asyncpg.connect(dsn)
        try:
            await migrate(connection)
            await connection.execute("INSERT INTO org (org_id, name) VALUES ($1, 'default')", ORG)
        finally:
            await connection.close()

    asyncio.run(build())


@pytest.fixture
def state_dsn(clone_database: CloneDatabase) -> str:
    return clone_database("state", build_state_template)


@pytest_asyncio.fixture
async def pool(state_dsn: str) -> AsyncIterator[asyncpg.Pool]:
    pool = await open_pool(state_dsn, min_size=1, max_size=8)
    yield pool
    await pool.close()


@pytest.fixture
def ctx(pool: asyncpg.Pool, tmp_path: Path) -> StepContext:
    """Steps on that database, with keys and objects in the test's own folder."""
    (tmp_path / "objects").mkdir()
    return StepContext(
        db=Database(pool),
        entropy=Entropy(),
        definitions=JobDefinitions(),
        objects=DirectoryStore(tmp_path / "objects"),
        signer=PemKeyring(tmp_path / "keys"),
        runtimes=RuntimeRegistry(),
        org_id=ORG,
    )


def install_data(dsn: str) -> None:
    """Everything that a data database has, in the empty one of ``dsn``."""
    asyncio.run(install(dsn, writer_password=PASSWORD, reader_password=PASSWORD))


def role_dsn(dsn: str, role: str) -> str:
    return with_login(dsn, role, PASSWORD.reveal())


@pytest.fixture
def data_dsn(clone_database: CloneDatabase) -> str:
    dsn = clone_database("data", lambda dsn: None)
    install_data(dsn)
    return dsn
