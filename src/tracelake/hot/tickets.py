"""Tickets: a login in the data database for each attempt, and for that attempt alone.

An operator may keep, pass on or spoil any credential that it gets. So it gets a login that no other attempt uses:
one that may fill its own attempt's staging tables and read its own inputs, and is dropped when the attempt ends.
A wrapper that has died no longer renews its tickets, and the next sweep of another wrapper closes them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg

from tracelake.domain.errors import Conflict, Unavailable
from tracelake.hot.commit import HotStore
from tracelake.postgres import scram, sqlfiles
from tracelake.postgres.dsn import with_login
from tracelake.settings import Secret

_SQL = sqlfiles.load("tracelake.hot", "sql/tickets.sql")
_TRIES = 20
_PAUSE_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketHolder:
    """An attempt, with the epoch that it stages under (None if it doesn't stage) and the dataset versions that it
    reads."""

    task_id: UUID
    attempt: int
    epoch: int | None
    reads: tuple[UUID, ...]


@dataclass(frozen=True, slots=True)
class Ticket:
    """``dsn`` opens the data database by the login, and contains ``password``."""

    holder: TicketHolder
    login: str
    password: Secret
    dsn: Secret


class Tickets:
    """In the database of ``store``, by the writer's login. ``address`` is where those who hold a ticket reach the
    database, as ``host:port``, when that isn't where ``store`` does."""

    def __init__(self, store: HotStore, address: str | None = None) -> None:
        self._store = store
        self._address = address

    async def open(self, holder: TicketHolder) -> Ticket:
        """Closes the tickets of the task's earlier attempts and sweeps their staging tables. ``Conflict`` when a
        later attempt has a ticket."""
        # 256 random bits can't be guessed, so the verifier needs no iterations to slow guessing down.
        login, password = f"tracelake_t_{secrets.token_hex(12)}", secrets.token_urlsafe(32)
        dsn = with_login(self._store.dsn.reveal(), login, password, self._address)
        ticket = Ticket(holder, login, Secret(password), Secret(dsn))
        await self._open(ticket)
        return ticket

    async def close(self, ticket: Ticket) -> None:
        """End its sessions and drop its staging tables, except those that are being loaded right now."""
        async with self._store.connection() as connection:
            # The login first: a session that stays could still make tables behind the sweep.
            await _change(connection, _SQL.close, ticket.login)
            await _sweep_tables(connection)

    async def renew(self, tickets: Sequence[Ticket]) -> None:
        """A ticket that was swept because it couldn't be renewed for a while is opened again, without its staged
        rows; that of an attempt that was superseded meanwhile is not."""
        async with self._store.connection() as connection:
            gone = await _change(connection, _SQL.renew, [ticket.login for ticket in tickets])
        for ticket in tickets:
            if ticket.login in gone:
                # A later attempt has the task: this one's login
                # stays closed, and its commit is refused anyway.
                with suppress(Conflict):
                    await self._open(ticket)

    async def sweep(self) -> None:
        """Close tickets of wrappers that are gone and drop leftover staging tables, a limited number per call."""
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


async def _change(connection: Any, statement: str, *arguments: object) -> Any:
    """Tickets are changed one after another, but an install, or a GRANT by hand on the same tables, may still come
    between: then the statement is tried again."""
    left = _TRIES
    while True:
        try:
            return await connection.fetchval(statement, *arguments)
        except asyncpg.InternalServerError as error:
            left -= 1
            # Postgres has no code for a catalogue row that another session changed, only this text.
            if not left or "concurrently" not in str(error):
                raise
        except (asyncpg.InsufficientPrivilegeError, asyncpg.UndefinedFunctionError) as error:
            raise Unavailable(
                "NoTicket",
                f"the data database has no login for the attempt ({error}): run tracelake database install",
            ) from error
        await asyncio.sleep(_PAUSE_SECONDS)


async def _sweep_tables(connection: Any) -> None:
    """Drop tables that can't be committed any more, without waiting for ended sessions that still hold them."""
    for statement in await connection.fetch(_SQL.leftover_staging):
        with suppress(asyncpg.LockNotAvailableError):
            # One per table: a table that is held must not undo the drops before it.
            async with connection.transaction():
                await connection.execute(_SQL.wait_little)
                await connection.execute(statement[0])
