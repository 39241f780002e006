"""Roles belong to a whole cluster: changing them from several databases at once must end in one of the changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import asyncpg
import pytest
import pytest_asyncio

from tests.support.postgres import CloneDatabase
from tracelake.domain.errors import Unavailable
from tracelake.postgres.roles import change_roles


@pytest.fixture
def roles_dsns(clone_database: CloneDatabase) -> list[str]:
    return [clone_database("roles", lambda dsn: None) for _ in range(4)]


@pytest_asyncio.fixture
async def sessions(roles_dsns: list[str]) -> AsyncIterator[list[asyncpg.Connection]]:
    """One in each of four databases of a cluster."""
    opened = [await asyncpg.connect(dsn) for dsn in roles_dsns]
    yield opened
    for session in opened:
        await session.close()


async def test_installs_of_several_databases_at_once_all_get_through(
    sessions: list[asyncpg.Connection], roles_dsns: list[str]
) -> None:
    role = f"race_{uuid4().hex}"

    async def put(session: asyncpg.Connection) -> None:
        exists = await session.fetchval("SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)", role)
        await session.execute(f"{'ALTER' if exists else 'CREATE'} ROLE {role} LOGIN")

    async def many_times(session: asyncpg.Connection) -> None:
        for _ in range(10):
            await change_roles(session, lambda: put(session), dsn=roles_dsns[0], guests=[role])

    try:
        await asyncio.gather(*map(many_times, sessions))
        assert await sessions[0].fetchval("SELECT rolcanlogin FROM pg_roles WHERE rolname = $1", role)
    finally:
        await sessions[0].execute(f"DROP ROLE IF EXISTS {role}")


async def test_a_change_that_is_refused_is_not_tried_again(
    sessions: list[asyncpg.Connection], roles_dsns: list[str]
) -> None:
    tries = 0

    async def refused() -> None:
        nonlocal tries
        tries += 1
        await sessions[0].execute("ALTER ROLE nobody_has_this_name LOGIN")

    with pytest.raises(asyncpg.UndefinedObjectError):
        await change_roles(sessions[0], refused, dsn=roles_dsns[0], guests=[])
    assert tries == 1


async def test_who_is_no_guest_is_waited_for_and_not_for_ever(
    sessions: list[asyncpg.Connection], roles_dsns: list[str]
) -> None:
    role = f"held_{uuid4().hex}"
    await sessions[0].execute(f"CREATE ROLE {role}")
    await sessions[1].execute(f"BEGIN; ALTER ROLE {role} LOGIN")

    async def change() -> None:
        await sessions[0].execute(f"SET LOCAL lock_timeout = '500ms'; ALTER ROLE {role} NOLOGIN")

    try:
        with pytest.raises(Unavailable, match="pg_stat_activity"):
            await change_roles(sessions[0], change, dsn=roles_dsns[0], guests=[role])
    finally:
        await sessions[1].execute("ROLLBACK")
        await sessions[0].execute(f"DROP ROLE {role}")
