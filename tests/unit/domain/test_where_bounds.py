"""What is known of rows excludes a match only when none of them matches."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracelake.domain.where import (
    Compare,
    InList,
    IsNull,
    Op,
    Predicate,
    Where,
    all_of,
    any_of,
    compare_columns,
)
from tracelake.domain.where_bounds import ColumnBounds, can_match
from tracelake.domain.where_parse import parse_where

BOUNDS = {
    "n": ColumnBounds(10, 20, False),
    "one": ColumnBounds(5, 5, True),
    "who": ColumnBounds("bob", "eve", False),
    "gone": ColumnBounds(None, None, True),
    "live": ColumnBounds(True, True, False),
}


@pytest.mark.parametrize(
    ("source", "possible"),
    [
        ("n >= 20", True),
        ("n > 20", False),
        ("n < 10", False),
        ("n <= 10.0", True),
        ("n <= 9.5", False),
        ("n = 15", True),
        ("n = 21", False),
        ("n <> 15", True),
        ("one <> 5", False),
        ("one = 5", True),
        ("n IN (1, 9, 21)", False),
        ("n IN (1, 15)", True),
        ("one NOT IN (4, 5)", False),
        ("one NOT IN (4, 6)", True),
        ("n IS NULL", False),
        ("one IS NULL", True),
        ("gone IS NULL", True),
        ("gone IS NOT NULL", False),
        ("gone = 1", False),
        ("gone <> 1", False),
        ("n IS NOT NULL", True),
        ("who = 'carol'", True),
        ("who = 'mallory'", False),
        ("who > 'eve'", False),
        ("live = false", False),
        ("live = true", True),
        ("n < one", False),
        ("n > one", True),
        ("n = gone", False),
        ("n > 20 OR who = 'carol'", True),
        ("n > 20 OR who = 'mallory'", False),
        ("n > 12 AND who = 'mallory'", False),
        ("n > 12 AND who = 'carol'", True),
        ("NOT (n <= 20)", False),
    ],
)
def test_ranges_exclude_what_lies_outside_of_them(source: str, possible: bool) -> None:
    assert can_match(parse_where(source).tree, BOUNDS) is possible


@pytest.mark.parametrize(
    "source", ["other = 1", "n = '21'", "who > 7", "live > 0", "n < who", "other IS NULL"]
)
def test_what_is_not_known_may_match(source: str) -> None:
    """Also two kinds: an engine may convert one side, whose ends need not be ends any more."""
    assert can_match(parse_where(source).tree, BOUNDS)


VALUES = st.integers(-3, 3) | st.sampled_from(["", "a", "b", "é"]) | st.booleans()
COLUMNS = st.sampled_from(["a", "b", "c"])
OPS = st.sampled_from(list(Op))
LEAVES: st.SearchStrategy[Predicate] = st.one_of(
    st.builds(Compare, COLUMNS, OPS, VALUES | st.sampled_from([0.5, -2.5, "1"])),
    st.builds(compare_columns, COLUMNS, OPS, COLUMNS),
    st.builds(InList, COLUMNS, st.lists(VALUES, min_size=1, max_size=3).map(tuple), st.booleans()),
    st.builds(IsNull, COLUMNS, st.booleans()),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, min_size=1, max_size=3).flatmap(
        lambda t: st.sampled_from([all_of(t), any_of(t)])
    ),
)


def column(draw: Any, kind: int, size: int) -> list[Any]:
    values = [st.integers(-3, 3), st.sampled_from(["", "a", "b", "é"]), st.booleans()][kind]
    return draw(st.lists(st.none() | values, min_size=size, max_size=size))  # type: ignore[no-any-return]


@st.composite
def tables(draw: Any) -> dict[str, list[Any]]:
    size = draw(st.integers(1, 4))
    return {name: column(draw, draw(st.integers(0, 2)), size) for name in ("a", "b", "c")}


@given(TREES, tables(), st.sets(COLUMNS))
def test_no_row_that_matches_is_ever_excluded(
    tree: Predicate, table: dict[str, list[Any]], unknown: set[str]
) -> None:
    bounds = {}
    for name, values in table.items():
        present = [value for value in values if value is not None]
        bounds[name] = ColumnBounds(
            min(present, default=None), max(present, default=None), len(present) < len(values)
        )
    where = Where.of(tree)
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    if any(where.matches(row) for row in rows):
        assert can_match(tree, {name: known for name, known in bounds.items() if name not in unknown})
