"""Progress as people see it: flat, small, and no more often than anybody can read.

Reports are merged, so that what Spark says and what the operator says stand side by side; they are sent a few
times a second at most, and the last one always, also when the operator then computes in silence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tracelake.contracts.dispatcher_api import MAX_PROGRESS_BYTES

EVERY_SECONDS = 0.25
MAX_TEXT = 500


class Progress:
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
        return value if value - value == 0 else str(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    return str(value)[:MAX_TEXT].encode("utf-8", "backslashreplace").decode().replace("\x00", "")
