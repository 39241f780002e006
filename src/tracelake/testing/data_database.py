"""pytest plugin: a data database per test, with its roles.

``data_dsn`` is the administrator's; ``role_dsn(data_dsn, READER_ROLE)`` and so on are the roles'. Roles belong to
the server, which all tests share: everybody uses the one password.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit, urlunsplit

import pytest

from tracelake.hot.install import install
from tracelake.secret import Secret
from tracelake.testing.postgres import CloneDatabase

PASSWORD = Secret("a-password-of-the-tests")


def install_data(dsn: str) -> None:
    """Everything that a data database has, in the empty one of ``dsn``."""
    asyncio.run(install(dsn, writer_password=PASSWORD, reader_password=PASSWORD))


def role_dsn(dsn: str, role: str) -> str:
    parts = urlsplit(dsn)
    return urlunsplit(parts._replace(netloc=f"{role}:{PASSWORD.reveal()}@{parts.netloc.rpartition('@')[2]}"))


@pytest.fixture
def data_dsn(clone_database: CloneDatabase) -> str:
    dsn = clone_database("data", lambda dsn: None)
    install_data(dsn)
    return dsn
