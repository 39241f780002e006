"""The roles of a stack's data database: put in place when it starts, and put back when one has changed itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from tracelake.dev.home import Home
from tracelake.hot.install import Installed, install, restore_roles
from tracelake.secret import Secret

_LOOK_SECONDS = 15.0
_END_SECONDS = 0.5

_log = structlog.get_logger(__name__)


def install_data(home: Home, dsn: str, *, new_passwords: bool = False) -> Installed:
    """The home has the database's passwords afterwards; when it had
    others, those who were told them need to be told again."""
    if new_passwords:
        home.forget_data_secrets()
    installed = asyncio.run(install(dsn, **_passwords(home), replace=new_passwords))
    home.keep_data_secrets(installed.writer_password.reveal(), installed.reader_password.reveal())
    return installed


@contextmanager
def roles_kept(home: Home, dsn: Callable[[], str]) -> Iterator[None]:
    """A role can't be kept from changing its own password. It locks the others out until somebody looks, and no
    longer; a database that is away is looked at another time."""
    over = threading.Event()

    def keep() -> None:
        while not over.wait(_LOOK_SECONDS):
            try:
                for role in asyncio.run(restore_roles(dsn(), **_passwords(home))):
                    _log.warning("a login had changed itself and was restored", role=role)
            except Exception as error:
                # Whatever it was, the next look comes: this thread ends with the stack, and with nothing else.
                _log.warning("the data database's logins can't be looked at", error=str(error))

    keeper = threading.Thread(target=keep, name="data-roles", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join(_END_SECONDS)


def _passwords(home: Home) -> dict[str, Secret]:
    return {
        "writer_password": Secret(home.data_secrets().writer_password),
        "reader_password": Secret(home.reading_secrets().reader_password),
    }
