"""Why a log that looks like an event isn't taken for one."""

from __future__ import annotations

from enum import StrEnum


class Skip(StrEnum):
    """Counted by these names."""

    OTHER_LAYOUT = "other_layout"
    """The event's signature, but another number of topics: other parameters are indexed."""
    WRONG_LENGTH = "wrong_length"
    """Data or a topic is shorter or longer than the parameters are."""
    PADDING = "padding"
    """A value is out of its type's range, or what must be zero isn't."""
    BAD_BOOL = "bad_bool"
    BAD_OFFSET = "bad_offset"
    """An offset or a length points outside of the data, or twice to the same place."""
    BAD_UTF8 = "bad_utf8"


REASONS: tuple[Skip, ...] = tuple(Skip)
CODES: dict[Skip, int] = {reason: code for code, reason in enumerate(REASONS, 1)}
"""Numbers for arrays of reasons; 0 is a log that decodes."""


class Undecodable(Exception):
    def __init__(self, reason: Skip) -> None:
        super().__init__(reason.value)
        self.reason = reason
