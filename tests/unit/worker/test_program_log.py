"""What a program prints is heard line by line, kept within bounds, and never costs the program."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from tracelake import program_log
from tracelake.program_log import CappedFile, ProgramLog


async def test_every_line_is_heard_and_written(tmp_path: Path) -> None:
    heard: list[str] = []
    log = ProgramLog(tmp_path / "log", heard.append)

    os.write(log.write_fd, b"one\ntw")
    os.write(log.write_fd, b"o\r\n\xff\n")
    log.handed_on()
    await log.drained(10)

    assert heard == ["one", "two", "�"]
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\r\n\xff\n"


async def test_the_end_of_the_log_leaves_stack_traces_out(tmp_path: Path) -> None:
    log = ProgramLog(tmp_path / "log", lambda line: None)

    os.write(log.write_fd, b"java.lang.Error: why\n\tat a.b.C\n\t... 3 more\nbye\n")
    log.handed_on()
    await log.drained(10)

    assert log.tail() == "java.lang.Error: why\nbye"
    assert log.tail(1) == "bye"


async def test_a_line_without_an_end_is_cut(tmp_path: Path) -> None:
    heard: list[str] = []
    log = ProgramLog(tmp_path / "log", heard.append)

    os.write(log.write_fd, b"x" * 40_000)
    log.handed_on()
    await log.drained(10)

    assert [len(line) for line in heard] == [16 * 1024]


async def test_the_file_is_replaced_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_log, "CappedFile", partial(CappedFile, largest=10))
    (tmp_path / "log").write_text("more than ten bytes\n")
    log = ProgramLog(tmp_path / "log", lambda line: None)

    os.write(log.write_fd, b"new\n")
    log.handed_on()
    await log.drained(10)

    assert (tmp_path / "log").read_text() == "new\n"
    assert (tmp_path / "log.1").read_text() == "more than ten bytes\n"


async def test_a_log_that_cannot_be_written_is_still_heard(tmp_path: Path) -> None:
    heard: list[str] = []
    log = ProgramLog(tmp_path / "absent" / "log", heard.append)

    os.write(log.write_fd, b"one\n")
    log.handed_on()
    await log.drained(10)

    assert heard == ["one"]


async def test_a_link_in_place_of_the_log_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("untouched")
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    log = ProgramLog(tmp_path / "log", lambda line: None)

    os.write(log.write_fd, b"one\n")
    log.handed_on()
    await log.drained(10)

    assert (tmp_path / "elsewhere").read_text() == "untouched"
