"""The installation: the secrets that all its replicas share, the schema of the state database, and restores.

The state database owns the secrets. The passwords of the shared logins, the worker tokens and the signing keys are
made once, by the first replica (from its settings, from its home, or at random), and read by all others, which
change nothing by joining. A replica's home has copies (``tokens/home_copies.py``). Dispatchers agree with the
database again every few seconds, so that a rotation at one replica reaches all. A home knows its installation by
id, and one of another installation is refused: its tokens would be carried over here. A home without an id, from
before there were any, is accepted if the database knows its first user's token.

After the state database was restored from a backup, ``advance_epochs`` must run before a Dispatcher uses it. Epochs
fence writes to the data database, so none may be drawn twice. The restored sequence is where it was at the backup,
and the number drawn since is unknown, so it is advanced by more than there can have been.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import asyncpg

from tracelake.domain.errors import Conflict, Invalid
from tracelake.postgres import scram, sqlfiles
from tracelake.postgres.migrations import Schema
from tracelake.postgres.sessions import connected
from tracelake.store.db import Transaction
from tracelake.tokens.home_copies import Copies, HomeCopies, Shared, SigningKey, key_digest, token_digest
from tracelake.tokens.opaque_tokens import hash_user_token, new_worker_token
from tracelake.tokens.signing import new_pem

SQL = sqlfiles.load("tracelake.store.sql", "installation.sql")
_SCHEMA = Schema("state", "tracelake.store.migrations")
migrate = _SCHEMA.migrate
migrations = _SCHEMA.migrations
connected_state = partial(connected, unavailable="StateUnavailable", database="the state database")
PASSWORDS = ("queue_password", "catalog_password", "audit_password")
_ID = "installation_id"
T = TypeVar("T")
LEAP = 1_000_000_000
"""More epochs than can have been drawn since a backup; a bigint has room for nine thousand million such leaps."""


def variable(name: str) -> str:
    """The environment variable that sets a shared secret: ``TRACELAKE_QUEUE_PASSWORD``."""
    return f"TRACELAKE_{name.upper()}"


def given_passwords(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name in PASSWORDS if (value := environment.get(variable(name)))}


async def join(
    connection: asyncpg.Connection[Any], home: HomeCopies, given: Mapping[str, str] | None = None
) -> tuple[Shared, bool]:
    """Join the installation of a migrated state database; returns also whether the home's copies differed."""
    copies = home.read()
    async with connection.transaction():
        shared = await agree(Transaction(connection), home, copies, given)
    # After the commit: a home must not keep secrets that were rolled back.
    return shared, home.keep(shared, copies)


async def join_by_dsn(dsn: str, home: HomeCopies, given: Mapping[str, str] | None = None) -> bool:
    """Migrate the database and join; returns whether the home's copies differed."""
    async with connected_state(dsn) as connection:
        await migrate(connection)
        return (await join(connection, home, given))[1]


async def is_installed(dsn: str) -> bool:
    async with connected_state(dsn) as connection:
        return bool(await connection.fetchval(SQL.is_installed))


async def agree(
    tx: Transaction, home: HomeCopies, copies: Copies, given: Mapping[str, str] | None = None
) -> Shared:
    """The installation's secrets, after the home's own additions; the home itself is not changed yet."""
    # Two replicas that start at once must not both make secrets.
    await tx.execute(SQL.lock)
    stored = {row["name"]: row["value"] for row in await tx.fetch(SQL.secrets)}
    await _refuse_other_installation(tx, home, copies, stored)
    chosen = {
        _ID: stored.get(_ID) or (copies.membership.installation_id if copies.membership else str(uuid4())),
        **{name: _password(name, stored, given or {}, copies.passwords) for name in PASSWORDS},
    }
    for name, value in chosen.items():
        if name not in stored:
            await tx.execute(SQL.add_secret, name, value)
    return Shared(
        installation_id=chosen[_ID],
        passwords={name: chosen[name] for name in PASSWORDS},
        worker_tokens=await _agree_on_worker_tokens(tx, copies),
        keys=await _agree_on_keys(tx, copies),
    )


