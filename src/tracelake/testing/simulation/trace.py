"""What happened, line by line, and one hash over all of it: two runs of a seed must agree in every line."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

START = datetime(2030, 1, 1, tzinfo=UTC)


class Trace:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._hash = hashlib.sha256()

    def add(self, now: datetime, actor: str, label: str, result: str) -> None:
        at = (now - START) / timedelta(seconds=1)
        line = f"{len(self.lines):5d} {at:8.1f}s {actor:<12} {label:<58.58} {result}"
        self.lines.append(line)
        self._hash.update(line.encode())

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def summary(result: Any) -> str:
    """A result in a few characters that differ when the result does."""
    if isinstance(result, BaseException):
        return f"{type(result).__name__}: {result}"[:100]
    if isinstance(result, Sequence) and not isinstance(result, str):
        return f"{len(result)} rows {zlib.crc32(repr(result).encode()):08x}"
    return "" if result is None else str(result)[:60]
