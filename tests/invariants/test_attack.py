"""A part of ``make attack``, the quick one: hostile code and neighbours against one running stack, each refused.

The whole of it, also as a user without power, is ``make attack``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.attack.__main__ import left_out
from tests.support.attack.attack import Attack, attacks, carry_out
from tests.support.attack.least_privilege import PAGE, tables, unlisted
from tests.support.attack.stack import AttackedStack, attacked_stack

pytestmark = pytest.mark.xdist_group("attack")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedStack]:
    with attacked_stack(tmp_path_factory.mktemp("attack")) as stack:
        yield stack


@pytest.mark.parametrize("each", attacks(quick=True), ids=lambda each: f"{each.by}-{each.name}")
def test_it_is_refused(stack: AttackedStack, each: Attack) -> None:
    if left_out(each, stack):
        return
    result = carry_out(each, stack)
    assert result.ok, f"{each.tried}: expected: {each.expected}; happened: {result.happened}"


GONE = (
    ("Processes", "process", "sink", "process"),
    ("Roles", "role", "`tracelake_reader`", "role of data: tracelake_reader"),
    ("Grants", "on", "`table catalog.query_audit`", "grant in tracelake_state: tracelake_audit"),
    ("Files", "path below the home", "`keys`, `keys/*`", "file: keys"),
    ("Sockets", "process", "Postgres", "socket of Postgres"),
)


def test_what_the_tables_do_not_list_is_found(stack: AttackedStack) -> None:
    """Otherwise a walk that finds nothing would prove nothing."""
    page = tables(PAGE.read_text(encoding="utf-8"))
    less = {**page}
    for heading, column, gone, _ in GONE:
        less[heading] = [row for row in page[heading] if row[column] != gone]
        assert len(less[heading]) == len(page[heading]) - 1
    paths = "path below the home"
    less["Files"] = [
        {**row, "mode": "0000"} if "worker_tokens" in row[paths] else row for row in less["Files"]
    ]
    dropped = stack.home / "dropped"
    dropped.write_text("x")
    try:
        found = unlisted(stack, less)
    finally:
        dropped.unlink()
    for *_, named in (*GONE, ("file: dropped",), ("file: worker_tokens is 0600",)):
        assert any(line.startswith(named) for line in found), (named, found)


def test_the_table_of_attacks_reaches_every_attacker() -> None:
    every = attacks()
    assert {each.by for each in every} == {
        "sql",
        "operator",
        "function",
        "dag",
        "http",
        "neighbour",
        "installation",
    }
    assert all(each.tried and each.expected and each.on for each in every)
    assert Path(PAGE).exists()
