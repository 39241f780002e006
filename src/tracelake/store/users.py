"""The organisation, its users and their tokens.

One organisation per installation, made at first start. Only the hash of a token is stored: the token itself is
shown once, when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID, uuid4

from tracelake.postgres import sqlfiles
from tracelake.store.db import Transaction
from tracelake.tokens.opaque_tokens import hash_user_token

SQL = sqlfiles.load("tracelake.store.sql", "users.sql")

DEFAULT_ORG = "default"


@dataclass(frozen=True, slots=True)
class User:
    user_id: UUID
    org_id: UUID
    name: str


async def ensure_org(tx: Transaction, name: str = DEFAULT_ORG) -> UUID:
    """The installation's organisation; replicas that start together agree on one."""
    await tx.execute(SQL.add_org, uuid4(), name)
    # Read, since another replica may have added it under another id.
    row = await tx.fetchrow(SQL.find_org)
    assert row is not None
    org_id: UUID = row["org_id"]
    return org_id


async def ensure_user(tx: Transaction, org_id: UUID, name: str) -> UUID:
    await tx.execute(SQL.add_user, uuid4(), org_id, name)
    row = await tx.fetchrow(SQL.find_user, org_id, name)
    assert row is not None
    user_id: UUID = row["user_id"]
    return user_id


async def keep_token(tx: Transaction, user_id: UUID, token: str, label: str) -> None:
    """Make a token valid that was made elsewhere, as an installer does; repeating it is harmless."""
    await tx.execute(SQL.add_token, hash_user_token(token), user_id, label)


async def find_token(tx: Transaction, token_hash: bytes) -> User | None:
    row = await tx.fetchrow(SQL.find_token, token_hash)
    return User(row["user_id"], row["org_id"], row["name"]) if row else None


async def revoke_token(tx: Transaction, token: str) -> bool:
    """Returns whether the token was valid until now."""
    return bool(await tx.fetch(SQL.revoke_token, hash_user_token(token)))
