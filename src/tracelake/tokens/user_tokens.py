"""User tokens: made once, shown once, stored as a hash.

A token is 256 random bits, so a plain SHA-256 is enough: there is nothing to guess that a slow hash
would protect, and every request pays for the hash. The prefix lets secret scanners find a leaked one.
"""

from __future__ import annotations

import hashlib
import secrets

PREFIX = "tlu_"
MAX_LENGTH = 128


def new_token() -> tuple[str, bytes]:
    """A fresh token to show to its owner, and the hash to keep."""
    token = PREFIX + secrets.token_urlsafe(32)
    return token, hash_token(token)


def hash_token(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def looks_like_token(presented: str) -> bool:
    """Whether it's worth asking the database; an arbitrary header value isn't."""
    return presented.startswith(PREFIX) and len(presented) <= MAX_LENGTH and presented.isascii()
