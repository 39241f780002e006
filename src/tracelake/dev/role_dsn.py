"""The stack's state database as the Query Service's roles log in to it."""

from __future__ import annotations

from urllib.parse import quote, urlsplit, urlunsplit

from tracelake.dev.home import QuerySecrets
from tracelake.store.query_roles import AUDIT_ROLE, CATALOG_ROLE


def catalog_dsn(state_dsn: str, passwords: QuerySecrets) -> str:
    return role_dsn(state_dsn, CATALOG_ROLE, passwords.catalog_password)


def audit_dsn(state_dsn: str, passwords: QuerySecrets) -> str:
    return role_dsn(state_dsn, AUDIT_ROLE, passwords.audit_password)


def role_dsn(dsn: str, role: str, password: str) -> str:
    """The same server and database, by somebody else."""
    parts = urlsplit(dsn)
    server = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{role}:{quote(password, '')}@{server}"))
