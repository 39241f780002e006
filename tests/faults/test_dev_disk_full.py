"""``tracelake dev`` on a disk without room: a line that says so, no traceback, and nothing half written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PAGE = 4096
PROGRAM = """
import errno, sys
from pathlib import Path
from tracelake.cli.failures import explain
from tracelake.dev.handle import QueryHandle, write_handle
from tracelake.dev.home import Home
from tracelake.dev.home_checks import take_over

home = Home(Path(sys.argv[1]))
with (home.folder / "filler").open("wb", buffering=0) as filler:
    try:
        while True:
            filler.write(b"x" * 4096)
    except OSError as error:
        assert error.errno == errno.ENOSPC
for write in (
    lambda: write_handle(home.folder / "dev.json", QueryHandle("http://127.0.0.1:1", 1)),
    home.secrets,
    home.data_secrets,
    lambda: home.worker_tokens,
    lambda: take_over(home),
):
    try:
        write()
    except Exception as error:
        print("; ".join(explain(error)))
    else:
        print("written")
print(sorted(path.name for path in home.folder.iterdir()))
"""


def on_disk_of(size: int, folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("bwrap")
    assert program is not None
    held = [program, "--dev-bind", "/", "/", "--size", str(size), "--tmpfs", str(folder)]
    return subprocess.run([*held, sys.executable, *argv], capture_output=True, text=True, check=False)


def test_a_stack_on_a_small_disk_is_refused_in_one_line(tmp_path: Path) -> None:
    refused = on_disk_of(
        8 * 1024 * 1024,
        tmp_path,
        *("-m", "tracelake", "dev", "--home", str(tmp_path / "home"), "--port", "auto", "--no-workers"),
    )
    assert refused.returncode == 1
    assert refused.stdout == ""
    [line] = refused.stderr.splitlines()
    assert line.startswith("error: only ")
    assert "free some space" in line


def test_what_finds_no_room_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    ended = on_disk_of(64 * PAGE, tmp_path, "-c", PROGRAM, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    *said, left = ended.stdout.splitlines()
    full = os.strerror(28)
    assert said == [
        f"error: can't write {tmp_path / 'dev.json'}: {full}",
        *(
            f"error: can't write {tmp_path / name}: {full}; make room for it, or choose another home"
            for name in ("secrets.json", "data_secrets.json", "worker_tokens", "VERSION")
        ),
    ]
    assert left == "['filler']"
