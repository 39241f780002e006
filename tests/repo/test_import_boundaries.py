"""The boundaries between packages hold: import-linter reports each import that crosses one.

The contracts mark packages as optional so that they can be checked on a small copy, and a slip of the pen in a name
would then pass unnoticed. Here every forbidden import is planted in such a copy, and each must be found. Layers and
rules are read from ``.importlinter`` itself, and the packages from the source tree: one without a layer fails.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tracelake"


def layers() -> list[list[str]]:
    """The layers of ``.importlinter``, highest first, each with the packages that stand side by side in it."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    lines = contracts["importlinter:contract:layers"]["layers"].split("\n")
    return [re.findall(r"\w+", line) for line in lines if line.strip()]


LAYERS = layers()
PACKAGES = [package for layer in LAYERS for package in layer]

# Every import from a layer into a higher one or into a neighbour.
UPWARD = [
    (low, high)
    for depth, layer in enumerate(LAYERS)
    for low in layer
    for high in (package for above in LAYERS[: depth + 1] for package in above)
    if low != high
]
# Imports that go down the layers and are forbidden all the same, or that matter enough to be named.
CROSSINGS = [
    *(("domain", other) for other in PACKAGES if other != "domain"),
    *(("contracts", other) for other in PACKAGES if other not in {"contracts", "domain"}),
    *(("functions", other) for other in ("contracts", "domain", "settings")),
    *(
        (low, high)
        for low in ("worker", "operators", "query", "scheduler", "sink")
        for high in ("store", "dispatcher")
    ),
    ("operators", "worker"),
    ("store", "dispatcher"),
    *((low, high) for low in ("query", "tables") for high in ("operators", "worker")),
    *((low, high) for low in ("leases", "sandbox") for high in ("operators", "worker")),
    *(("sandbox", other) for other in ("client", "functions", "objects", "postgres")),
    *((low, high) for low in LAYERS[4] + LAYERS[5] + LAYERS[6] for high in ("store", "dispatcher", "cli")),
]


def bare_package(parent: Path) -> Path:
    """A package of the same name whose members are those of the contracts, none importing another."""
    package = parent / "tracelake"
    package.mkdir()
    (package / "__init__.py").touch()
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


def test_every_package_and_root_module_has_a_layer() -> None:
    found = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    found |= {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    assert sorted(found - set(PACKAGES)) == [], "give it a layer in .importlinter"
    assert sorted(set(PACKAGES) - found - {"testing"}) == [], "a layer of .importlinter names what is gone"


def test_a_package_without_a_layer_is_refused(tmp_path: Path) -> None:
    package = bare_package(tmp_path)
    (package / "scheduler_of_tomorrow").mkdir()
    (package / "scheduler_of_tomorrow" / "__init__.py").touch()
    verdict = lint(tmp_path)
    assert verdict.returncode == 1, verdict.stdout + verdict.stderr
    assert "scheduler_of_tomorrow" in verdict.stdout


def test_a_package_that_crosses_no_boundary_is_accepted(tmp_path: Path) -> None:
    package = bare_package(tmp_path)
    (package / "worker" / "poll.py").write_text("import tracelake.queue\nimport tracelake.contracts\n")
    (package / "contracts" / "wire.py").write_text("import tracelake.domain\n")
    (package / "query" / "read.py").write_text("import tracelake.tables\nimport tracelake.sandbox\n")
    (package / "sink" / "hold.py").write_text("import tracelake.leases\nimport tracelake.hot\n")
    verdict = lint(tmp_path)
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr


def test_every_import_across_a_boundary_is_found(tmp_path: Path) -> None:
    package = bare_package(tmp_path)
    crossings = dict.fromkeys([*UPWARD, *CROSSINGS])
    for low, high in crossings:
        (package / low / f"reaches_{high}.py").write_text(f"import tracelake.{high}\n")
    verdict = lint(tmp_path)
    found = verdict.stdout
    missed = [
        f"{low} -> {high}" for low, high in crossings if f"tracelake.{low}.reaches_{high} " not in found
    ]
    assert verdict.returncode == 1, found + verdict.stderr
    assert not missed
