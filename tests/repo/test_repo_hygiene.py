"""What must never enter the repository: registries, one machine's paths, silenced checkers, built SQL.

Each rule is a small function that names its offenders, and a sample shows that it finds one.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKED = ("src", "tests/support", "scripts", "examples/demo")
SOURCES = sorted(path for folder in CHECKED for path in (ROOT / folder).rglob("*.py"))
ATTACKS = ROOT / "tests" / "support" / "attack"
"""What attackers write is no SQL of ours."""

# Put together from parts, so that this file keeps its own rules.
REGISTRIES = re.compile(
    "|".join(
        re.escape(name + domain)
        for name, domain in (
            ("pypi", ".org"),
            ("pythonhosted", ".org"),
            ("npmjs", ".org"),
            ("npmjs", ".com"),
            ("yarnpkg", ".com"),
            ("maven", ".org"),
            ("maven", ".apache.org"),
            ("crates", ".io"),
            ("docker", ".io"),
            ("ghcr", ".io"),
        )
    )
)
INDEX_OPTIONS = re.compile(
    r"--(extra-)?index-url|--find-links|--trusted-host|--no-index|^\s*(-i|-f)\s", re.MULTILINE
)
EMIT_SWITCHES = re.compile(r"--no-emit-[a-z-]+")
MACHINE_PATHS = re.compile("/(" + "|".join(("root", "work")) + ")/")
SILENCED = re.compile(r"#\s*(type:\s*ignore|noqa|pyright:\s*ignore|mypy:\s*ignore)")
BUILDING = (ast.JoinedStr, ast.BinOp, ast.Call)
"""The expressions by which ``literal_text`` says that a string is built."""
SQL_START = re.compile(
    r"\s*((SELECT|INSERT|UPDATE|DELETE|WITH|CREATE|ALTER|DROP|GRANT|REVOKE|TRUNCATE)\s"
    r"|(?i:select\s.*\sfrom\s|insert\s+into\s|update\s+\S+\s+set\s|delete\s+from\s"
    r"|(create|alter|drop)\s+(table|database|role|schema|index|view|function)\s))",
    re.DOTALL,
)


def repository_files() -> Iterator[Path]:
    """Text files that belong to the repository; git is not asked, since a release archive has none."""
    skipped = {"__pycache__", "build", "dist", "node_modules"}
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name not in skipped
            and not name.endswith(".egg-info")
            and (not name.startswith(".") or name in {".ci", ".github"})
        ]
        yield from (Path(folder, name) for name in names if name != ".git")


def offending_lines(files: Iterator[Path], rule: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if rule.search(line)
    ]


@lru_cache(maxsize=1)
def parsed(source: str) -> ast.Module:
    """One tree for all rules, and one at a time: collecting garbage among the trees of all files costs more than
    they do."""
    return ast.parse(source)


def literal_text(node: ast.expr) -> str | None:
    """The text of a string that is built at run time, its holes written as ``{}``."""
    match node:
        case ast.JoinedStr(values=parts) if any(isinstance(part, ast.FormattedValue) for part in parts):
            return "".join(
                part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "{}"
                for part in parts
            )
        case ast.BinOp(left=left, op=ast.Add() | ast.Mod()):
            return beginning(left)
        case ast.Call(func=ast.Attribute(value=value, attr="format" | "join" | "replace")):
            return beginning(value)
        case _:
            return None


def beginning(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value + " {} "
    return literal_text(node)


def built_sql(source: str) -> list[int]:
    """Lines on which a string that begins like an SQL statement is put together."""
    nodes = ast.walk(parsed(source))
    texts = ((node.lineno, literal_text(node)) for node in nodes if isinstance(node, BUILDING))
    return sorted({line for line, text in texts if text is not None and SQL_START.match(text)})


def lacks_docstring(source: str, name: str) -> bool:
    empty_init = name == "__init__.py" and not source.strip()
    return not empty_init and not ast.get_docstring(parsed(source))


@cache
def judged(path: Path) -> tuple[list[int], bool]:
    """The lines on which a file builds SQL, and whether it lacks a docstring."""
    source = path.read_text(encoding="utf-8")
    return built_sql(source), lacks_docstring(source, path.name)


def test_no_file_names_a_package_registry() -> None:
    assert offending_lines(repository_files(), REGISTRIES) == []


def test_no_file_names_a_path_of_one_machine() -> None:
    assert offending_lines(repository_files(), MACHINE_PATHS) == []


@pytest.mark.parametrize("name", ["requirements.txt", "Makefile", "pyproject.toml", ".ci/run"])
def test_the_tooling_leaves_the_choice_of_index_to_the_user(name: str) -> None:
    text = EMIT_SWITCHES.sub("", (ROOT / name).read_text(encoding="utf-8"))
    assert INDEX_OPTIONS.findall(text) == []


def test_every_locked_requirement_is_pinned_and_hashed() -> None:
    lock = (ROOT / "requirements.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    requirements = [line for line in lock.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert requirements
    assert "://" not in lock
    assert [line for line in requirements if "==" not in line or "--hash=sha256:" not in line] == []


def test_no_checker_is_silenced_in_the_source() -> None:
    assert offending_lines(iter(SOURCES), SILENCED) == []


def test_no_sql_is_built_from_strings() -> None:
    ours = [path for path in SOURCES if not path.is_relative_to(ATTACKS)]
    found = {str(path.relative_to(ROOT)): judged(path)[0] for path in ours}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_every_module_says_what_it_promises() -> None:
    silent = [path for path in SOURCES if judged(path)[1]]
    assert [str(path.relative_to(ROOT)) for path in silent] == []


@pytest.mark.parametrize(
    "source",
    [
        'f"SELECT * FROM {table}"',
        '"SELECT * FROM %s" % table',
        '"DELETE FROM " + table',
        '"UPDATE " + table + " SET a = 1"',
        '"WITH t AS ({}) SELECT 1".format(inner)',
        'f"""\n  CREATE ROLE {name}"""',
        'f"insert into {table} values (1)"',
        'f"update {table} set a = 1"',
    ],
)
def test_built_sql_is_recognised(source: str) -> None:
    assert built_sql(source)


@pytest.mark.parametrize(
    "source",
    [
        '"SELECT 1"',
        'f"Update of {name} refused"',
        'f"with {count} tasks"',
        'f"created {name}"',
        '"a " + "b"',
        '", ".join(names)',
    ],
)
def test_messages_are_not_taken_for_sql(source: str) -> None:
    assert not built_sql(source)


def test_the_other_rules_find_what_they_look_for() -> None:
    assert REGISTRIES.search("https://files.pythonhosted" + ".org/x")
    assert MACHINE_PATHS.search("home = /" + "root/x")
    assert not MACHINE_PATHS.search("bench/framework/load.py")
    assert SILENCED.search("x = 1  # type" + ": ignore[attr-defined]")
    assert INDEX_OPTIONS.search("--find-links wheels")
    assert INDEX_OPTIONS.search("# one\n-i somewhere")
    assert lacks_docstring("x = 1", "module.py")
    assert lacks_docstring("x = 1", "__init__.py")
    assert not lacks_docstring("", "__init__.py")
