"""The file in which a process says that it takes work: its own id, and nothing once it has ended."""

from __future__ import annotations

import os
from pathlib import Path


def say_ready(file: Path | None) -> None:
    if file is not None:
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(f"{os.getpid()}\n")


def says_ready(file: Path, pid: int) -> bool:
    """Whether it is this process that says so, and not one before it."""
    try:
        return file.read_text().strip() == str(pid)
    except FileNotFoundError:
        return False
