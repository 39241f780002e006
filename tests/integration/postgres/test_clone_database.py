"""Each test gets a database of its own, cloned from a template that a run builds once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from tests.support.postgres import CloneDatabase, SharedPostgres

ROOT = Path(__file__).parents[3]
builds: list[str] = []


def build(dsn: str) -> None:
    builds.append(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE thing (id int PRIMARY KEY)")


def count(dsn: str) -> int:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute("SELECT count(*) FROM thing").fetchone()
        assert row is not None
        return int(row[0])


def test_clones_share_a_template_and_nothing_else(clone_database: CloneDatabase) -> None:
    builds.clear()
    first, second = clone_database("shared", build), clone_database("shared", build)
    with psycopg.connect(first, autocommit=True) as connection:
        connection.execute("INSERT INTO thing VALUES (1)")
    assert (count(first), count(second)) == (1, 0)
    assert len(builds) == 1


def test_a_dropped_clone_is_gone_in_spite_of_a_leaked_connection(postgres_cluster: SharedPostgres) -> None:
    dsn = postgres_cluster.clone("dropped", build)
    leaked = psycopg.connect(dsn, autocommit=True)
    postgres_cluster.drop(dsn)
    with pytest.raises(psycopg.OperationalError):
        leaked.execute("SELECT 1")
    leaked.close()
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(dsn)


def test_a_template_whose_build_failed_is_built_anew(clone_database: CloneDatabase) -> None:
    def broken(dsn: str) -> None:
        build(dsn)
        raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        clone_database("fails_once", broken)
    assert count(clone_database("fails_once", build)) == 0


def test_what_a_run_made_can_be_removed_from_a_server_that_stays(postgres_cluster: SharedPostgres) -> None:
    run = SharedPostgres(postgres_cluster.admin_dsn, "otherrun")
    kept = postgres_cluster.clone("kept", build)
    dropped = run.clone("dropped", build)
    run.drop_everything()
    assert count(kept) == 0
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(dropped)
    postgres_cluster.drop(kept)


INNER_TEST = """
import os, psycopg, pytest

def build(dsn):
    with open(os.environ["SEEN"], "a") as seen:
        seen.write("build\\n")

@pytest.mark.parametrize("n", range(8))
def test_it(clone_database, n):
    with psycopg.connect(clone_database("inner", build)) as connection:
        started = connection.execute("SELECT pg_postmaster_start_time()").fetchone()[0]
    with open(os.environ["SEEN"], "a") as seen:
        seen.write(f"{os.environ.get('PYTEST_XDIST_WORKER')} {started.timestamp()}\\n")
"""


@pytest.mark.parametrize("external", [False, True])
def test_all_workers_of_a_run_share_one_server_and_one_template(
    tmp_path: Path, postgres_cluster: SharedPostgres, external: bool
) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.support.postgres"]\n')
    (tmp_path / "test_inner.py").write_text(INNER_TEST)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    seen = tmp_path / "seen"
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "TRACELAKE_"))}
    env |= {
        "SEEN": str(seen),
        "TMPDIR": str(scratch),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(ROOT),
    }
    if external:
        env["TRACELAKE_TEST_POSTGRES_DSN"] = postgres_cluster.admin_dsn
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "xdist",
        "-n",
        "2",
        "--dist",
        "each",
        "-p",
        "no:cacheprovider",
    ]
    ran = subprocess.run([*command, "."], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = seen.read_text().splitlines()
    tests = [line.split() for line in lines if line != "build"]
    assert lines.count("build") == 1
    assert {worker for worker, _ in tests} == {"gw0", "gw1"}
    assert len({server for _, server in tests}) == 1
    assert list(scratch.glob("tracelake-test-postgres-*")) == []
