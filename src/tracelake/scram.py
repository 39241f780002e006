"""SCRAM-SHA-256 verifiers, so that a role's password never travels to the server or into its log.

Postgres takes a verifier wherever it takes a password, and stores it as it is (RFC 5802, RFC 7677).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

from tracelake.domain.errors import Invalid

_ITERATIONS = 4096


def verifier(password: str, iterations: int = _ITERATIONS) -> str:
    """ASCII only: other passwords are normalised before hashing, which clients don't agree upon. ``iterations``
    make guessing slow; for a password that nobody can guess they only make every login slow."""
    if not password or not password.isascii() or not password.isprintable():
        raise Invalid("BadPassword", "a role's password is printable ASCII and not empty")
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, iterations)
    stored_key = hashlib.sha256(_keyed(salted, b"Client Key")).digest()
    server_key = _keyed(salted, b"Server Key")
    return f"SCRAM-SHA-256${iterations}:{_text(salt)}${_text(stored_key)}:{_text(server_key)}"


def _keyed(key: bytes, message: bytes) -> bytes:
    return hmac.new(key, message, hashlib.sha256).digest()


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
