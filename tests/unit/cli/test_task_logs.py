"""Logs of tasks as files on this machine: found by the beginning of an id, read while they grow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tracelake.cli.logs import Tail, logs
from tracelake.domain.errors import Invalid, NotFound

ONE = "0190b6c1-7e7a-4d3c-9c0e-5a3b0f6f2f11"
OTHER = "0190b6c1-0000-4d3c-9c0e-5a3b0f6f2f11"


def write(home: Path, task: str, attempt: int, text: str) -> Path:
    path = home / "logs" / "tasks" / task / f"{attempt}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write(tmp_path, ONE, 1, "first\nfailed\n")
    write(tmp_path, ONE, 2, "second\nwent\nwell\n")
    write(tmp_path, ONE, 10, "tenth\nunfinished")
    (tmp_path / "logs" / "dispatcher.log").write_text('{"event": "ready"}\n')
    return tmp_path


@pytest.mark.parametrize("name", [ONE, ONE.upper(), ONE.replace("-", ""), "0190b6", "0190B6C1-7e"])
def test_the_newest_attempt_is_shown_by_any_beginning_of_the_id(
    home: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    logs(name, home=home)
    assert capsys.readouterr().out == "tenth\nunfinished\n"


def test_an_attempt_or_all_of_them_or_their_last_lines(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs(ONE, home=home, attempt=1)
    assert capsys.readouterr().out == "first\nfailed\n"
    logs(ONE, home=home, every=True, lines=1)
    assert capsys.readouterr().out.splitlines() == [
        "==> attempt 1 <==",
        "failed",
        "==> attempt 2 <==",
        "well",
        "==> attempt 10 <==",
        "unfinished",
    ]
    logs(ONE, home=home, attempt=2, lines=0)
    assert capsys.readouterr().out == ""


def test_programs_get_a_line_with_its_attempt(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs(ONE, home=home, every=True, as_json=True)
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert entries[0] == {"task_id": ONE, "attempt": 1, "line": "first"}
    assert [entry["attempt"] for entry in entries] == [1, 1, 2, 2, 2, 10, 10]


def test_without_a_stack_a_followed_log_ends_where_it_ends(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs("0190b6c1", home=home, follow=True)
    assert capsys.readouterr().out == "tenth\nunfinished\n"
    logs("0190b6c1", home=home, follow=True, every=True, lines=1)
    assert capsys.readouterr().out.count("==> attempt") == 3


def test_what_an_operator_prints_does_not_take_over_the_terminal(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(home, ONE, 11, "\x1b[2Jcleared\ta\udcff\r\n")
    logs(ONE, home=home)
    assert capsys.readouterr().out == " [2Jcleared     a\ufffd \n"


def test_a_beginning_that_fits_several_tasks_is_refused_with_them(home: Path) -> None:
    write(home, OTHER, 1, "other\n")
    with pytest.raises(Invalid) as refused:
        logs("0190b6c1", home=home)
    assert refused.value.reason == "AmbiguousTask"
    assert ONE in refused.value.message
    assert OTHER in refused.value.message


def test_a_part_comes_before_a_task_of_the_same_letters(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "logs" / "0190b6c1.log").write_text("a part\n")
    logs("0190b6c1", home=home)
    assert capsys.readouterr().out == "a part\n"


@pytest.mark.parametrize("name", ["ffffff", "0190b", "nobody", "../../etc", OTHER])
def test_what_has_no_log_is_told_so(home: Path, name: str) -> None:
    with pytest.raises(NotFound) as refused:
        logs(name, home=home)
    assert name in refused.value.message


def test_without_a_stack_an_attempt_that_has_no_log_is_told_so(home: Path) -> None:
    for follow in (False, True):
        with pytest.raises(NotFound) as refused:
            logs(ONE, home=home, attempt=3, follow=follow)
        assert refused.value.reason == "NoTaskLog"


def test_each_line_is_read_once_however_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    tail = Tail(path)
    assert list(tail.lines()) == []
    with path.open("wb", buffering=0) as file:
        found: list[bytes] = []
        for piece in (b"on", b"e\ntwo\n", b"\n", b"x" * 3_000_000, b"\nend"):
            file.write(piece)
            found += tail.lines()
    assert found == [b"one", b"two", b"", b"x" * 3_000_000]
    assert (list(tail.rest()), list(tail.rest())) == ([b"end"], [])


def test_a_log_that_was_begun_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("a long first line\nand more")
    tail = Tail(path)
    assert list(tail.lines()) == [b"a long first line"]
    path.write_text("new\n")
    assert list(tail.lines()) == [b"new"]
    path.unlink()
    assert list(tail.lines()) == []
