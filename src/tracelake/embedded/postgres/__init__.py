"""An embedded Postgres: a durable server for this machine alone, started and ended with its process.

``Cluster`` is the server, ``PortRelay`` gives a private one a loopback port. With an external Postgres, given by
DSN, this package isn't used.
"""

from tracelake.embedded.postgres.cluster import SUPERUSER, Cluster, port_dsn, private_dsn
from tracelake.embedded.postgres.port_relay import PortRelay

__all__ = ["SUPERUSER", "Cluster", "PortRelay", "port_dsn", "private_dsn"]
