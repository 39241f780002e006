"""What is installed from the wheel is all that the repository has: every file that isn't Python, and a command that
runs far from the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tracelake

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tracelake"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    [found] = folder.glob("*.whl")
    return found


def run_unpacked(wheel: Path, folder: Path, *arguments: str) -> str:
    """The command as the wheel's own entry point starts it, with the dependencies of this environment."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    program = (
        "import sys; from importlib.metadata import distribution; import tracelake; "
        f"assert tracelake.__file__.startswith({str(folder)!r}), tracelake.__file__; "
        f"[script] = distribution('tracelake').entry_points.select(name='tracelake'); "
        "sys.argv[0] = 'tracelake'; script.load()()"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder / "site")}
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_every_file_that_is_not_python_is_in_the_wheel(wheel: Path) -> None:
    wanted = {
        path.relative_to(PACKAGE.parent).as_posix(): path
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert "tracelake/py.typed" in wanted
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        assert sorted(set(wanted) - inside) == []
        assert [name for name, path in wanted.items() if archive.read(name) != path.read_bytes()] == []


def test_the_wheel_has_the_package_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        roots = {name.partition("/")[0] for name in archive.namelist()}
    assert roots == {"tracelake", f"tracelake-{tracelake.__version__}.dist-info"}


def test_the_command_runs_from_the_wheel_outside_of_the_repository(wheel: Path, tmp_path: Path) -> None:
    assert run_unpacked(wheel, tmp_path, "--version") == f"tracelake {tracelake.__version__}\n"
    run_unpacked(wheel, tmp_path, "init", "start")
    assert {path.name for path in (tmp_path / "start").iterdir()} == {"dag.yaml", "rpc.toml"}


def test_the_changelog_knows_this_version() -> None:
    assert f"## [{tracelake.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
