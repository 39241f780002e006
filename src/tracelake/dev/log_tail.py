"""The end of a part's log, read backwards from what may be a large file."""

from __future__ import annotations

from pathlib import Path

_TAIL_BYTES = 64 * 1024
_LAST_LINES = 5


def last_lines(log: Path) -> tuple[str, ...]:
    """Nothing without a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ()
    return tuple(line for line in lines if line.strip())[-_LAST_LINES:]