async def rotate_passwords(dsn: str, wanted: Mapping[str, str]) -> None:
    """Change passwords on a person's request. Dispatchers apply them to the logins; users of these need the new
    DSN."""
    # All of them are checked before the first is changed.
    for password in wanted.values():
        scram.verifier(password)
    if not await is_installed(dsn):
        raise Conflict("NotInstalled", "the installation has no passwords yet: start a Dispatcher first")
    async with connected_state(dsn) as connection, connection.transaction():
        await connection.execute(SQL.lock)
        for name, value in wanted.items():
            await connection.execute(SQL.change_secret, name, value)


def new_password() -> str:
    return secrets.token_urlsafe(24)


def merged(
    local: Sequence[T], base: Collection[str] | None, stored: Sequence[T], digest: Callable[[T], str]
) -> list[T]:
    """The installation's values, with those added and without those removed in this home since it last agreed
    (``base``). A home that never agreed contributes only when the installation has none, and missing files of a
    home don't count as removals."""
    if not stored:
        return list(local)
    if base is None or not local:
        return list(stored)
    here = {digest(each) for each in local}
    there = {digest(each) for each in stored}
    removed = set(base) - here
    kept = [each for each in stored if digest(each) not in removed]
    added = [each for each in local if digest(each) not in base and digest(each) not in there]
    # An empty list would lock out every worker, or leave no key to sign by.
    return [*kept, *added] or list(stored)


async def _refuse_other_installation(
    tx: Transaction, home: HomeCopies, copies: Copies, stored: Mapping[str, str]
) -> None:
    if _ID not in stored:
        return
    if copies.membership is not None:
        ours = copies.membership.installation_id == stored[_ID]
    else:
        # A new home has no passwords, so it contradicts none and may join.
        ours = all(stored.get(name) == value for name, value in copies.passwords.items()) or (
            copies.user_token is not None
            and bool(await tx.fetch(SQL.knows_token, hash_user_token(copies.user_token)))
        )
    if not ours:
        raise Conflict(
            "HomeOfAnotherInstallation",
            f"the home {home.folder} belongs to another installation than the state database: "
            "choose an empty folder with --home, or the database that the home was used with",
        )


def _password(
    name: str, stored: Mapping[str, str], given: Mapping[str, str], copied: Mapping[str, str]
) -> str:
    if name not in stored:
        return given.get(name) or copied.get(name) or new_password()
    if name in given and given[name] != stored[name]:
        raise Invalid(
            "SecretDiffers",
            f"{variable(name)} isn't what the installation has: leave it out, or change the installation's with "
            "`tracelake database rotate`",
        )
    return stored[name]


async def _agree_on_worker_tokens(tx: Transaction, copies: Copies) -> tuple[str, ...]:
    stored = [row["token"] for row in await tx.fetch(SQL.worker_tokens)]
    base = copies.membership.worker_tokens if copies.membership else None
    wanted = merged(copies.worker_tokens, base, stored, token_digest) or [new_worker_token()]
    for token in stored:
        if token not in wanted:
            await tx.execute(SQL.remove_worker_token, token)
    for token in wanted:
        if token not in stored:
            await tx.execute(SQL.add_worker_token, token)
    return tuple(wanted)


async def _agree_on_keys(tx: Transaction, copies: Copies) -> tuple[SigningKey, ...]:
    stored = [SigningKey(row["signs_from"], row["pem"]) for row in await tx.fetch(SQL.signing_keys)]
    base = copies.membership.keys if copies.membership else None
    wanted = merged(copies.keys, base, stored, key_digest) or [SigningKey(0, new_pem().decode("ascii"))]
    # Of two keys made for the same second, the installation's stays.
    wanted = list({key.signs_from: key for key in reversed(wanted)}.values())
    for key in stored:
        if key not in wanted:
            await tx.execute(SQL.remove_signing_key, key.signs_from)
    for key in wanted:
        if key not in stored:
            await tx.execute(SQL.add_signing_key, key.signs_from, key.pem)
    return tuple(sorted(wanted, key=lambda key: key.signs_from))


async def advance_epochs(dsn: str) -> int:
    """Move the epoch sequence beyond every epoch that was ever drawn; returns its new position."""
    async with connected_state(dsn) as connection:
        try:
            return int(await connection.fetchval(SQL.advance_epochs, LEAP))
        except asyncpg.UndefinedTableError:
            raise Conflict("NotRestored", "this is no state database: it has no epochs") from None
