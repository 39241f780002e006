"""No module that somebody left in a folder is imported by a process of the platform that is started there.

``python -m`` looks into the folder that it is started in before it looks anywhere else, and Python into ``.local``
of its home: Spark's launcher and its Python run in a folder that Spark's tasks write to.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.spark import QUICK
from tracelake.worker.spark.engine import SparkProgram
from tracelake.worker.spark.launch import archive_path, find_java, find_spark_home, server_conf
from tracelake.worker.spark.server import SparkServer

SOURCES = Path(__file__).resolve().parents[2] / "src" / "tracelake"
STARTED = re.compile(r'sys\.executable,((?:\s*"-[^"]*",)*)\s*"-m"')
PLANTED = "import os; open(os.path.join(os.environ['HOME'], 'RAN-' + __name__), 'w')\n"


class Asked(Exception):
    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        super().__init__()
        self.argv, self.env = list(argv), dict(env)


class Recording:
    async def start_program(
        self, argv: Sequence[str], env: Mapping[str, str], *, log: int, folder: Path
    ) -> SparkProgram:
        raise Asked(argv, env)


def planted(folder: Path) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / ".local" / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    for name in ("msgspec", "tracelake", "pyspark", "json", "socket", "sitecustomize", "usercustomize"):
        (folder / f"{name}.py").write_text(PLANTED)
        (site / f"{name}.py").write_text(PLANTED)
    (site / "planted.pth").write_text(PLANTED)


async def test_what_lies_in_sparks_folder_is_not_imported(tmp_path: Path) -> None:
    folder = tmp_path / "spark"
    planted(folder)
    with pytest.raises(Asked) as asked:
        await SparkServer(QUICK, Recording(), folder).start()
    argv, env = asked.value.argv, asked.value.env
    # The launcher ends at once, since nobody tells it anything; by then it has imported what it needs.
    launcher = subprocess.run(argv, env=env, cwd=folder, capture_output=True, timeout=60)
    assert b"Not a socket" in launcher.stderr or b"non-socket" in launcher.stderr
    # As Spark starts its Python, with what it was given.
    code = "import json, msgspec, pyspark, socket, sys, tracelake; print(*sys.path, sep='\\n')"
    python = subprocess.run(
        [env["PYSPARK_PYTHON"], "-c", code], env=env, cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert python.returncode == 0, python.stderr
    assert not [path for path in python.stdout.splitlines() if path == "" or path.startswith(str(folder))]
    assert not list(folder.glob("RAN-*"))


def test_executors_of_their_own_are_told_the_same(tmp_path: Path) -> None:
    conf = server_conf(QUICK, tmp_path, "")
    assert conf["spark.executorEnv.PYTHONSAFEPATH"] == conf["spark.executorEnv.PYTHONNOUSERSITE"] == "1"


def test_an_archive_of_classes_is_taken_from_the_installation_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java runs what is in it: nobody may write there who may not replace the packages, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    archive = archive_path(find_java(os.environ, tmp_path), find_spark_home())
    assert archive.is_relative_to(sys.prefix)
    for place in filter(Path.exists, (archive, archive.parent)):
        assert not place.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        assert place.stat().st_uid == Path(sys.prefix).stat().st_uid


def test_no_python_is_started_that_looks_into_its_folder() -> None:
    started = {
        str(path.relative_to(SOURCES)): found
        for path in SOURCES.rglob("*.py")
        if "testing" not in path.relative_to(SOURCES).parts
        if (found := STARTED.findall(path.read_text(encoding="utf-8")))
    }
    assert sum(map(len, started.values())) >= 6
    assert [path for path, found in started.items() if not all('"-P"' in each for each in found)] == []
