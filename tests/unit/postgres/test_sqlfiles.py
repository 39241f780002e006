"""SQL as data: queries by name, and mistakes that show at once."""

from __future__ import annotations

from importlib import resources

import pytest

from tracelake.postgres import sqlfiles

TEXT = """-- A file may say what it is about.

-- name: one
-- why
SELECT 1

-- name: two
-- why
SELECT 2
-- not a name: inside
"""


def test_queries_are_attributes_without_their_name_line() -> None:
    queries = sqlfiles.parse("here", TEXT)
    assert queries.names() == ("one", "two")
    assert queries.one == "-- why\nSELECT 1"
    assert queries.two.endswith("-- not a name: inside")


def test_a_misspelt_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"here has no query 'three': one, two"):
        _ = sqlfiles.parse("here", TEXT).three


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="names a query twice"):
        sqlfiles.parse("here", TEXT + TEXT)


def store_files() -> list[str]:
    entries = resources.files("tracelake.store.sql").iterdir()
    return sorted(entry.name for entry in entries if entry.name.endswith(".sql"))


@pytest.mark.parametrize("name", store_files())
def test_every_query_of_the_store_says_why_it_is_there(name: str) -> None:
    queries = sqlfiles.load("tracelake.store.sql", name)
    assert queries.names()
    for query in queries.names():
        first, *rest = getattr(queries, query).splitlines()
        assert first.startswith("-- "), f"{query} has no line of why"
        assert any(line and not line.startswith("--") for line in rest), f"{query} is empty"
