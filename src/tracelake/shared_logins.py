"""Logins that several processes share: what their role may have changed about itself is noticed and put back.

Postgres lets every role change its own password and its own session settings, and nothing takes that right away.
One that did would lock everybody else out, or hold them up: so the owner compares, every few seconds, and restores.

A role belongs to the whole server. A comment on it, which the role itself can't change, says whose installation it
serves; another one's is never taken over, unless both were given the same password.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg
import structlog

from tracelake import scram, sqlfiles
from tracelake.domain.errors import Conflict
from tracelake.roles import change_roles
from tracelake.secret import Secret

_SQL = sqlfiles.load("tracelake", "shared_logins.sql")
_MARK = "tracelake installation "
_LOGIN_SECONDS = 10.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLogin:
    """``settings`` are what the role has in its database, as ``name=value``; it has none elsewhere."""

    role: str
    password: Secret
    settings: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLogins:
    """Those of one database, whose ``dsn`` is its owner's. ``install`` makes them, or renews them; it is given
    the verifiers of those whose password is as it should be, which stay."""

    dsn: Secret
    installation_id: str
    logins: tuple[SharedLogin, ...]
    install: Callable[[Mapping[str, str]], Awaitable[object]]

    async def take(self, connection: asyncpg.Connection[Any]) -> None:
        """At a start: a stranger's are refused before anything is changed."""
        states = {login.role: await connection.fetchrow(_SQL.state, login.role) for login in self.logins}
        good = await self._good_verifiers(connection)
        for login in self.logins:
            if self._is_strangers(states[login.role]) and await self._opens(connection, login) is not True:
                raise Conflict(
                    "LoginOfAnotherInstallation",
                    f"the role {login.role!r} of this Postgres serves another installation, whose processes a new "
                    "password would lock out: use a Postgres of your own, or drop the role if that one is gone",
                )
        for login in self.logins:
            if _has_other_settings(states[login.role], login):
                await self._change(connection, _SQL.reset_settings, login.role)
        await self.install(good)
        for login in self.logins:
            if _mark_of(states[login.role]) is None:
                await self._change(connection, _SQL.mark, login.role, f"{_MARK}{self.installation_id}")

    async def restore(self, connection: asyncpg.Connection[Any]) -> None:
        """Put back what a role has changed about itself."""
        changed: dict[str, str] = {}
        for login in self.logins:
            state = await connection.fetchrow(_SQL.state, login.role)
            if self._is_strangers(state):
                continue
            if state is None:
                why = "the role was gone"
            elif _has_other_settings(state, login):
                why = "its settings were changed"
                await self._change(connection, _SQL.reset_settings, login.role)
            elif await self._opens(connection, login) is False:
                why = "its password was changed"
            else:
                continue
            changed[login.role] = why
        if changed:
            await self.install(await self._good_verifiers(connection))
        for role, why in changed.items():
            log.warning("a shared login was restored", role=role, why=why)

    async def _change(self, connection: asyncpg.Connection[Any], statement: str, *arguments: str) -> None:
        async def change() -> None:
            await connection.execute(await connection.fetchval(statement, *arguments))

        guests = [login.role for login in self.logins]
        await change_roles(connection, change, dsn=self.dsn.reveal(), guests=guests)

    def _is_strangers(self, state: asyncpg.Record | None) -> bool:
        return _mark_of(state) not in (None, self.installation_id)

    async def _good_verifiers(self, connection: asyncpg.Connection[Any]) -> dict[str, str]:
        if not await connection.fetchval(_SQL.may_read_verifiers):
            return {}
        found = {login: await connection.fetchval(_SQL.verifier, login.role) for login in self.logins}
        return {
            login.role: verifier
            for login, verifier in found.items()
            if scram.matches(login.password.reveal(), verifier)
        }

    async def _opens(self, connection: asyncpg.Connection[Any], login: SharedLogin) -> bool | None:
        """By the verifier where it may be read, and by trying where it may not; None where the server lets the role
        in from other places only, whatever its password."""
        password = login.password.reveal()
        if await connection.fetchval(_SQL.may_read_verifiers):
            return scram.matches(password, await connection.fetchval(_SQL.verifier, login.role))
        parts = urlsplit(self.dsn.reveal())
        server = parts.netloc.rpartition("@")[2]
        netloc = f"{quote(login.role, '')}:{quote(password, '')}@{server}"
        try:
            session: asyncpg.Connection[Any] = await asyncpg.connect(
                urlunsplit(parts._replace(netloc=netloc)), timeout=_LOGIN_SECONDS
            )
        except asyncpg.InvalidPasswordError:
            return False
        except asyncpg.InvalidAuthorizationSpecificationError:
            return None
        await session.close()
        return True


def _mark_of(state: asyncpg.Record | None) -> str | None:
    comment = (state["comment"] if state is not None else None) or ""
    return comment.removeprefix(_MARK) if comment.startswith(_MARK) else None


def _has_other_settings(state: asyncpg.Record | None, login: SharedLogin) -> bool:
    return state is not None and (bool(state["everywhere"]) or set(state["here"]) != login.settings)
