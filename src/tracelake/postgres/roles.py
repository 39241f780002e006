"""Changes to roles, which all databases of a Postgres cluster share, and the logins that several processes share.

No lock of one database keeps a session of another one away from a role, and Postgres doesn't wait where two
sessions change it: the later one fails. So ``change_roles`` runs a change in one transaction and repeats it after
a lost race. Where the other transaction is still open Postgres does wait, and every role can change its own
password and revoke its own rights: a guest that leaves such a transaction open would hold up its owner for ever.
So ``change_roles`` ends the guest's session that it waits for.

Postgres lets every role change its own password and session settings, and that right can't be revoked. One
process could lock out, or hold up, all others with its login: so the owner compares every few seconds and
restores (``SharedLogins``). A comment on the role, which the role itself can't change, names its installation;
another installation's role is never taken over, unless both were given the same password.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import structlog

from tracelake.domain.backoff import Backoff, spread
from tracelake.domain.errors import Conflict, Unavailable
from tracelake.postgres import scram, sqlfiles
from tracelake.postgres.dsn import with_login
from tracelake.postgres.sessions import while_waiting
from tracelake.settings import Secret

_SQL = sqlfiles.load("tracelake.postgres", "roles.sql")
_LOGINS_SQL = sqlfiles.load("tracelake.postgres", "shared_logins.sql")
_TRIES = 50
_RACE_BACKOFF = Backoff(first=0.05, longest=0.1)
_PATIENCE_SECONDS = 0.2
_CONNECT_SECONDS = 10.0
_MARK = "tracelake installation "

_log = logging.getLogger(__name__)
_logins_log = structlog.get_logger(__name__)


async def change_roles(
    connection: asyncpg.Connection[Any],
    change: Callable[[], Awaitable[None]],
    *,
    dsn: str,
    guests: Sequence[str],
) -> None:
    """Run ``change`` in a transaction of its own; it must give the same result when it is run again. ``dsn`` is
    the connection's own. Sessions of ``guests``, and of attempts, that hold it up are ended; ``Unavailable``
    when another role's session does."""
    races = _RACE_BACKOFF.counter()
    for left in reversed(range(_TRIES)):
        try:
            await while_waiting(
                _changed(connection, change), _Unblocker(connection, dsn, guests).unblock, _PATIENCE_SECONDS
            )
            return
        except asyncpg.LockNotAvailableError:
            raise Unavailable(
                "RolesHeld",
                f"an open transaction of another session holds the roles {', '.join(guests)}, and that "
                "session can't be ended from here: look for it in pg_stat_activity, end it, and try again",
            ) from None
        except (
            asyncpg.InternalServerError,
            asyncpg.UniqueViolationError,
            asyncpg.DuplicateObjectError,
        ) as error:
            if not left or not _is_lost_race(error):
                raise
        # At random, or two that collided would collide again.
        await asyncio.sleep(races.failed(jitter=spread()))


async def _changed(connection: asyncpg.Connection[Any], change: Callable[[], Awaitable[None]]) -> None:
    async with connection.transaction():
        # For sessions that can't be ended from here: an error that names the cause is better than a hang.
        await connection.execute(_SQL.wait_at_most)
        await change()


class _Unblocker:
    """Ends the sessions that a session waits for; by a second one, since the first can't run a query meanwhile."""

    def __init__(self, waiting: asyncpg.Connection[Any], dsn: str, guests: Sequence[str]) -> None:
        self._waiting = waiting
        self._dsn = dsn
        self._guests = list(guests)

    async def unblock(self) -> None:
        try:
            asking: asyncpg.Connection[Any] = await asyncpg.connect(self._dsn, timeout=_CONNECT_SECONDS)
        except (OSError, TimeoutError, asyncpg.PostgresError) as error:
            _log.warning("cannot find blocking sessions: %s", error)
            return
        try:
            ended = await asking.fetch(_SQL.end_blockers, self._waiting.get_server_pid(), self._guests)
        except asyncpg.InsufficientPrivilegeError as error:
            _log.warning("cannot terminate the blocking sessions: %s", error)
            return
        finally:
            await asking.close()
        for row in ended:
            _log.warning("a blocking session of %s was terminated", row["usename"])


async def put_bare_role(
    connection: asyncpg.Connection[Any], role: str, verifier: str, *, needed_by: str, connections: int
) -> None:
    """Make, or renew, a role that can log in with up to ``connections`` sessions and has no other rights.
    ``Conflict`` for an existing role with rights, memberships or property: it has another purpose and is left as
    it is."""
    existing = await connection.fetchrow(_SQL.role, role)
    # Under the retries of change_roles: another session may create the role right after this look.
    if existing is None:
        statement = _SQL.create_role
    elif existing["privileged"] or existing["member"] or existing["owner"]:
        raise Conflict(
            "RoleInUse",
            f"the role {role!r} has rights, memberships or property already: {needed_by} needs one without",
        )
    else:
        statement = _SQL.change_role
    await connection.execute(await connection.fetchval(statement, role, verifier, connections))
    await act_as(connection, role)


async def act_as(connection: asyncpg.Connection[Any], role: str) -> None:
    """Become a member of the role, so as to end its sessions and grant rights on its objects."""
    await connection.execute(await connection.fetchval(_SQL.act_as, role))


