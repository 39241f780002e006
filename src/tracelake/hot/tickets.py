"""Tickets: a login in the data database for each attempt, and for that one alone.

What an operator is handed it may keep, give away or spoil. So it is handed a login that nobody else uses: one
that may fill its own attempt's staging tables and read its own inputs, and is gone when the attempt is over. The
tickets of a wrapper that has died aren't renewed any more, and whoever comes next closes them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit
from uuid import UUID

import asyncpg

from tracelake import scram, sqlfiles
from tracelake.domain.errors import Conflict, Unavailable
from tracelake.hot.commit import HotStore
from tracelake.secret import Secret

_SQL = sqlfiles.load("tracelake.hot", "sql/tickets.sql")
_TRIES = 20
_PAUSE_SECONDS = 0.05
_OF_A_LOGIN = ("user", "password", "passfile")
_OF_AN_ADDRESS = ("host", "hostaddr", "port")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who gets a ticket: an attempt, with the epoch that it stages under, if it does, and the dataset versions that
    it reads."""

    task_id: UUID
    attempt: int
    epoch: int | None
    reads: tuple[UUID, ...]


@dataclass(frozen=True, slots=True)
class Ticket:
    """``dsn`` opens the data database by the login; ``password`` is what nobody else should read of it."""

    holder: Holder
    login: str
    password: Secret
    dsn: Secret


class Tickets:
    """In the database of ``store``, by the writer's login. ``address`` is where those who hold a ticket reach the
    database, as ``host:port``, when that isn't where ``store`` does."""

    def __init__(self, store: HotStore, address: str | None = None) -> None:
        self._store = store
        self._address = address

    async def open(self, holder: Holder) -> Ticket:
        """Tickets of the task's earlier attempts are closed by it, and what those staged is swept. ``Conflict``
        when a later one has a ticket."""
        # 256 random bits: nobody guesses them, however fast.
        login, password = f"tracelake_t_{secrets.token_hex(12)}", secrets.token_urlsafe(32)
        dsn = login_dsn(self._store.dsn.reveal(), login, password, self._address)
        ticket = Ticket(holder, login, Secret(password), Secret(dsn))
        await self._open(ticket)
        return ticket

    async def close(self, ticket: Ticket) -> None:
        """Its sessions end, and its staging tables are gone, if nobody is in the middle of a load."""
        async with self._store.connection() as connection:
            await _change(connection, _SQL.close, ticket.login)
            await _sweep_tables(connection)

    async def renew(self, tickets: Sequence[Ticket]) -> None:
        """One that was swept, since nobody could renew it for a while, is opened again; what was staged by it is
        gone. Not so that of an attempt which has been superseded meanwhile."""
        async with self._store.connection() as connection:
            gone = await _change(connection, _SQL.renew, [ticket.login for ticket in tickets])
        for ticket in tickets:
            if ticket.login in gone:
                with suppress(Conflict):
                    await self._open(ticket)

    async def sweep(self) -> None:
        """What wrappers that are gone have left: some of it, if that is much."""
        async with self._store.connection() as connection:
            await _change(connection, _SQL.sweep)
            await _sweep_tables(connection)

    async def _open(self, ticket: Ticket) -> None:
        verifier = scram.verifier(ticket.password.reveal(), iterations=1)
        holder = ticket.holder
        arguments = (verifier, holder.task_id, holder.attempt, holder.epoch, list(holder.reads))
        async with self._store.connection() as connection:
            await _change(connection, _SQL.open, ticket.login, *arguments)
            await _sweep_tables(connection)


def login_dsn(dsn: str, login: str, password: str, address: str | None = None) -> str:
    """The same server and database by this login, which needs no quoting; nothing of the former one's is left."""
    parts = urlsplit(dsn)
    dropped = _OF_A_LOGIN if address is None else (*_OF_A_LOGIN, *_OF_AN_ADDRESS)
    kept = [(key, value) for key, value in parse_qsl(parts.query) if key not in dropped]
    if address is not None and "sslmode" not in dict(kept):
        kept.append(("sslmode", "disable"))
    server = address or parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{login}:{password}@{server}", query=urlencode(kept)))


async def _change(connection: Any, statement: str, *arguments: object) -> Any:
    """Tickets are changed one after another. Somebody who changes the rights on the same tables by hand, or by an
    install, may still come between: then it is tried again."""
    left = _TRIES
    while True:
        try:
            return await connection.fetchval(statement, *arguments)
        except asyncpg.InternalServerError as error:
            left -= 1
            if not left or "concurrently" not in str(error):
                raise
        except (asyncpg.InsufficientPrivilegeError, asyncpg.UndefinedFunctionError) as error:
            raise Unavailable(
                "NoTicket",
                f"the data database has no login for the attempt ({error}): run tracelake database install",
            ) from error
        await asyncio.sleep(_PAUSE_SECONDS)


async def _sweep_tables(connection: Any) -> None:
    """Tables that nobody can commit. A session that was ended may be on its way out: nobody waits for that."""
    for statement in await connection.fetch(_SQL.leftover_staging):
        with suppress(asyncpg.LockNotAvailableError):
            async with connection.transaction():
                await connection.execute(_SQL.wait_little)
                await connection.execute(statement[0])
