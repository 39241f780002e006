"""A Postgres of one's own: a durable, private server on loopback, started and ended with its process.

``Cluster`` is the whole public face. Where an external Postgres is given by DSN, nothing here is used.
"""

from tracelake.embedded_postgres.cluster import SUPERUSER, Cluster

__all__ = ["SUPERUSER", "Cluster"]
