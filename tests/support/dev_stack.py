"""``DevStack``: a real ``tracelake dev`` as a child of the test, and its command line.

Its output goes to files, so that no full pipe blocks it; it has a process group of its own, so that signals to
the whole group can be tested.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tracelake.dev.handle import DevHandle
from tracelake.stack_connection import DEV_FILE, read_handle

PATIENCE = 180.0
"""Generous, and only ever reached by a test that fails."""
_POLL = 0.02
_PROC = Path("/proc")

T = TypeVar("T")


def eventually(what: str, look: Callable[[], T | None]) -> T:
    """The first answer of ``look`` that is neither None nor False."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"never happened: {what}")
        time.sleep(_POLL)
    return found


def is_gone(pid: int) -> bool:
    """Ended, though nobody may have asked for its exit code yet."""
    try:
        stat = _PROC.joinpath(str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in ("Z", "X")


def descendants(pid: int) -> list[int]:
    """All processes below ``pid`` right now."""
    found: list[int] = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                stat = entry.joinpath("stat").read_text(encoding="utf-8", errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                found += [int(entry.name), *descendants(int(entry.name))]
    return found


def tracelake(
    *arguments: str | Path, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """One run of the command line, with nothing of the test's own settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRACELAKE_")}
    return subprocess.run(
        [sys.executable, "-m", "tracelake", *map(str, arguments)],
        env={**inherited, "NO_COLOR": "1", "COLUMNS": "200", **environment},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


class DevStack:
    def __init__(
        self, home: Path, output: Path, *options: str, workers: bool = False, **environment: str
    ) -> None:
        self.home = home
        self.stdout = output / "stdout"
        self.stderr = output / "stderr"
        output.mkdir(exist_ok=True)
        ports = ("--user-port", "0", "--internal-port", "0", *(() if workers else ("--no-workers",)))
        with self.stdout.open("wb") as out, self.stderr.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tracelake", "dev", "--home", str(home), *ports, *options],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def handle(self) -> DevHandle:
        found = self.find_handle()
        assert found is not None
        return found

    def find_handle(self) -> DevHandle | None:
        return read_handle(self.home / DEV_FILE, DevHandle)

    def until_ready(self) -> DevHandle:
        def ready() -> bool:
            if (code := self._process.poll()) is not None:
                raise AssertionError(f"ended with {code}: {self.output()}")
            return "ready\n" in self.stdout.read_text()

        eventually(f"the stack on {self.home} is ready", ready)
        return self.handle

    def output(self) -> str:
        return self.stdout.read_text() + self.stderr.read_text()

    def run(self, *arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return tracelake(*arguments, "--home", self.home, stdin=stdin)

    def send(self, number: signal.Signals, *, to_group: bool = False) -> None:
        if to_group:
            os.killpg(self.pid, number)
        else:
            self._process.send_signal(number)

    def wait(self, timeout: float = PATIENCE) -> int:
        return self._process.wait(timeout)

    def close(self) -> None:
        """However the test went, nothing stays."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
