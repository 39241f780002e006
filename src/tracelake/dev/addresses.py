"""Where the parts of a stack find each other: known before any of them runs, so none has to wait to be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tracelake.dev.home import DATA_DATABASE, QUEUE_DATABASE, STATE_DATABASE, Home
from tracelake.dev.ports import LOOPBACK
from tracelake.dev.role_dsn import RoleDsns
from tracelake.tokens.worker_tokens import first_token


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPorts:
    user: int
    internal: int
    query: int
    state: int
    data: int


class Addresses:
    def __init__(self, home: Home, ports: StackPorts) -> None:
        self.ports = ports
        self.user_url = f"http://{LOOPBACK}:{ports.user}"
        self.internal_url = f"http://{LOOPBACK}:{ports.internal}"
        self.query_url = f"http://{LOOPBACK}:{ports.query}"
        self.object_root = str(home.objects)
        self.user_token = home.secrets().user_token
        self.worker_token = first_token(home.worker_tokens)
        self.dsns = RoleDsns.of(
            home,
            state=_address(ports.state, STATE_DATABASE),
            queue=_address(ports.state, QUEUE_DATABASE),
            data=_address(ports.data, DATA_DATABASE),
        )

    def for_workers(self, rpc_pools: Path | None) -> dict[str, str]:
        return {
            **({} if rpc_pools is None else {"TRACELAKE_RPC_POOLS": str(rpc_pools)}),
            "TRACELAKE_INTERNAL_URL": self.internal_url,
            "TRACELAKE_QUERY_URL": self.query_url,
            "TRACELAKE_WORKER_TOKEN": self.worker_token,
            **self.dsns.for_workers(),
            "TRACELAKE_OBJECT_ROOT": self.object_root,
        }

    def for_queries(self) -> dict[str, str]:
        return {
            **self.dsns.for_queries(),
            "TRACELAKE_OBJECT_ROOT": self.object_root,
        }


def _address(port: int, database: str) -> str:
    return f"postgresql://{LOOPBACK}:{port}/{database}?sslmode=disable"
