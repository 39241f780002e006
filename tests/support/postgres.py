"""pytest plugin: one Postgres per test run, one cloned database per test.

    pytest_plugins = ["tests.support.postgres"]

    @pytest.fixture
    def state_db(clone_database: CloneDatabase) -> str:
        return clone_database("state", apply_migrations)   # a DSN

The run's server is a throwaway embedded one, or the one in ``TRACELAKE_TEST_POSTGRES_DSN`` (15 or newer, a role
that may create databases). Under xdist the controller owns the embedded one and passes its DSN to the workers,
since it outlives each of them; without xdist it is started on first use. Either way it dies with its owner.

A template is built once per run, by the first worker that needs it, under an advisory lock; a failed build is
repeated. It counts as built once it is marked as a template, which is the last step. Names carry the run's id,
so that runs don't meet on an external server and a template is never older than the code that built it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import psycopg
import pytest
from psycopg import sql

from tracelake.domain.errors import Invalid
from tracelake.embedded.postgres import Cluster
from tracelake.postgres import sqlfiles

_QUERIES = sqlfiles.load("tests.support", "shared_postgres.sql")
_OLDEST = 150000
EXTERNAL_DSN = "TRACELAKE_TEST_POSTGRES_DSN"
_WORKER_INPUT = "tracelake_postgres"
_SHARED_MEMORY = Path("/dev/shm")
_ROOM = 4 << 30
_OWNED = pytest.StashKey["OwnedPostgres"]()


class SharedPostgres:
    def __init__(self, admin_dsn: str, run: str) -> None:
        self.admin_dsn = admin_dsn
        self.run = run
        self._built: set[str] = set()
        with self._admin() as admin:
            version = admin.info.server_version
        if version < _OLDEST:
            raise Invalid("PostgresTooOld", f"tests need Postgres 15 or newer, this is {version // 10000}")

    def dsn(self, database: str) -> str:
        return urlunsplit(urlsplit(self.admin_dsn)._replace(path="/" + quote(database, "")))

    def clone(self, template_name: str, build: Callable[[str], None]) -> str:
        template = f"tracelake_{self.run}_template_{template_name}"
        self._ensure_template(template, build)
        database = f"tracelake_{self.run}_{uuid.uuid4().hex[:12]}"
        with self._admin() as admin:
            admin.execute(_compose(_QUERIES.clone, database=database, template=template))
        return self.dsn(database)

    def drop(self, dsn: str) -> None:
        with self._admin() as admin:
            admin.execute(_compose(_QUERIES.drop, database=unquote(urlsplit(dsn).path[1:])))

    def drop_everything(self) -> None:
        """Remove what this run made: for a server that outlives the run."""
        with self._admin() as admin:
            for (database,) in admin.execute(
                _QUERIES.list_run, {"prefix": f"tracelake_{self.run}_"}
            ).fetchall():
                admin.execute(_compose(_QUERIES.unmark_template, template=database))
                admin.execute(_compose(_QUERIES.drop, database=database))

    def _ensure_template(self, template: str, build: Callable[[str], None]) -> None:
        if template in self._built:
            return
        with self._admin() as admin:
            admin.execute(_QUERIES.lock, {"template": template})
            if not admin.execute(_QUERIES.find_template, {"template": template}).fetchone():
                admin.execute(_compose(_QUERIES.drop, database=template))
                admin.execute(_compose(_QUERIES.create, database=template))
                build(self.dsn(template))
                admin.execute(_compose(_QUERIES.mark_template, template=template))
        self._built.add(template)

    def _admin(self) -> psycopg.Connection:
        return psycopg.connect(self.admin_dsn, autocommit=True)


def _compose(query: str, **names: str) -> sql.Composed:
    return sql.SQL(query).format(**{key: sql.Identifier(name) for key, name in names.items()})


class CloneDatabase(Protocol):
    """A fresh copy of what ``build`` makes of an empty database; its DSN. Dropped after the test."""

    def __call__(self, template_name: str, build: Callable[[str], None]) -> str: ...


class OwnedPostgres:
    """The run's server in the process that started it, or that has the address of an external one."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._cluster: Cluster | None = None
        run = uuid.uuid4().hex[:8]
        external = os.environ.get(EXTERNAL_DSN)
        self.server = SharedPostgres(external or self._start(), run)

    def _start(self) -> str:
        self._folder = Path(tempfile.mkdtemp(prefix="tracelake-test-postgres-", dir=folder_in_memory()))
        self._cluster = Cluster(
            self._folder,
            name="tests",
            settings={"max_connections": "300", "max_wal_size": "1GB"},
            throwaway=True,
        )
        try:
            self._cluster.start()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return self._cluster.dsn()

    def close(self) -> None:
        if self._cluster is None:
            self.server.drop_everything()
            return
        # Nothing in it is wanted any more, so the orderly shutdown with its checkpoint isn't either.
        self._cluster.stop(timeout=0.0)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def folder_in_memory() -> Path | None:
    """Where files are kept in memory, if there is room.

    A clone makes hundreds of files, and ext4 takes many times as long for that when as many were deleted within
    the last minutes: it passes over their inodes one by one.
    """
    try:
        room = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    has_room = room.f_bavail * room.f_frsize >= _ROOM and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK)
    return _SHARED_MEMORY if has_room else None


def _owned(config: pytest.Config) -> OwnedPostgres:
    if _OWNED not in config.stash:
        config.stash[_OWNED] = OwnedPostgres()
    return config.stash[_OWNED]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    server = _owned(node.config).server
    node.workerinput[_WORKER_INPUT] = {"admin_dsn": server.admin_dsn, "run": server.run}


def pytest_unconfigure(config: pytest.Config) -> None:
    if _OWNED in config.stash:
        config.stash[_OWNED].close()
        del config.stash[_OWNED]


@pytest.fixture(scope="session")
def postgres_cluster(pytestconfig: pytest.Config) -> SharedPostgres:
    handed_down: dict[str, Any] | None = getattr(pytestconfig, "workerinput", None)
    if handed_down is None:
        return _owned(pytestconfig).server
    return SharedPostgres(**handed_down[_WORKER_INPUT])


@pytest.fixture
def clone_database(postgres_cluster: SharedPostgres) -> Iterator[CloneDatabase]:
    made: list[str] = []

    def clone(template_name: str, build: Callable[[str], None]) -> str:
        dsn = postgres_cluster.clone(template_name, build)
        made.append(dsn)
        return dsn

    yield clone
    for dsn in made:
        postgres_cluster.drop(dsn)


@pytest.fixture
def path_in_memory() -> Iterator[Path]:
    """For a module's own ``tmp_path``, if it makes databases by the dozen."""
    with tempfile.TemporaryDirectory(prefix="tracelake-test-", dir=folder_in_memory()) as folder:
        yield Path(folder)
