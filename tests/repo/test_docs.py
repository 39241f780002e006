"""Docs claim only what is there: every test and file that they name exists."""

import re
from pathlib import Path

import pytest

from scripts import structure

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tracelake"
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "tests/README.md", "deploy/monitoring/README.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Decisions speak of the code as it was when they were made.
PRESENT = [page for page in PAGES if page.parent.name != "adr"]
README_WORDS = 1000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for path, name in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text(encoding="utf-8")):
        file = ROOT / path
        assert file.is_file(), f"{page.name} names {path}"
        if name:
            assert f"def {name}(" in file.read_text(encoding="utf-8"), f"{page.name} names {path}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_heading_finds_it(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            linked = page if not target else page.parent / target
            assert heading in headings(linked), f"{page.name} links to {target}#{heading}"


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


@pytest.mark.parametrize(
    ("page", "example"),
    [
        ("README.md", "operators/block_squares.py"),
        ("docs/workers.md", "functions/python/main.py"),
        ("docs/sources.md", "operators/announce_blocks.py"),
    ],
)
def test_a_page_prints_the_example_that_is_tested(page: str, example: str) -> None:
    code = (ROOT / "examples" / example).read_text(encoding="utf-8")
    assert f"```python\n{code}```" in (ROOT / page).read_text(encoding="utf-8")


def test_the_readme_is_short_enough_to_be_read() -> None:
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    # The picture's lines aren't words.
    assert sum(re.search(r"\w", word) is not None for word in words) <= README_WORDS, (
        "move it to a page of its own"
    )


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    packages = "|".join(path.name for path in SOURCE.iterdir() if path.is_dir())
    named = re.findall(rf"`((?:{packages})/[\w/]+\.(?:py|sql))`", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (SOURCE / name).is_file()] == []


def test_the_picture_of_the_packages_is_that_of_their_imports() -> None:
    page = (ROOT / structure.PAGE).read_text(encoding="utf-8")
    drawn = structure.with_graph(page, structure.read_modules(ROOT))
    # Counts of lines change with every commit; they are as of the last `make graph`.
    as_drawn, as_kept = (re.sub(r"\d[\d,.]*", "N", text) for text in (drawn, page))
    assert as_kept == as_drawn, "run: make graph"


def walks() -> dict[str, list[tuple[str, int]]]:
    """The walks of ``docs/walk.md``: the files of each in reading order, with the number of files of before."""
    sections = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8").split("\n## ")[1:]
    found = {
        section.partition("\n")[0]: re.findall(
            r"^\| \d+ \| `(\S+)` \| .* \| (\d+) \|$", section, re.MULTILINE
        )
        for section in sections
    }
    return {title: [(file, int(before)) for file, before in files] for title, files in found.items() if files}


@pytest.mark.parametrize(
    ("title", "files"), walks().items(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_walk_opens_each_of_its_files_once_and_is_shorter_than_before(
    title: str, files: list[tuple[str, int]]
) -> None:
    names = [name for name, _ in files]
    assert [name for name in names if not (SOURCE / name).is_file()] == []
    assert len(set(names)) == len(names), "a walk that doubles back"
    before = sum(count for _, count in files)
    assert 3 * len(files) <= 2 * before
    overview = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
    assert re.search(
        rf"^\| \[{re.escape(title)}\]\(\S+\) \| {before} \| {len(files)} \|", overview, re.MULTILINE
    )


def test_there_are_five_walks() -> None:
    assert len(walks()) == 5
