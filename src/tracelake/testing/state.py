"""pytest fixtures on a state database of the test's own: migrated once per run, cloned per test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import asyncpg
import pytest
import pytest_asyncio

from tracelake.dispatcher.runtimes import RuntimeRegistry
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.entropy import Entropy
from tracelake.objects.directory import DirectoryStore
from tracelake.store.db import Database, open_pool
from tracelake.store.jobs import JobCards
from tracelake.store.migrate import migrate
from tracelake.testing.postgres import CloneDatabase
from tracelake.tokens.signing import PemKeyring

ORG = UUID("00000000-0000-4000-8000-000000000001")


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
        cards=JobCards(),
        objects=DirectoryStore(tmp_path / "objects"),
        signer=PemKeyring(tmp_path / "keys"),
        runtimes=RuntimeRegistry(),
        org_id=ORG,
    )
