"""A durable Postgres for each module: its faults are that module's alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tracelake.embedded_postgres import Cluster
from tracelake.testing.site import Databases


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # By default recovery first syncs every file on its own, which takes seconds and proves nothing here.
    settings = {"recovery_init_sync_method": "syncfs"} if sys.platform == "linux" else {}
    folder = tmp_path_factory.mktemp("faults") / "state"
    with Cluster(folder, name="faults", settings=settings) as running:
        yield running


@pytest.fixture
def databases(cluster: Cluster) -> Databases:
    return Databases.create(cluster)
