"""The server's configuration files, written anew at every start.

They're the only place for settings (``ALTER SYSTEM`` is off), so what a cluster runs with is what this
module says: durable, on a loopback port or on a unix socket in its data folder, and no access without a SCRAM
password. Sized for a laptop with two cores.
"""

from __future__ import annotations

from collections.abc import Mapping

LOOPBACK = "127.0.0.1"

HBA = f"""\
# Written by Tracelake at every start.
host all all {LOOPBACK}/32 scram-sha-256
local all all scram-sha-256
"""

SOCKET_PORT = 5432
"""A unix socket's name has a port in it, whatever folder it is in."""

_ON_A_PORT = {"listen_addresses": LOOPBACK, "unix_socket_directories": ""}
# The server stands in its data folder, which only its own account may enter.
_ON_A_SOCKET = {"listen_addresses": "", "unix_socket_directories": ".", "unix_socket_permissions": "0700"}
_FIXED = {
    "password_encryption": "scram-sha-256",
    "allow_alter_system": "off",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "log_destination": "stderr",
    "logging_collector": "off",
}

_DEFAULTS = {
    # The port relay takes most of them, and never the last: see ``port_relay.CONNECTIONS``.
    "max_connections": "240",
    # Whoever connects and says nothing is turned out soon.
    "authentication_timeout": "10s",
    # One attempt's locks on its own staging tables leave room for everybody else's.
    "max_locks_per_transaction": "256",
    "reserved_connections": "8",
    "shared_buffers": "128MB",
    "min_wal_size": "128MB",
    "max_wal_size": "1GB",
    "checkpoint_timeout": "10min",
    "random_page_cost": "1.1",
    "io_method": "sync",
    "jit": "off",
    "deadlock_timeout": "200ms",
    "autovacuum_naptime": "10s",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] %q%u@%d ",
    "log_checkpoints": "off",
    # A statement is as long as its sender likes. What was wrong with it is said without it.
    "log_min_error_statement": "panic",
    "log_parameter_max_length": "0",
    "log_parameter_max_length_on_error": "0",
}

# A throwaway cluster may lose everything in a power cut. Commits still wait for the (unsynced) write, so
# that what a test sees after a crash of the server alone is what production would show.
_THROWAWAY = {"fsync": "off", "full_page_writes": "off"}


def overrides(extra: Mapping[str, str]) -> dict[str, str]:
    """``extra``, unless it would undo a promise."""
    ours = {*_FIXED, *_ON_A_SOCKET, "port", "hba_file", "data_directory", "cluster_name"}
    refused = sorted(set(extra) & ours)
    if refused:
        raise ValueError(f"a cluster's {', '.join(refused)} can't be overridden")
    return dict(extra)


def configuration(*, name: str, port: int, private: bool, throwaway: bool, extra: Mapping[str, str]) -> str:
    address = _ON_A_SOCKET if private else _ON_A_PORT
    chosen = {**_DEFAULTS, **extra, **_FIXED, **address, "cluster_name": name, "port": str(port)}
    if throwaway:
        chosen |= _THROWAWAY
    lines = [f"{key} = {_quoted(value)}" for key, value in sorted(chosen.items())]
    return "\n".join(["# Written by Tracelake at every start.", *lines, ""])


def _quoted(value: str) -> str:
    if "\n" in value:
        raise ValueError("a setting's value is one line")
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"
