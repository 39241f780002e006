"""What a query is asked with and how its answer is laid out, without a server."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from tracelake.cli.query import _place, read_params, read_value
from tracelake.cli.show import fit, print_rows
from tracelake.contracts.query_api import QueryRequest, from_wire, to_wire
from tracelake.domain.errors import Invalid


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("7", 7),
        ("-1.5", -1.5),
        ("true", True),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ("0xC0ffee", b"\xc0\xff\xee"),
        ("0x", b""),
        ("0xabc", "0xabc"),
        ('"0xab"', "0xab"),
        ('"7"', "7"),
        ("critical", "critical"),
        ("", ""),
        ("NaN", "NaN"),
        ('{"a": 1}', '{"a": 1}'),
        ("007", "007"),
        ("340282366920938463463374607431768211455", 2**128 - 1),
    ],
)
def test_a_parameter_is_read_as_what_it_looks_like(typed: str, value: Any) -> None:
    assert read_value(typed) == value
    assert type(read_value(typed)) is type(value)


def test_parameters_stand_in_order_or_have_names() -> None:
    assert read_params([]) is None
    assert read_params(["1", "a"]) == [1, "a"]
    assert read_params(["low=1", "who=a=b"]) == {"low": 1, "who": "a=b"}
    assert read_params(['"a=b"']) == ["a=b"]


@pytest.mark.parametrize("mixed", [["low=1", "2"], ["low=1", "low=2"]])
def test_parameters_that_contradict_each_other_are_refused(mixed: list[str]) -> None:
    with pytest.raises(typer.BadParameter):
        read_params(mixed)


def test_pythons_values_survive_the_way_to_the_service() -> None:
    given = [1, 2**200, 0.5, None, True, "text", b"\x00\xff", [b"\x01", "a"]]
    sent = msgspec.json.encode(QueryRequest(sql="SELECT 1", params=to_wire(given)))
    assert from_wire(msgspec.json.decode(sent, type=QueryRequest).params) == given


def test_what_json_has_no_word_for_is_sent_as_text() -> None:
    when = datetime(2026, 11, 2, 10, tzinfo=UTC)
    given = {"d": Decimal("1.10"), "t": when, "u": UUID(int=1), "f": float("inf")}
    assert to_wire(given) == {
        "d": "1.10",
        "t": "2026-11-02T10:00:00+00:00",
        "u": "00000000-0000-0000-0000-000000000001",
        "f": "inf",
    }


@pytest.mark.parametrize("unfit", [[object()], {"a": {"b": 1}}, "text", b"bytes"])
def test_what_cannot_be_a_parameter_is_refused_before_it_is_sent(unfit: Any) -> None:
    with pytest.raises(Invalid):
        to_wire(unfit)


@pytest.mark.parametrize(
    "unfit", [{}, {"blob": 1}, {"blob": "ab"}, {"blob": "0xa"}, {"blob": "0x", "more": 1}]
)
def test_an_object_that_is_no_blob_is_refused_with_its_place(unfit: Any) -> None:
    with pytest.raises(Invalid, match=r"params\[1\]"):
        from_wire([1, unfit])


@given(st.lists(st.integers(0, 500), min_size=1, max_size=30), st.integers(20, 250))
def test_columns_fit_the_terminal_and_none_is_wider_than_it_needs(natural: list[int], room: int) -> None:
    widths = fit(natural, room)
    assert 1 <= len(widths) <= len(natural)
    assert sum(widths) + 2 * (len(widths) - 1) <= room
    assert all(width <= needed for width, needed in zip(widths, natural, strict=False))


def test_without_a_terminal_nothing_is_cut() -> None:
    assert fit([3, 10_000], None) == [3, 10_000]


def test_rows_are_shown_by_type_and_harmlessly(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[1, "0x" + "ab" * 32, None, True, [1, "x"]], [1000, "0x", "a\x1b[2Jb", False, {"k": None}]]
    print_rows(["n", "hash", "text", "ok", "more"], ["BIGINT", "BLOB", "VARCHAR", "BOOLEAN", "JSON"], rows)
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["n", "hash", "text", "ok", "more"]
    assert out[1].startswith("   1  0xabab")
    assert out[1].endswith('NULL    true   [1, "x"]')
    assert "a [2Jb" in out[2]


@pytest.mark.parametrize(
    ("sql", "position", "shown"),
    [
        ("SELECT n FRO x", 13, ["LINE 1: SELECT n FRO x", "                     ^"]),
        ("SELECT 'üü'\nFRO x y", 18, ["LINE 2: FRO x y", "            ^"]),
        ("SELECT 1;", 9, ["LINE 1: SELECT 1;", "                 ^"]),
        (
            "x" * 100 + " oops " + "y" * 100,
            101,
            ["LINE 1: …" + "x" * 59 + " oops " + "y" * 55, " " * 69 + "^"],
        ),
    ],
)
def test_a_mistake_is_marked_where_it_is(sql: str, position: int, shown: list[str]) -> None:
    assert _place(sql, f"syntax error (at character {position})") == shown


def test_a_message_without_a_place_stands_alone() -> None:
    assert _place("SELECT 1", "there is no dataset x") == []
