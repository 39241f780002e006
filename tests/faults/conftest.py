"""A durable Postgres for each module: its faults are that module's alone.

Its files are in memory, if there is room: the processes of these tests die, the machine doesn't.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.postgres import folder_in_memory
from tests.support.site import Databases
from tracelake.embedded.postgres import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # By default recovery first syncs every file on its own, which takes seconds and proves nothing here.
    settings = {"recovery_init_sync_method": "syncfs"} if sys.platform == "linux" else {}
    with (
        tempfile.TemporaryDirectory(prefix="tracelake-test-faults-", dir=folder_in_memory()) as folder,
        Cluster(Path(folder) / "state", name="faults", settings=settings) as running,
    ):
        yield running


@pytest.fixture
def databases(cluster: Cluster) -> Databases:
    return Databases.create(cluster)
