"""The process as one attempt finds it: its own environment, folder and log, and nothing of the one before.

On the way out everything is put back, standard output and error first: once they lead nowhere, the wrapper sees
the end of the attempt's log. What an attempt has left as it was, an empty folder, open streams, the handler of its
log messages, serves the next one as well: making it anew costs more than a short attempt itself.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from tracelake.trees import remove_if_possible

PATH = "/usr/local/bin:/usr/bin:/bin"
_FORMAT = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")


class Stage:
    """Of one process, for one attempt after another."""

    def __init__(self, work_folder: Path) -> None:
        self._work_folder = str(work_folder)
        self._before = os.getcwd()
        self._folder: str | None = None
        self._made: os.stat_result | None = None
        self._streams: tuple[TextIO, TextIO] | None = None
        self._handler: logging.StreamHandler[TextIO] | None = None

    @contextmanager
    def attempt(self, environment: Mapping[str, str], log: int) -> Iterator[None]:
        """``log`` is closed here. Raises ``OSError`` when there's no room for a folder."""
        try:
            self._lead_to(log)
            folder = self._make_folder()
            _set_environment({**environment, **_minimal(folder)})
            os.chdir(folder)
            yield
        finally:
            _set_environment(_minimal(self._work_folder))
            os.chdir(self._before)
            self._flush()
            lead_nowhere()
            # What nobody wanted to read must not come out in the next attempt's log.
            self._flush()
            os.umask(0o022)
            self._clear_folder()

    def close(self) -> None:
        if self._folder is not None:
            remove_if_possible(self._folder)
            self._folder = None

    def _make_folder(self) -> str:
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="attempt-", dir=self._work_folder)
            self._made = os.stat(self._folder)
        return self._folder

    def _clear_folder(self) -> None:
        """It stays only if it is the same folder, for the same people, and empty."""
        if self._folder is None or self._made is None:
            return
        try:
            now = os.lstat(self._folder)
            untouched = _identity(now) == _identity(self._made) and not os.listdir(self._folder)
        except OSError:
            untouched = False
        if not untouched:
            self.close()

    def _lead_to(self, log: int) -> None:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        if self._streams is None or not all(map(_is_as_made, self._streams)):
            self._streams = _stream(1), _stream(2)
        sys.stdout, sys.stderr = self._streams
        self._handle_messages(sys.stderr)

    def _flush(self) -> None:
        """The operator may have put others in their place."""
        for stream in (*(self._streams or ()), sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()

    def _handle_messages(self, stream: TextIO) -> None:
        """Those of ``logging``, whatever an earlier attempt did to it."""
        root, handler = logging.root, self._handler
        if handler is None or handler.stream is not stream or not _passes_all(handler):
            handler = logging.StreamHandler(stream)
            handler.setFormatter(_FORMAT)
            self._handler = handler
        if root.handlers != [handler]:
            logging.basicConfig(handlers=[handler], force=True)
        if root.level != logging.INFO:
            root.setLevel(logging.INFO)


def lead_nowhere() -> None:
    """Standard input, output and error to ``/dev/null``; ``print`` then costs nothing and disturbs nobody."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    if null > 2:
        os.close(null)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)


def _stream(descriptor: int) -> TextIO:
    """By lines, so that a log can be followed; and without ever failing at a character."""
    return os.fdopen(descriptor, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _is_as_made(stream: TextIO) -> bool:
    try:
        settings = (stream.closed, stream.encoding, stream.errors, stream.line_buffering)
    except ValueError:
        # Detached from its descriptor.
        return False
    return settings == (False, "utf-8", "backslashreplace", True)


def _passes_all(handler: logging.Handler) -> bool:
    return handler.formatter is _FORMAT and handler.level == logging.NOTSET and not handler.filters


def _set_environment(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    # Otherwise the first attempt's answer is kept for all that follow.
    tempfile.tempdir = None


def _minimal(folder: str) -> dict[str, str]:
    return {"PATH": PATH, "HOME": folder, "LANG": "C.UTF-8", "TMPDIR": folder}
