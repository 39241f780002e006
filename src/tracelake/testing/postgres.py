"""pytest plugin: one Postgres per test run, one cloned database per test.

    pytest_plugins = ["tracelake.testing.postgres"]

    @pytest.fixture
    def state_db(clone_database: CloneDatabase) -> str:
        return clone_database("state", apply_migrations)   # a DSN

The run's server is a throwaway embedded one, or the one in ``TRACELAKE_TEST_POSTGRES_DSN`` (15 or newer,
a role that may create databases). Under xdist the controller owns the embedded one and hands its DSN to
the workers, since it outlives each of them; without xdist it's started when first asked for. Either way
it dies with its owner. A template is built once per run, whichever worker comes first, and what a build
that failed left behind is built anew.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tracelake.embedded_postgres import Cluster
from tracelake.testing.shared_postgres import SharedPostgres

EXTERNAL_DSN = "TRACELAKE_TEST_POSTGRES_DSN"
_WORKER_INPUT = "tracelake_postgres"
_OWNED = pytest.StashKey["OwnedPostgres"]()


class CloneDatabase(Protocol):
    """A fresh copy of what ``build`` makes of an empty database; its DSN. Dropped after the test."""

    def __call__(self, template_name: str, build: Callable[[str], None]) -> str: ...


class OwnedPostgres:
    """The run's server on the side that started it, or that was told of an external one."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._cluster: Cluster | None = None
        run = uuid.uuid4().hex[:8]
        external = os.environ.get(EXTERNAL_DSN)
        self.server = SharedPostgres(external or self._start(), run)

    def _start(self) -> str:
        self._folder = Path(tempfile.mkdtemp(prefix="tracelake-test-postgres-"))
        self._cluster = Cluster(
            self._folder,
            name="tests",
            settings={"max_connections": "300", "max_wal_size": "4GB"},
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
