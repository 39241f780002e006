"""Where the parts of a stack find each other: known before any of them runs, so none has to wait to be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tracelake.dev.home import DATA_DATABASE, QUEUE_DATABASE, QUEUE_ROLE, STATE_DATABASE, Home
from tracelake.dev.ports import LOOPBACK
from tracelake.dev.role_dsn import audit_dsn, catalog_dsn, role_dsn
from tracelake.hot.install import READER_ROLE, STAGING_ROLE, WRITER_ROLE
from tracelake.tokens.worker_tokens import first_token


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPorts:
    user: int
    internal: int
    query: int
    state: int
    data: int


class Addresses:
    """The DSNs are those of roles that can do one thing each; the databases' owner is no part's business but the
    Dispatcher's."""

    def __init__(self, home: Home, ports: StackPorts) -> None:
        self.ports = ports
        self.user_url = f"http://{LOOPBACK}:{ports.user}"
        self.internal_url = f"http://{LOOPBACK}:{ports.internal}"
        self.query_url = f"http://{LOOPBACK}:{ports.query}"
        self.object_root = str(home.objects)
        self.user_token = home.secrets().user_token
        self.worker_token = first_token(home.worker_tokens)
        state, data = _address(ports.state, STATE_DATABASE), _address(ports.data, DATA_DATABASE)
        writing, reading, query = home.data_secrets(), home.reading_secrets(), home.query_secrets()
        self.queue_dsn = role_dsn(
            _address(ports.state, QUEUE_DATABASE), QUEUE_ROLE, home.secrets().queue_password
        )
        self.data_write_dsn = role_dsn(data, WRITER_ROLE, writing.writer_password)
        self.staging_dsn = role_dsn(data, STAGING_ROLE, writing.staging_password)
        self.data_read_dsn = role_dsn(data, READER_ROLE, reading.reader_password)
        self.catalog_dsn = catalog_dsn(state, query)
        self.audit_dsn = audit_dsn(state, query)

    def for_workers(self, rpc_pools: Path | None) -> dict[str, str]:
        return {
            **({} if rpc_pools is None else {"TRACELAKE_RPC_POOLS": str(rpc_pools)}),
            "TRACELAKE_INTERNAL_URL": self.internal_url,
            "TRACELAKE_QUERY_URL": self.query_url,
            "TRACELAKE_WORKER_TOKEN": self.worker_token,
            "TRACELAKE_QUEUE_DSN": self.queue_dsn,
            "TRACELAKE_DATA_DSN": self.data_write_dsn,
            "TRACELAKE_STAGING_DSN": self.staging_dsn,
            "TRACELAKE_READING_DSN": self.data_read_dsn,
            "TRACELAKE_OBJECT_ROOT": self.object_root,
        }

    def for_queries(self) -> dict[str, str]:
        return {
            "TRACELAKE_CATALOG_DSN": self.catalog_dsn,
            "TRACELAKE_AUDIT_DSN": self.audit_dsn,
            "TRACELAKE_READING_DSN": self.data_read_dsn,
            "TRACELAKE_OBJECT_ROOT": self.object_root,
        }


def _address(port: int, database: str) -> str:
    return f"postgresql://{LOOPBACK}:{port}/{database}?sslmode=disable"
