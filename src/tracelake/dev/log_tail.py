"""The end of a part's log, read backwards from what may be a large file."""

from __future__ import annotations

from pathlib import Path

_TAIL_BYTES = 64 * 1024
_LAST_LINES = 5


def lines_since(log: Path, since: int) -> list[str]:
    """What was said after the first ``since`` bytes, or the end of it when that is much; nothing without a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def last_lines(log: Path) -> tuple[str, ...]:
    return tuple(line for line in lines_since(log, 0) if line.strip())[-_LAST_LINES:]
