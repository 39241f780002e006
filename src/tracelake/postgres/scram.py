"""SCRAM-SHA-256 verifiers, so that a role's password never travels to the server or into its log.

Postgres takes a verifier wherever it takes a password, and stores it as it is (RFC 5802, RFC 7677).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets

from tracelake.domain.errors import Invalid

_ITERATIONS = 4096
_MOST_ITERATIONS = 100_000
"""A role may set a verifier of its own with more iterations; checking it must stay fast."""
_STORED = re.compile(
    r"SCRAM-SHA-256\$(?P<iterations>[0-9]{1,9}):(?P<salt>[A-Za-z0-9+/]{4,200}={0,2})"
    r"\$[A-Za-z0-9+/=]{44}:[A-Za-z0-9+/=]{44}"
)


def verifier(password: str, iterations: int = _ITERATIONS) -> str:
    """ASCII only: clients disagree on how to normalise other passwords before hashing. ``iterations`` slow guessing
    down; for a random password that can't be guessed they only slow every login down."""
    if not password or not password.isascii() or not password.isprintable():
        raise Invalid("BadPassword", "a role's password is printable ASCII and not empty")
    return _verifier(password, secrets.token_bytes(16), iterations)


def matches(password: str, stored: str | None) -> bool:
    """Whether the password matches the stored verifier, which may be of another kind or missing."""
    found = _STORED.fullmatch(stored or "")
    # A verifier that a role made for itself could otherwise keep the event loop busy for minutes.
    if found is None or int(found["iterations"]) > _MOST_ITERATIONS:
        return False
    try:
        made = _verifier(password, base64.b64decode(found["salt"]), int(found["iterations"]))
    # The pattern admits text that isn't base64, and the role may have written it.
    except ValueError:
        return False
    # In constant time, as for every comparison of secrets.
    return hmac.compare_digest(made, found[0])


def _verifier(password: str, salt: bytes, iterations: int) -> str:
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, iterations)
    stored_key = hashlib.sha256(_keyed(salted, b"Client Key")).digest()
    server_key = _keyed(salted, b"Server Key")
    return f"SCRAM-SHA-256${iterations}:{_text(salt)}${_text(stored_key)}:{_text(server_key)}"


def _keyed(key: bytes, message: bytes) -> bytes:
    return hmac.new(key, message, hashlib.sha256).digest()


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
