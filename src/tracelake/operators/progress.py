"""``ProgressReporter`` and ``AttemptLogger``, which ``ctx.progress`` and ``ctx.log`` use.

Progress is flat and small. Reports are merged, so that Spark's fields stand beside the operator's; they are sent a
few times a second at most, and the last one always, even if the operator then computes without another call.

A log line has the message first and then its fields as ``key=value``. It is written to the current standard error,
which during an attempt is the attempt's log; ``print`` and ``logging`` go there as well.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from tracelake.contracts.dispatcher_api import MAX_PROGRESS_BYTES

EVERY_SECONDS = 0.25
MAX_TEXT = 500


class ProgressReporter:
    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._fields: dict[str, Any] = {}
        self._sent_at: float | None = None
        self._unsent = False
        self._waiting = False
        self._over = threading.Event()

    def update(self, fields: Mapping[str, Any]) -> None:
        with self._lock:
            merged = {
                **self._fields,
                **{str(key)[:200]: _plain(value) for key, value in fields.items() if key},
            }
            # Checked before the fields are kept, so that one bad report doesn't spoil those after it.
            if len(msgspec.json.encode(merged)) > MAX_PROGRESS_BYTES:
                raise ValueError(f"progress is for a few small fields: at most {MAX_PROGRESS_BYTES} bytes")
            self._fields = merged
            self._unsent = True
            if self._sent_at is None or time.monotonic() - self._sent_at >= EVERY_SECONDS:
                self._flush()
            elif not self._waiting:
                self._waiting = True
                threading.Thread(target=self._send_later, name="progress", daemon=True).start()

    def finish(self) -> None:
        # Before the lock is taken: a thread that waits must not send anything after the last report.
        self._over.set()
        with self._lock:
            self._flush()

    def _send_later(self) -> None:
        self._over.wait(EVERY_SECONDS)
        with self._lock:
            self._waiting = False
            if not self._over.is_set():
                self._flush()

    def _flush(self) -> None:
        if self._unsent:
            self._unsent = False
            self._sent_at = time.monotonic()
            self._send(dict(self._fields))


def _plain(value: Any) -> str | int | float | bool | None:
    if isinstance(value, float):
        # JSON has neither NaN nor infinity.
        return value if value - value == 0 else str(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Many JSON readers can't hold larger numbers.
        return value if -(2**63) <= value < 2**63 else str(value)
    return str(value)[:MAX_TEXT].encode("utf-8", "backslashreplace").decode().replace("\x00", "")


class AttemptLogger:
    def debug(self, message: str, **fields: Any) -> None:
        self._write("debug", message, fields)

    def info(self, message: str, **fields: Any) -> None:
        self._write("info", message, fields)

    def warning(self, message: str, **fields: Any) -> None:
        self._write("warning", message, fields)

    def error(self, message: str, **fields: Any) -> None:
        self._write("error", message, fields)

    def exception(self, message: str, **fields: Any) -> None:
        """An error with the traceback of the exception that is being handled."""
        self._write("error", message, fields)
        sys.stderr.write(traceback.format_exc())

    def _write(self, level: str, message: str, fields: dict[str, Any]) -> None:
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        more = "".join(f" {key}={_shown(value)}" for key, value in fields.items())
        sys.stderr.write(f"{at} {level:<7} {message}{more}\n")


def _shown(value: Any) -> str:
    text = str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)
