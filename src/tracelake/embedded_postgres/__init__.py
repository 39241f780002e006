"""A Postgres of one's own: a durable server on this machine alone, started and ended with its process.

``Cluster`` is the server, ``PortRelay`` gives a private one a loopback port. Where an external Postgres is given by
DSN, nothing here is used.
"""

from tracelake.embedded_postgres.cluster import SUPERUSER, Cluster, port_dsn, private_dsn
from tracelake.embedded_postgres.port_relay import PortRelay

__all__ = ["SUPERUSER", "Cluster", "PortRelay", "port_dsn", "private_dsn"]
