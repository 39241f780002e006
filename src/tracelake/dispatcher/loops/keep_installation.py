"""Keeps this replica in agreement with the others: on worker tokens and keys, and on shared logins that still open.

A rotation at one replica is in every home after two passes, and a shared login whose password was changed from
outside is restored by the next pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import asyncpg
import structlog

from tracelake import queue as queues
from tracelake.dispatcher.settings import DispatcherSettings
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.postgres.roles import SharedLogin, SharedLogins
from tracelake.postgres.sessions import DATABASE_ERRORS, KeptSessions
from tracelake.settings import Secret
from tracelake.store import query_roles
from tracelake.store.db import Database, DeployLock, Transaction
from tracelake.store.installation import agree
from tracelake.tokens.home_copies import Copies, Shared

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


def queue_password(shared: Shared) -> Secret:
    return Secret(shared.passwords["queue_password"])


class InstallationSync:
    def __init__(self, settings: DispatcherSettings, db: Database) -> None:
        self._settings = settings
        self._db = db
        self._sessions = KeptSessions("tracelake-logins")
        self._problem: str | None = None

    async def look(self) -> None:
        shared = await self._agree()
        if shared is None:
            return
        settings = self._settings
        try:
            state = await self._sessions.to(settings.state_dsn.reveal())
            await state_logins(settings.state_dsn, shared, state).restore(state)
            await queues.restore_logins(
                settings.queue_dsn.reveal(),
                self._sessions,
                installation_id=shared.installation_id,
                password=queue_password(shared),
            )
        except (Unavailable, *DATABASE_ERRORS) as error:
            # A session that failed once may hang at every pass, so the next one connects anew.
            self.close()
            if isinstance(error, Unavailable):
                raise
            raise Unavailable("LoginsUnknown", f"cannot check the shared logins: {error}") from None

    def close(self) -> None:
        self._sessions.close()

    async def _agree(self) -> Shared | None:
        """None while the home's files can't be used: the last good ones stay in force, and the problem is logged
        once."""
        home = self._settings.home
        try:
            copies = home.read()
            shared = await self._db.run(partial(self._agree_on, copies), lock=DeployLock.NONE)
            home.keep(shared, copies, restore=False)
        # The database is away, not the home: the caller logs that, and it isn't the home's problem.
        except Unavailable:
            raise
        except (OSError, TracelakeError) as error:
            # This runs every few seconds, and a full disk stays full for hours.
            if str(error) != self._problem:
                log.error(
                    "cannot update the home's copies of the secrets",
                    home=str(home.folder),
                    problem=str(error),
                )
            self._problem = str(error)
            return None
        self._problem = None
        return shared

    async def _agree_on(self, copies: Copies, tx: Transaction) -> Shared:
        return await agree(tx, self._settings.home, copies)
