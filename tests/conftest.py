"""The fixtures of all tests, how they are spread over processes, and a guard: two tests of one name would be run as
one by xdist."""

import os
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadGroupScheduling

# gRPC, which Spark's client brings along, would start its threads again in every process that a test starts.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# The simulation's seeds are others in every run, and the same in all of its processes.
FIRST_SEED = "TRACELAKE_SIMULATION_FIRST_SEED"
os.environ.setdefault(FIRST_SEED, str(random.SystemRandom().randrange(2**32)))

# Spark servers of stacks run small jobs for a short time: with the quick compiler alone they take half of the CPU.
os.environ.setdefault("TRACELAKE_SPARK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# How long an example takes says something about the machine, not about the code.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

pytest_plugins = [
    "tests.support.postgres",
    "tests.support.databases",
    "tests.support.hot_scene",
    "tests.support.query_scene",
    "tests.support.spark",
    "tests.support.anvil",
    "tests.support.kept_pools",
]


# The folders with the longest files first: at the end of a run the processes share small ones.
ORDER = ("faults", "e2e", "invariants", "integration", "contract", "repo", "unit")


class ByFile(LoadGroupScheduling):
    """The tests of a file, or of a group, run in one process: its clusters, stacks and servers are started once."""

    def _split_scope(self, nodeid: str) -> str:
        scope = super()._split_scope(nodeid)
        return scope.partition("::")[0]


def pytest_configure(config: pytest.Config) -> None:
    # By default xdist begins with the files that have most tests, which are the quickest ones.
    config.option.loadscopereorder = False


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    return ByFile(config, log)


def pytest_report_header() -> str:
    return f"simulation: {FIRST_SEED}={os.environ[FIRST_SEED]} runs the same seeds again"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    twice = [name for name, count in Counter(item.nodeid for item in items).items() if count > 1]
    if twice:
        raise pytest.UsageError(f"several tests have one name: {', '.join(twice)}")
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    folders = item.nodeid.partition("::")[0].split("/")
    return next((place for place, folder in enumerate(ORDER) if folder in folders), len(ORDER))
