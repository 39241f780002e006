"""A stack's databases as its roles log in to them: each can do one thing, and the owner is nobody's but the
Dispatcher's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self
from urllib.parse import quote, urlsplit, urlunsplit

from tracelake.dev.home import QUEUE_ROLE, Home
from tracelake.hot.install import READER_ROLE, WRITER_ROLE
from tracelake.store.query_roles import AUDIT_ROLE, CATALOG_ROLE
from tracelake.tokens.home_copies import QuerySecrets


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RoleDsns:
    queue: str
    data_write: str
    data_read: str
    catalog: str
    audit: str

    @classmethod
    def of(cls, home: Home, *, state: str, queue: str, data: str) -> Self:
        """By the home's passwords, on the databases at these DSNs, whoever logs in by them."""
        writing, reading, query = home.data_secrets(), home.reading_secrets(), home.query_secrets()
        return cls(
            queue=role_dsn(queue, QUEUE_ROLE, home.secrets().queue_password),
            data_write=role_dsn(data, WRITER_ROLE, writing.writer_password),
            data_read=role_dsn(data, READER_ROLE, reading.reader_password),
            catalog=catalog_dsn(state, query),
            audit=audit_dsn(state, query),
        )

    def for_workers(self) -> dict[str, str]:
        return {
            "TRACELAKE_QUEUE_DSN": self.queue,
            "TRACELAKE_DATA_DSN": self.data_write,
        }

    def for_queries(self) -> dict[str, str]:
        return {
            "TRACELAKE_CATALOG_DSN": self.catalog,
            "TRACELAKE_AUDIT_DSN": self.audit,
            "TRACELAKE_READING_DSN": self.data_read,
        }


def catalog_dsn(state_dsn: str, passwords: QuerySecrets) -> str:
    return role_dsn(state_dsn, CATALOG_ROLE, passwords.catalog_password)


def audit_dsn(state_dsn: str, passwords: QuerySecrets) -> str:
    return role_dsn(state_dsn, AUDIT_ROLE, passwords.audit_password)


def role_dsn(dsn: str, role: str, password: str) -> str:
    """The same server and database, by somebody else."""
    parts = urlsplit(dsn)
    server = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{role}:{quote(password, '')}@{server}"))
