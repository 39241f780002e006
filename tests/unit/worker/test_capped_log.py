"""A program's log has an end, whatever the program prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tracelake.program_log import LARGEST_FILE, LONGEST_LINE, CappedFile, CappedLog


def test_a_program_that_prints_without_end_fills_two_files_and_is_not_held_up(tmp_path: Path) -> None:
    log = CappedLog(tmp_path / "log")
    code = (
        "import os\nfor _ in range(400): os.write(1, b'x' * 99 + b'\\n' + b'y\\n' * 50000)\nprint('the end')"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=log.write_fd) as program:
        log.handed_on()
        assert program.wait(60) == 0
    log.drained(60)
    assert log.tail().endswith("the end\n")
    assert (tmp_path / "log").read_text().endswith("the end\n")
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) < 2 * LARGEST_FILE


def test_a_line_that_is_too_long_for_people_is_cut_however_it_comes(tmp_path: Path) -> None:
    file = CappedFile(tmp_path / "log")
    for piece in (b"short\n", b"l" * LONGEST_LINE, b"o" * 70, b"ng\nafter", b" it\n", b"\n"):
        file.write(piece)
    lines = (tmp_path / "log").read_bytes().split(b"\n")
    assert lines == [b"short", b"l" * LONGEST_LINE + b" (and 72 bytes more)", b"after it", b"", b""]


def test_a_log_in_whose_place_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("untouched")
    os.symlink(tmp_path / "elsewhere", tmp_path / "log")
    with pytest.raises(OSError, match="symbolic links"):
        CappedLog(tmp_path / "log")
    CappedFile(tmp_path / "log").write(b"x")
    assert (tmp_path / "elsewhere").read_text() == "untouched"
