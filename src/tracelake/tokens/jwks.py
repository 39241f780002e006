"""Public keys as JSON Web Keys (RFC 7517), named by their thumbprint (RFC 7638).

A name that follows from the key needs no registry, and two keys never share one.
"""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64decode
from collections.abc import Mapping
from typing import TypedDict

import msgspec
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePublicKey,
    EllipticCurvePublicNumbers,
)

from tracelake.domain.errors import Unavailable
from tracelake.tokens.jws import base64url

MAX_JWKS_BYTES = 64 * 1024

PublicKeys = Mapping[str, EllipticCurvePublicKey]
"""Published keys by ``kid``."""


class Jwk(TypedDict):
    kty: str
    crv: str
    x: str
    y: str
    kid: str
    use: str
    alg: str


class Jwks(TypedDict):
    keys: list[Jwk]


class _ReceivedJwk(msgspec.Struct, frozen=True):
    kty: str
    kid: str = ""
    crv: str = ""
    x: str = ""
    y: str = ""
    use: str = "sig"
    alg: str = "ES256"


class _ReceivedJwks(msgspec.Struct, frozen=True):
    keys: tuple[_ReceivedJwk, ...]


def public_jwk(key: EllipticCurvePublicKey) -> Jwk:
    numbers = key.public_numbers()
    x, y = (base64url(value.to_bytes(32, "big")).decode() for value in (numbers.x, numbers.y))
    # RFC 7638: the required members only, in lexical order, without white space.
    essence = msgspec.json.encode({"crv": "P-256", "kty": "EC", "x": x, "y": y})
    kid = base64url(hashlib.sha256(essence).digest()).decode()
    return Jwk(kty="EC", crv="P-256", x=x, y=y, kid=kid, use="sig", alg="ES256")


def parse_jwks(document: bytes) -> dict[str, EllipticCurvePublicKey]:
    """The ES256 signing keys in a document; keys of other kinds are for somebody else and skipped."""
    if len(document) > MAX_JWKS_BYTES:
        raise Unavailable("JwksUnavailable", f"the key document has more than {MAX_JWKS_BYTES} bytes")
    try:
        received = msgspec.json.decode(document, type=_ReceivedJwks)
        return {jwk.kid: _public_key(jwk) for jwk in received.keys if _is_es256(jwk)}
    except ValueError as error:
        raise Unavailable("JwksUnavailable", f"the key document can't be read: {error}") from None


def _is_es256(jwk: _ReceivedJwk) -> bool:
    return bool(jwk.kid) and (jwk.kty, jwk.crv, jwk.use, jwk.alg) == ("EC", "P-256", "sig", "ES256")


def _public_key(jwk: _ReceivedJwk) -> EllipticCurvePublicKey:
    """Raises ValueError for coordinates that aren't a point of the curve."""
    x, y = (
        int.from_bytes(urlsafe_b64decode(value + "=" * (-len(value) % 4)), "big") for value in (jwk.x, jwk.y)
    )
    return EllipticCurvePublicNumbers(x, y, SECP256R1()).public_key()
