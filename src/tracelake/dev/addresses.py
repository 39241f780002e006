"""Where the parts of a stack find each other: known before any of them runs, so none has to wait to be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tracelake.dev.home import DATA_DATABASE, QUEUE_DATABASE, STATE_DATABASE, Home
from tracelake.dev.role_dsn import RoleDsns
from tracelake.embedded_postgres import port_dsn, private_dsn
from tracelake.held_port import LOOPBACK, HeldPort
from tracelake.tokens.worker_tokens import first_token


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPorts:
    user: HeldPort
    internal: HeldPort
    query: HeldPort
    state: HeldPort
    data: HeldPort


class Addresses:
    def __init__(self, home: Home, ports: StackPorts) -> None:
        self.ports = ports
        self.user_url = f"http://{LOOPBACK}:{ports.user.number}"
        self.internal_url = f"http://{LOOPBACK}:{ports.internal.number}"
        self.query_url = f"http://{LOOPBACK}:{ports.query.number}"
        self.object_root = str(home.objects)
        self.user_token = home.secrets().user_token
        self.worker_token = first_token(home.worker_tokens)
        self.dsns = RoleDsns.of(
            home,
            state=port_dsn(ports.state.number, STATE_DATABASE),
            queue=port_dsn(ports.state.number, QUEUE_DATABASE),
            data=port_dsn(ports.data.number, DATA_DATABASE),
        )
        self._private = RoleDsns.of(
            home,
            state=_way_in(home.state_cluster, ports.state, STATE_DATABASE),
            queue=_way_in(home.state_cluster, ports.state, QUEUE_DATABASE),
            data=_way_in(home.data_cluster, ports.data, DATA_DATABASE),
        )

    def for_workers(self, rpc_pools: Path | None) -> dict[str, str]:
        return {
            **({} if rpc_pools is None else {"TRACELAKE_RPC_POOLS": str(rpc_pools)}),
            "TRACELAKE_INTERNAL_URL": self.internal_url,
            "TRACELAKE_QUERY_URL": self.query_url,
            "TRACELAKE_WORKER_TOKEN": self.worker_token,
            **self._private.for_workers(),
            "TRACELAKE_DATA_ADDRESS": f"{LOOPBACK}:{self.ports.data.number}",
            "TRACELAKE_OBJECT_ROOT": self.object_root,
        }

    def for_queries(self) -> dict[str, str]:
        return {
            **self._private.for_queries(),
            "TRACELAKE_OBJECT_ROOT": self.object_root,
        }


def _way_in(cluster: Path, port: HeldPort, database: str) -> str:
    """For the parts: past the port, which everybody on the machine can reach."""
    return port_dsn(port.number, database) if port.socket is None else private_dsn(cluster, database)
