"""Queues: one contract (``base``) and a driver for each kind of server, chosen by the scheme of an address.

``install`` prepares a queue and the login that workers and sinks use, by the owner's address; ``restore_logins``
undoes what the login has changed of itself since; ``open`` uses the queue, by either address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracelake.domain.errors import Invalid

if TYPE_CHECKING:
    from tracelake.postgres.sessions import KeptSessions
    from tracelake.queue.base import Queue
    from tracelake.settings import Secret


async def open(url: str, *, max_receives: int = 10, pool_size: int = 4) -> Queue:
    """The queue at ``postgresql://…``. ``Unavailable`` if the server can't be reached.

    ``max_receives`` is how often a message is delivered before it becomes a dead letter, ``pool_size`` the maximum
    number of connections for calls.
    """
    _refuse_unknown(url)
    # A driver's libraries are loaded by those who use it.
    from tracelake.queue.postgres import PostgresQueue

    return await PostgresQueue.open(url, max_receives=max_receives, pool_size=pool_size)


async def install(url: str, *, installation_id: str, password: Secret) -> tuple[str, ...]:
    """Prepare the queue and the installation's login for it; returns other databases that the login could enter.
    ``Conflict`` for a login of another installation. Installing again is safe."""
    _refuse_unknown(url)
    from tracelake.queue.postgres_install import take_login

    return await take_login(url, installation_id=installation_id, password=password)


async def restore_logins(url: str, sessions: KeptSessions, *, installation_id: str, password: Secret) -> None:
    """Give the login its password and settings again if it has other ones now. ``sessions`` are the caller's: it
    looks every few seconds, and a driver that connects keeps its connection there."""
    _refuse_unknown(url)
    from tracelake.queue.postgres_install import restore_login

    await restore_login(url, sessions, installation_id=installation_id, password=password)


def _refuse_unknown(url: str) -> None:
    scheme = url.partition("://")[0]
    if scheme not in ("postgresql", "postgres"):
        # Only the scheme is shown: the rest may hold a password.
        shown = f"{scheme}://" if "://" in url else "an address without a scheme"
        raise Invalid("UnknownQueueScheme", f"a queue's address begins with postgresql://, not with {shown}")
