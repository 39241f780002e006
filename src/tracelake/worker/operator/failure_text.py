"""An exception as one short text for the task's row, whatever the exception is like.

It may have no message, a message of megabytes or one with characters that no database takes; its ``__str__`` may
itself raise. Values of the attempt's own secrets don't get out by this way.
"""

from __future__ import annotations

from collections.abc import Mapping

from tracelake.domain.errors import TracelakeError

MAX_BYTES = 4096
_SHORTEST_SECRET = 4


def failure_text(error: BaseException, environment: Mapping[str, str]) -> str:
    name = error.reason if isinstance(error, TracelakeError) else type(error).__name__
    if isinstance(error, SystemExit):
        return f"SystemExit: the operator called exit({error.code!r}) instead of returning"[:MAX_BYTES]
    try:
        message = str(error).strip()
    except Exception as worse:
        message = f"(its message can't be shown: {type(worse).__name__})"
    text = f"{name}: {message}" if message else f"{name} without a message"
    for value in _secrets(environment):
        text = text.replace(value, "…")
    return _bounded(text)


def holds_secrets(environment: Mapping[str, str]) -> bool:
    """Whether the attempt was given more than the platform's own variables."""
    return any(not name.startswith("TRACE_") for name in environment)


def _secrets(environment: Mapping[str, str]) -> list[str]:
    """The longest first, since one may be part of another."""
    values = {
        value
        for name, value in environment.items()
        if (not name.startswith("TRACE_") or name.endswith("_TOKEN")) and len(value) >= _SHORTEST_SECRET
    }
    return sorted(values, key=len, reverse=True)


def _bounded(text: str) -> str:
    encoded = text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace")
    if len(encoded) <= MAX_BYTES:
        return encoded.decode()
    return encoded[: MAX_BYTES - 3].decode("utf-8", "ignore") + "…"
