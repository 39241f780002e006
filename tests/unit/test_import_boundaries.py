"""The boundaries between packages hold: each import that crosses one is reported by import-linter.

The contracts name packages that may not exist yet, so a typing slip in them would pass unnoticed. Here every
forbidden import is planted in a copy of the package, and each must be found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = (
    "cli",
    "dispatcher",
    "store",
    "worker",
    "operators",
    "queue",
    "objects",
    "tokens",
    "embedded_postgres",
    "serving",
    "contracts",
    "domain",
    "query",
    "sink",
)
CROSSINGS = (
    ("domain", "sqlfiles"),
    ("domain", "contracts"),
    ("contracts", "sqlfiles"),
    ("contracts", "store"),
    ("worker", "store"),
    ("worker", "dispatcher"),
    ("operators", "store"),
    ("operators", "dispatcher"),
    ("operators", "worker"),
    ("store", "dispatcher"),
    *((low, high) for low in ("query", "sink") for high in ("store", "dispatcher")),
    *((low, high) for low in PACKAGES[5:10] for high in ("store", "dispatcher", "cli")),
)


def bare_package(parent: Path) -> Path:
    """A package of the same name with nothing but its boundaries' members, none importing another."""
    package = parent / "tracelake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sqlfiles.py").touch()
    for name in PACKAGES:
        (package / name).mkdir()
        (package / name / "__init__.py").touch()
    return package


def lint(parent: Path) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / ".importlinter", parent)
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-cache",
        ],
        cwd=parent,
        env={**os.environ, "PYTHONPATH": str(parent), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_package_that_crosses_no_boundary_is_accepted(tmp_path: Path) -> None:
    package = bare_package(tmp_path)
    (package / "worker" / "poll.py").write_text("import tracelake.queue\nimport tracelake.contracts\n")
    (package / "contracts" / "wire.py").write_text("import tracelake.domain\n")
    verdict = lint(tmp_path)
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr


def test_every_import_across_a_boundary_is_found(tmp_path: Path) -> None:
    package = bare_package(tmp_path)
    for low, high in CROSSINGS:
        (package / low / f"reaches_{high}.py").write_text(f"import tracelake.{high}\n")
    verdict = lint(tmp_path)
    found = verdict.stdout
    missed = [f"{low} -> {high}" for low, high in CROSSINGS if f"tracelake.{low}.reaches_{high}" not in found]
    assert verdict.returncode == 1, found + verdict.stderr
    assert not missed
