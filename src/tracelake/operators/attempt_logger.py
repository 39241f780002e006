"""``ctx.log``: one line per call, the message first and then what belongs to it as ``key=value``.

It writes to the standard error of the moment, which during an attempt is the attempt's log; who wants more uses
``print`` or ``logging``, which end up in the same place.
"""

from __future__ import annotations

import sys
import traceback
from datetime import UTC, datetime
from typing import Any


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
