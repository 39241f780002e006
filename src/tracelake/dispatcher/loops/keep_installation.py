"""Agrees with the other replicas, again and again, on worker tokens and keys, and that shared logins still open.

What was rotated at one replica is in every home after two looks, and a login that changed its own password locks
nobody out for longer than one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import asyncpg
import structlog

from tracelake.dispatcher.settings import DispatcherSettings
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.postgres_sessions import KEEPALIVES
from tracelake.queue import install as queue_install
from tracelake.secret import Secret
from tracelake.shared_logins import SharedLogin, SharedLogins
from tracelake.store import query_roles
from tracelake.store.db import Database, DeployLock, Transaction
from tracelake.store.installation import agree
from tracelake.tokens.home_copies import Copies, Shared

QUEUE_ROLE = "tracelake_queue"
_CONNECT_SECONDS = 10.0
_COMMAND_SECONDS = 16.0

log = structlog.get_logger(__name__)


def state_logins(dsn: Secret, shared: Shared, connection: asyncpg.Connection[Any]) -> SharedLogins:
    catalog, audit = (Secret(shared.passwords[name]) for name in ("catalog_password", "audit_password"))
    return SharedLogins(
        dsn=dsn,
        installation_id=shared.installation_id,
        logins=(
            SharedLogin(
                role=query_roles.CATALOG_ROLE, password=catalog, settings=query_roles.CATALOG_SETTINGS
            ),
            SharedLogin(role=query_roles.AUDIT_ROLE, password=audit, settings=query_roles.AUDIT_SETTINGS),
        ),
        install=partial(
            query_roles.install_query_roles,
            connection,
            dsn=dsn,
            catalog_password=catalog,
            audit_password=audit,
        ),
    )


def queue_logins(dsn: Secret, shared: Shared) -> SharedLogins:
    password = shared.passwords["queue_password"]
    return SharedLogins(
        dsn=dsn,
        installation_id=shared.installation_id,
        logins=(SharedLogin(role=QUEUE_ROLE, password=Secret(password), settings=queue_install.SETTINGS),),
        install=partial(queue_install.install, dsn.reveal(), role=QUEUE_ROLE, password=password),
    )


class InstallationKeeper:
    def __init__(self, settings: DispatcherSettings, db: Database) -> None:
        self._settings = settings
        self._db = db
        self._sessions: dict[str, asyncpg.Connection[Any]] = {}
        self._problem: str | None = None

    async def look(self) -> None:
        shared = await self._agree()
        if shared is None:
            return
        settings = self._settings
        try:
            state = await self._session(settings.state_dsn)
            await state_logins(settings.state_dsn, shared, state).restore(state)
            queue = await self._session(settings.queue_dsn)
            await queue_logins(settings.queue_dsn, shared).restore(queue)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            await self.close()
            raise Unavailable("LoginsUnknown", f"can't look after the shared logins: {error}") from None

    async def close(self) -> None:
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            session.terminate()

    async def _agree(self) -> Shared | None:
        """None while the home's files can't be used; what was good last stays in force, and they are named once."""
        home = self._settings.home
        try:
            copies = home.read()
            shared = await self._db.run(partial(self._agree_on, copies), lock=DeployLock.NONE)
            home.keep(shared, copies, restore=False)
        except Unavailable:
            raise
        except (OSError, TracelakeError) as error:
            if str(error) != self._problem:
                log.error("the home's copies can't be kept", home=str(home.folder), problem=str(error))
            self._problem = str(error)
            return None
        self._problem = None
        return shared

    async def _agree_on(self, copies: Copies, tx: Transaction) -> Shared:
        return await agree(tx, self._settings.home, copies)

    async def _session(self, dsn: Secret) -> asyncpg.Connection[Any]:
        """Kept from one look to the next."""
        session = self._sessions.get(dsn.reveal())
        if session is None or session.is_closed():
            session = await asyncpg.connect(
                dsn.reveal(),
                timeout=_CONNECT_SECONDS,
                command_timeout=_COMMAND_SECONDS,
                server_settings={**KEEPALIVES, "application_name": "tracelake-logins"},
            )
            self._sessions[dsn.reveal()] = session
        return session
