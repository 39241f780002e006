"""The fixtures of all tests, and a guard: two tests of one name would be run as one by xdist."""

import os
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

# gRPC, which Spark's client brings along, would start its threads again in every process that a test starts.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# The simulation's seeds are others in every run, and the same in all of its processes.
FIRST_SEED = "TRACELAKE_SIMULATION_FIRST_SEED"
os.environ.setdefault(FIRST_SEED, str(random.SystemRandom().randrange(2**32)))

# How long an example takes says something about the machine, not about the code.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

pytest_plugins = [
    "tracelake.testing.postgres",
    "tracelake.testing.state",
    "tracelake.testing.data_database",
    "tracelake.testing.hot_scene",
    "tracelake.testing.hot_store",
    "tracelake.testing.query_scene",
    "tracelake.testing.spark",
    "tracelake.testing.anvil",
]


def pytest_report_header() -> str:
    return f"simulation: {FIRST_SEED}={os.environ[FIRST_SEED]} runs the same seeds again"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    twice = [name for name, count in Counter(item.nodeid for item in items).items() if count > 1]
    if twice:
        raise pytest.UsageError(f"several tests have one name: {', '.join(twice)}")