async def strip_public(connection: asyncpg.Connection[Any]) -> tuple[str, ...]:
    """Revoke, in this database, the rights that Postgres grants to PUBLIC by default. Returns those that are
    left: only a superuser can revoke them."""
    if await connection.fetchval(_SQL.is_superuser):
        await connection.execute(_SQL.strip_public)
    return tuple(row["what"] for row in await connection.fetch(_SQL.left_to_public))


async def strip_public_or_warn(connection: asyncpg.Connection[Any]) -> None:
    """The same, with a warning in the log about rights that are left."""
    if left := await strip_public(connection):
        _log.warning(
            "every role that can log in to the database %s can use %s: only a superuser can revoke that",
            await connection.fetchval(_SQL.database),
            ", ".join(left),
        )


def _is_lost_race(error: asyncpg.PostgresError) -> bool:
    """Postgres has no error code for a catalogue row that changed under a statement, only a message."""
    return not isinstance(error, asyncpg.InternalServerError) or "concurrently" in str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLogin:
    """``settings`` are the role's settings in its database, as ``name=value``; it has none elsewhere."""

    role: str
    password: Secret
    settings: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLogins:
    """The shared logins of one database, whose ``dsn`` is its owner's. ``install`` makes or renews them; its
    argument has the verifiers of those whose password is right, which stay."""

    dsn: Secret
    installation_id: str
    logins: tuple[SharedLogin, ...]
    install: Callable[[Mapping[str, str]], Awaitable[object]]

    async def take(self, connection: asyncpg.Connection[Any]) -> None:
        """At a start; ``Conflict``, before anything is changed, for another installation's logins."""
        states = {
            login.role: await connection.fetchrow(_LOGINS_SQL.state, login.role) for login in self.logins
        }
        good = await self._good_verifiers(connection)
        for login in self.logins:
            # All are checked before the first is changed, and a login
            # whose password we were given is shared on purpose.
            if self._is_of_another(states[login.role]) and await self._opens(connection, login) is not True:
                raise Conflict(
                    "LoginOfAnotherInstallation",
                    f"the role {login.role!r} of this Postgres serves another installation, whose processes a new "
                    "password would lock out: use a Postgres of your own, or drop the role if that one is gone",
                )
        for login in self.logins:
            # A role can set its own search_path, or a timeout that ends every session of the others.
            if _has_other_settings(states[login.role], login):
                await self._change(connection, _LOGINS_SQL.reset_settings, login.role)
        await self.install(good)
        for login in self.logins:
            if _mark_of(states[login.role]) is None:
                await self._change(connection, _LOGINS_SQL.mark, login.role, f"{_MARK}{self.installation_id}")

    async def restore(self, connection: asyncpg.Connection[Any]) -> None:
        """Undo the changes that a role has made to itself."""
        changed: dict[str, str] = {}
        for login in self.logins:
            state = await connection.fetchrow(_LOGINS_SQL.state, login.role)
            # Another installation's role changes when that one
            # wants; two owners would undo each other for ever.
            if self._is_of_another(state):
                continue
            if state is None:
                why = "the role was gone"
            elif _has_other_settings(state, login):
                why = "its settings were changed"
                await self._change(connection, _LOGINS_SQL.reset_settings, login.role)
            # None isn't False: where pg_hba keeps the role out
            # from here, the password isn't known to be wrong.
            elif await self._opens(connection, login) is False:
                why = "its password was changed"
            else:
                continue
            changed[login.role] = why
        if changed:
            await self.install(await self._good_verifiers(connection))
        for role, why in changed.items():
            _logins_log.warning("a shared login was restored", role=role, why=why)

    async def _change(self, connection: asyncpg.Connection[Any], statement: str, *arguments: str) -> None:
        async def change() -> None:
            await connection.execute(await connection.fetchval(statement, *arguments))

        guests = [login.role for login in self.logins]
        await change_roles(connection, change, dsn=self.dsn.reveal(), guests=guests)

    def _is_of_another(self, state: asyncpg.Record | None) -> bool:
        return _mark_of(state) not in (None, self.installation_id)

    async def _good_verifiers(self, connection: asyncpg.Connection[Any]) -> dict[str, str]:
        if not await connection.fetchval(_LOGINS_SQL.may_read_verifiers):
            return {}
        found = {login: await connection.fetchval(_LOGINS_SQL.verifier, login.role) for login in self.logins}
        return {
            login.role: verifier
            for login, verifier in found.items()
            if scram.matches(login.password.reveal(), verifier)
        }

    async def _opens(self, connection: asyncpg.Connection[Any], login: SharedLogin) -> bool | None:
        """Whether the password is right: by the verifier where it may be read, otherwise by logging in. None
        where the server refuses the role from this address whatever its password is."""
        password = login.password.reveal()
        if await connection.fetchval(_LOGINS_SQL.may_read_verifiers):
            return scram.matches(password, await connection.fetchval(_LOGINS_SQL.verifier, login.role))
        try:
            session: asyncpg.Connection[Any] = await asyncpg.connect(
                with_login(self.dsn.reveal(), login.role, password), timeout=_CONNECT_SECONDS
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
