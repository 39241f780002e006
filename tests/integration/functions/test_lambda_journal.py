"""The invoker's journal: what a successor finds in it, whatever the predecessor's last moment was."""

from __future__ import annotations

import stat
from pathlib import Path
from uuid import uuid4

from tracelake.worker.lambda_ import journal
from tracelake.worker.lambda_.journal import AttemptFence, Journal


def fence() -> AttemptFence:
    return AttemptFence(uuid4(), 1, uuid4())


def reopened(path: Path) -> Journal:
    """As a successor would; the predecessor never closed it."""
    return Journal(path)


def test_a_successor_finds_what_had_no_end(tmp_path: Path) -> None:
    first = Journal(tmp_path / "journal")
    done, left = fence(), fence()
    first.begin(done)
    first.begin(left)
    first.end(done)
    second = reopened(tmp_path / "journal")
    assert second.unfinished == [left]
    assert done.key in second
    assert left.key in second
    assert fence().key not in second
    first.close()
    second.close()


def test_a_line_that_was_cut_off_is_ignored_and_the_file_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = Journal(path)
    left = fence()
    first.begin(left)
    first.close()
    with path.open("ab") as file:
        file.write(b'\n{"begin":{"task_id":"0000')
    second = Journal(path)
    assert second.unfinished == [left]
    second.end(left)
    second.close()
    third = Journal(path)
    assert third.unfinished == []
    third.close()


def test_garbage_in_the_file_costs_nothing_but_itself(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = Journal(path)
    left = fence()
    first.begin(left)
    first.close()
    path.write_bytes(b"\xff\xfe\n[]\n{}\n" + path.read_bytes() + b'\n{"begin": 3}\n')
    second = Journal(path)
    assert second.unfinished == [left]
    second.close()


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    opened = Journal(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    opened.close()


def test_it_does_not_grow_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    opened = Journal(path)
    kept = fence()
    opened.begin(kept)
    for _ in range(journal.MAX_REMEMBERED * 3):
        each = fence()
        opened.begin(each)
        opened.end(each)
    assert len(path.read_bytes().splitlines()) <= 5 * journal.MAX_REMEMBERED
    assert each.key in opened
    opened.close()
    again = Journal(path)
    assert again.unfinished == [kept]
    again.close()
