"""The process as one attempt finds it: its own environment, folder and log, and nothing of the one before.

On the way out everything is put back, standard output and error first: once they lead nowhere, the wrapper sees
the end of the attempt's log.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

PATH = "/usr/local/bin:/usr/bin:/bin"


@contextmanager
def attempt_stage(environment: Mapping[str, str], log: int, work_folder: Path) -> Iterator[Path]:
    """``log`` is closed here. Raises ``OSError`` when there's no room for a folder."""
    before = Path.cwd()
    folder: Path | None = None
    try:
        _lead_to(log)
        folder = Path(tempfile.mkdtemp(prefix="attempt-", dir=work_folder))
        _set_environment({**environment, **_minimal(folder)})
        os.chdir(folder)
        yield folder
    finally:
        _set_environment(_minimal(work_folder))
        os.chdir(before)
        _flush()
        lead_nowhere()
        os.umask(0o022)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def lead_nowhere() -> None:
    """Standard input, output and error to ``/dev/null``; ``print`` then costs nothing and disturbs nobody."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    if null > 2:
        os.close(null)


def _lead_to(log: int) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = _stream(1)
    sys.stderr = _stream(2)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        force=True,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def _stream(descriptor: int) -> TextIO:
    """By lines, so that a log can be followed; and without ever failing at a character."""
    return os.fdopen(descriptor, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    # Otherwise the first attempt's answer is kept for all that follow.
    tempfile.tempdir = None


def _minimal(folder: Path) -> dict[str, str]:
    return {"PATH": PATH, "HOME": str(folder), "LANG": "C.UTF-8", "TMPDIR": str(folder)}
