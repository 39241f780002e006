"""Attempt logs: everything is drained, secrets are taken out, and nothing that is printed can hurt."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.operator_scene import attempt, make_home, running_host
from tracelake.domain.errors import Invalid
from tracelake.worker.attempt_log import MASK, AttemptLog, LogFile, Redaction, sweep_logs

TASK = "5f0d7e9a-9d0b-4a53-8f5b-0d1f2a7f4c11"
SECRET = "pässword/with\nlines+and=signs"


async def print_to(log: AttemptLog, *pieces: bytes) -> None:
    """As an operator would, which waits when the pipe is full."""
    end = os.dup(log.write_fd)

    def write() -> None:
        try:
            for piece in pieces:
                rest = memoryview(piece)
                while rest:
                    rest = rest[os.write(end, rest) :]
        finally:
            os.close(end)

    await asyncio.to_thread(write)


async def test_what_is_printed_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    log = AttemptLog.open(tmp_path / "logs", TASK, 3, [])
    await print_to(log, b"first\n", b"second, unfinished")
    log.note("killed: timeout after 600 s")
    await log.close()
    path = tmp_path / "logs" / TASK / "3.log"
    assert log.path == path
    assert path.read_text() == "first\nsecond, unfinished\n[tracelake] killed: timeout after 600 s\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_lines_are_there_while_the_attempt_runs(tmp_path: Path) -> None:
    log = AttemptLog.open(tmp_path, TASK, 1, ["a secret"])
    await print_to(log, b"a line\n")
    async with asyncio.timeout(30):
        while not log.path.exists():
            await asyncio.sleep(0.01)
    assert log.path.read_text() == "a line\n"
    await log.close()


async def test_an_attempt_that_prints_nothing_has_no_file(tmp_path: Path) -> None:
    log = AttemptLog.open(tmp_path, TASK, 1, [])
    await log.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("printed", [100 * 1024 * 1024, 3_000_000])
async def test_too_much_output_is_drained_and_cut(tmp_path: Path, printed: int) -> None:
    log = AttemptLog(LogFile(tmp_path / "cut.log"), [SECRET], cap=1_000_000)
    line = b"x" * 1_000_000
    await print_to(log, *[line] * (printed // len(line)))
    log.note("said at the end")
    await log.close()
    kept = (tmp_path / "cut.log").read_text()
    assert len(kept) < 1_001_000
    assert kept.startswith("x" * 1_000_000 + "\n[tracelake] the log is cut here")
    assert kept.rstrip().endswith("bytes more were printed and not kept")
    assert "said at the end" in kept


async def test_a_leftover_that_keeps_the_pipe_open_is_not_waited_for(tmp_path: Path) -> None:
    log = AttemptLog.open(tmp_path, TASK, 1, [])
    leftover = os.dup(log.write_fd)
    os.write(leftover, b"before\n")
    await log.close()
    with pytest.raises(BrokenPipeError):
        os.write(leftover, b"after\n")
    os.close(leftover)
    assert log.path.read_text() == "before\n"


async def test_a_process_that_is_used_again_can_not_write_into_the_log_before(tmp_path: Path) -> None:
    keep = """
    import builtins, os
    builtins.kept = os.dup(1)
    print("first")
    """
    write = """
    import builtins, os
    try:
        os.write(builtins.kept, b"into the former log")
    except BrokenPipeError:
        print("refused")
    """
    async with running_host(make_home(tmp_path)) as host:
        process = await host.spawn(host.spec.operators[0])
        assert (await attempt(process, keep)).output == "first\n"
        assert (await attempt(process, write)).output == "refused\n"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_secrets_are_taken_out_wherever_the_output_is_cut_into_pieces(
    tmp_path: Path, size: int
) -> None:
    token = "eyJhbGciOiJFUzI1NiJ9.eyJqdGkiOiJ4In0.c2lnbmF0dXJl"
    said = (
        f"token {token}\nrepr {SECRET!r}\n{SECRET}\nurl p%C3%A4ssword%2Fwith%0Alines%2Band%3Dsigns eyJhbGc!\n"
    )
    log = AttemptLog.open(tmp_path, TASK, 1, [token, SECRET])
    data = said.encode()
    await print_to(log, *(data[place : place + size] for place in range(0, len(data), size)))
    log.note(f"and {token}")
    await log.close()
    kept = log.path.read_text()
    assert token not in kept
    for part in ("ssword", "lines+and", "c2lnbmF0"):
        assert part not in kept
    assert "eyJhbGc!" in kept


@given(
    secrets=st.lists(st.text("abc", min_size=4, max_size=8), min_size=1, max_size=3),
    text=st.text("abc ", max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=8),
)
def test_no_secret_survives_any_cut_and_nothing_else_is_lost(
    secrets: list[str], text: str, cuts: list[int]
) -> None:
    redaction = Redaction(secrets)
    places = sorted({0, *cuts, len(text)})
    shown = b"".join(redaction.feed(text[begin:end].encode()) for begin, end in pairwise(places))
    shown += redaction.finish()
    assert not any(secret.encode() in shown for secret in secrets)
    if not any(secret in text for secret in secrets):
        assert shown == text.encode()
    else:
        assert MASK in shown


def test_what_can_be_no_secret_is_shown_at_once() -> None:
    redaction = Redaction(["secret-value"])
    assert redaction.feed(b"progress 10 %\r") == b"progress 10 %\r"
    assert redaction.feed(b"sec") == b""
    assert redaction.feed(b"ond") == b"second"


@pytest.mark.parametrize(
    ("task_id", "attempt_number"),
    [
        ("../../etc/passwd", 1),
        ("", 1),
        (f"{TASK}/..", 1),
        (TASK, 0),
        (TASK, -1),
        (TASK, True),
        (TASK, "1/../x"),
    ],
)
async def test_a_name_that_leads_elsewhere_is_refused(
    tmp_path: Path, task_id: str, attempt_number: int
) -> None:
    with pytest.raises(Invalid):
        AttemptLog.open(tmp_path, task_id, attempt_number, [])


async def test_a_link_in_the_files_place_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("untouched")
    (tmp_path / TASK).mkdir()
    (tmp_path / TASK / "1.log").symlink_to(target)
    log = AttemptLog.open(tmp_path, TASK, 1, [])
    await print_to(log, b"text\n")
    await log.close()
    assert target.read_text() == "untouched"


def test_a_full_disk_loses_lines_and_says_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LogFile(tmp_path / TASK / "1.log")
    file.write(b"before\n")
    real: Callable[[int, memoryview], int] = os.write

    def full(_: int, __: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tracelake.worker.attempt_log.os.write", full)
    file.write(b"lost line\n")
    file.write(b"another\n")
    monkeypatch.setattr("tracelake.worker.attempt_log.os.write", real)
    file.write(b"after\n")
    file.close()
    told = "[tracelake] 18 bytes were lost here: No space left on device"
    assert file.path.read_text() == f"before\n{told}\nafter\n"


async def test_a_folder_that_can_not_be_made_does_not_stop_the_attempt(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file, not a folder")
    log = AttemptLog.open(tmp_path / "logs", TASK, 1, [])
    await print_to(log, b"x" * 1_000_000)
    log.note("the end")
    await log.close()


def test_old_logs_and_those_that_are_too_many_are_removed(tmp_path: Path) -> None:
    now = time.time()
    for number, age in enumerate((0, 10, 20, 30, 1000)):
        path = tmp_path / str(uuid4()) / "1.log"
        path.parent.mkdir()
        path.write_bytes(b"x" * 100)
        os.utime(path, (now - age, now - age))
        if number == 0:
            newest = path
    (tmp_path / "not a log").write_text("stays")
    assert sweep_logs(tmp_path, seconds=100, total=10_000, now=now) == 1
    assert sweep_logs(tmp_path, seconds=100, total=250, now=now) == 2
    assert newest.exists()
    assert len(list(tmp_path.iterdir())) == 3
    assert sweep_logs(tmp_path / "nowhere", now=now) == 0
