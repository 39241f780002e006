"""A durable Postgres for each module: its faults are that module's alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tracelake.embedded_postgres import Cluster
from tracelake.testing.site import Databases


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("faults") / "state", name="faults") as running:
        yield running


@pytest.fixture
def databases(cluster: Cluster) -> Databases:
    return Databases.create(cluster)
