"""Docs claim only what is there: every test and file that they name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


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


@pytest.mark.parametrize("example", ["operators/block_squares.py", "functions/python/main.py"])
def test_the_readme_prints_the_examples_that_are_tested(example: str) -> None:
    code = (ROOT / "examples" / example).read_text(encoding="utf-8")
    assert f"```python\n{code}```" in (ROOT / "README.md").read_text(encoding="utf-8")
