"""What the invoker has started: kept in a file, so that its successor knows.

An attempt is written down before its function starts and again when its end has been told to the Dispatcher. A
successor of an invoker that was killed finds the attempts without an end, whose functions died with it, and
reports them at once; otherwise everybody would wait for their leases. Attempts that ended are remembered for a
while, so that an invocation that is delivered again is not run again.

One JSON object per line. Each is appended by one write that first ends the line before, so that a line that was cut
off, by a crash or a full disk, costs nothing but itself. What was written survives the process, which is all that
matters: a machine that went down took the Dispatcher's delivery down with it, and the lease is the answer to that.
The file holds lease tokens and is readable by its owner alone.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from uuid import UUID

import msgspec

MAX_REMEMBERED = 10_000
_COMPACT_AFTER = 4 * MAX_REMEMBERED

Key = tuple[UUID, int]


class Fence(msgspec.Struct, frozen=True):
    """Enough to say how an attempt ended."""

    task_id: UUID
    attempt: int
    lease_token: UUID

    @property
    def key(self) -> Key:
        return self.task_id, self.attempt

    def __repr__(self) -> str:
        return f"Fence({self.task_id}, attempt {self.attempt})"


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    begin: Fence | None = None
    end: Key | None = None


_decoder = msgspec.json.Decoder(_Line)


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[Key, Fence] = {}
        self._ended: OrderedDict[Key, None] = OrderedDict()
        self._lines = 0
        self._file = -1
        self._read()
        self._rewrite()

    def __contains__(self, key: Key) -> bool:
        return key in self._open or key in self._ended

    @property
    def unfinished(self) -> list[Fence]:
        return list(self._open.values())

    def begin(self, fence: Fence) -> None:
        self._append(_Line(begin=fence))
        self._open[fence.key] = fence

    def end(self, fence: Fence) -> None:
        self._open.pop(fence.key, None)
        self._remember(fence.key)
        self._append(_Line(end=fence.key))

    def close(self) -> None:
        os.close(self._file)
        self._file = -1

    def _append(self, line: _Line) -> None:
        data = b"\n" + msgspec.json.encode(line)
        written = os.write(self._file, data)
        if written != len(data):
            raise OSError(f"{self._path}: the disk took {written} of {len(data)} bytes")
        self._lines += 1
        if self._lines > _COMPACT_AFTER:
            self._rewrite()

    def _remember(self, key: Key) -> None:
        self._ended[key] = None
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def _read(self) -> None:
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return
        for text in lines:
            try:
                line = _decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if line.begin is not None:
                self._open[line.begin.key] = line.begin
            if line.end is not None:
                self._open.pop(line.end, None)
                self._remember(line.end)

    def _rewrite(self) -> None:
        """A shorter file in the place of the old one, whole or not at all."""
        kept = [_Line(end=key) for key in self._ended] + [_Line(begin=fence) for fence in self._open.values()]
        temporary = self._path.with_name(f".{self._path.name}.new")
        temporary.unlink(missing_ok=True)
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(os.dup(file), "wb") as out:
            out.writelines(msgspec.json.encode(line) + b"\n" for line in kept)
        os.replace(temporary, self._path)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._lines = file, len(kept)
