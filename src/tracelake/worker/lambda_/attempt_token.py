"""The one token that a function may speak with: the one it was invoked with, or one that a heartbeat renewed.

A warm environment has seen other attempts' tokens, and a function may have been told one by another. So the gateway
asks before anything is passed on. Whether a token is genuine is for the Dispatcher to say: signed, and of this very
task and attempt, it can do no more than the function's own.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from dataclasses import dataclass, field
from uuid import UUID

import msgspec

_MAX_TOKEN = 16 * 1024
_TOKEN = re.compile(r"[A-Za-z0-9_-]+\.([A-Za-z0-9_-]+)\.[A-Za-z0-9_-]+", re.ASCII)


class _Claims(msgspec.Struct, frozen=True):
    task_id: UUID
    attempt: int


_decoder = msgspec.json.Decoder(_Claims)


@dataclass(frozen=True, slots=True)
class AttemptToken:
    token: str = field(repr=False)
    task_id: UUID
    attempt: int

    def is_own(self, presented: str) -> bool:
        if hmac.compare_digest(presented.encode(), self.token.encode()):
            return True
        return _claims(presented) == _Claims(self.task_id, self.attempt)


def _claims(token: str) -> _Claims | None:
    """What it says of itself; None for what is no token."""
    found = _TOKEN.fullmatch(token)
    if found is None or len(token) > _MAX_TOKEN:
        return None
    try:
        padded = found[1] + "=" * (-len(found[1]) % 4)
        return _decoder.decode(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, binascii.Error, msgspec.DecodeError, RecursionError):
        return None
