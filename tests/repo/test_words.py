"""One word per concept: words that were retired don't come back, and docstrings say what a thing does or is.

``docs/glossary.md`` has the words in use. Words are also found inside of snake_case names, across line breaks, and
in the names of test files. Not read: the changelog and the decisions, which describe the past in its own words, and
migrations, whose text must not change.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from scripts import structure

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "docs", "examples", "scripts", "bench", "tests/support")
NOT_READ = (
    "docs/adr/",
    "src/tracelake/hot/migrations/",
    "src/tracelake/queue/migrations/",
    "src/tracelake/store/migrations/",
)
SUFFIXES = frozenset({".js", ".md", ".mjs", ".py", ".sh", ".sql", ".toml", ".yaml"})
PAGES = ("CONTRIBUTING.md", "README.md", "SECURITY.md", "tests/README.md")


def words(pattern: str) -> str:
    """The pattern for whole words; ``_`` ends a word too. A space also matches ``_``, and a line break with the
    sign of a comment behind it."""
    gap = r"(?:_|\s+(?:(?:#:?|--|\*|//)\s+)?)"
    return rf"(?i)(?<![a-z0-9])(?:{pattern.replace(' ', gap)})(?![a-z0-9])"


RETIRED = {
    # Files have a method of that name.
    words(r"said|heard|hears?|told|tells|telling|(?<!\.)tell"): "sent, received, recorded, applied, reported",
    words(r"(take|takes|taken|taking|took) ([\w']+ ){0,3}back"): "invalidate, rewind, retract, revoke",
    words(r"hand(s|ed|ing)?(-| )?over|handovers"): "pass, invoke, transfer; step",
    words(r"hand(s|ed|ing)? ([\w']+ ){0,3}back"): "release (task), return",
    words(r"strangers?"): "unauthenticated client, other user",
    words(r"whoever|somebody|anybody|everybody"): "the role, process, client or user; PUBLIC",
    words(r"so many"): "maximum number of …",
    words(r"(for|at least) so long"): "for this time; minimum time",
    words(r"nobody's way"): "missing and not scheduled",
    words(r"without a word"): "silently; by default; without a value",
    words(r"changes? its mind"): "is reorganized",
    words(r"the own"): "its own; the caller's",
    r"(News|Story|Birth|Pulse|Rhythm|Weather)(?![a-z])": "FollowerEvents, Progress, HealthProbe, PollSchedule",
    words(r"news"): "progress, events",
}
KEPT = frozenset({"handovers", "left_to_everybody", "taken_back"})
"""Names of fields on the wire and in printed JSON, which users' programs read."""
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PARAPHRASE = re.compile(
    r"(?:\A|\n\n|[.:;] )What (?:is|was|has|are|were|have|had|can|may|must|somebody|nobody)\b"
)


def texts() -> Iterator[tuple[str, str]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix in SUFFIXES and not name.startswith(NOT_READ):
                yield name, path.read_text(encoding="utf-8")
    for name in PAGES:
        yield name, (ROOT / name).read_text(encoding="utf-8")


def names_of_test_files() -> Iterator[tuple[str, str]]:
    """The names of test files: the text of each is its own name."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path.stem


@cache
def passages() -> tuple[tuple[str, str], ...]:
    """All texts and names, with an ``x`` for each character of an exception, so that places stay right."""

    def masked(found: re.Match[str]) -> str:
        return "x" * len(found[0]) if found[0] in KEPT else found[0]

    return tuple((name, IDENTIFIER.sub(masked, text)) for name, text in (*texts(), *names_of_test_files()))


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes and functions, and the strings that stand below an attribute."""
    for node in ast.walk(ast.parse(source)):
        for child in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                yield child.lineno, child.value.value.strip()


@pytest.mark.parametrize("pattern", RETIRED)
def test_retired_words_do_not_come_back(pattern: str) -> None:
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}"
        for name, text in passages()
        for match in re.finditer(pattern, text)
    ]
    assert not found, f"use instead: {RETIRED[pattern]}\n" + "\n".join(found)


def test_every_exception_is_in_use() -> None:
    used = {found for _, text in (*texts(), *names_of_test_files()) for found in IDENTIFIER.findall(text)}
    assert not KEPT - used, f"no longer in use: {sorted(KEPT - used)}"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("_tell_what_was_lost", "tell"),
        ("the worker hands the\n    # attempt back", "hands the"),
        ("takes its work back", "takes its work back"),
        ("a last hand-over", "hand-over"),
        ("def part(self, news: Part)", "news"),
        ("class BackfillNews:", "News"),
        ("operator_host_said", "said"),
    ],
)
def test_words_are_found_in_names_and_across_lines(text: str, word: str) -> None:
    read = [match[0] for pattern in RETIRED for match in re.finditer(pattern, text)]
    assert any(found.startswith(word) for found in read), read


@pytest.mark.parametrize("text", ["file.tell()", "History", "foretold", "takes it; comes back", "newsletter"])
def test_other_words_are_not_found(text: str) -> None:
    assert not [match[0] for pattern in RETIRED for match in re.finditer(pattern, text)]


def test_docstrings_name_their_subject() -> None:
    found = [
        f"{name}:{line}"
        for name, text in texts()
        # Files without the words need not be parsed.
        if name.endswith(".py") and "What " in text
        for line, docstring in docstrings(text)
        if PARAPHRASE.search(docstring)
    ]
    assert not found, "name the subject instead of 'What is/was/has …'\n" + "\n".join(found)


def test_each_public_name_of_a_class_or_type_means_one_thing() -> None:
    where: dict[str, list[str]] = {}
    for module in structure.read_modules(ROOT).values():
        for name in module.public_names:
            where.setdefault(name, []).append(module.name)
    assert not {name: modules for name, modules in where.items() if len(modules) > 1}
