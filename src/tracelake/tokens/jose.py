"""Compact JWS with ES256 only, and public keys as JSON Web Keys.

There is one algorithm and one form of header, ``{"alg":"ES256","kid":…,"typ":"JWT"}`` byte for byte. So ``none``,
HMAC with a public key, ``jku``, ``x5u``, ``jwk``, ``crit``, repeated or reordered fields aren't cases to defend
against one by one: any other header is refused before a key is looked up. Base64 is accepted in its canonical
spelling only. ``cryptography`` is called directly, since signing is on the claim path and a general JWT library
adds more than half of the signature's own cost; the tests compare the result with such a library.

Public keys (RFC 7517) are named by their thumbprint (RFC 7638): a name that follows from the key needs no
registry, and two keys never share one.
"""

from __future__ import annotations

import binascii
import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP256R1,
    EllipticCurvePublicKey,
    EllipticCurvePublicNumbers,
)
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from tracelake.domain.errors import Unauthenticated, Unavailable

MAX_TOKEN_BYTES = 16 * 1024
MAX_JWKS_BYTES = 64 * 1024
ES256 = ECDSA(hashes.SHA256())
_HALF = 32
"""Bytes of each of the two numbers of a signature."""
PublicKeys = Mapping[str, EllipticCurvePublicKey]
"""Published keys by ``kid``."""


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    alg: Literal["ES256"]
    kid: str
    typ: Literal["JWT"]


_encode = msgspec.json.Encoder().encode
_header_decoder = msgspec.json.Decoder(_Header)


@dataclass(frozen=True, slots=True)
class ParsedToken:
    """The parts of a token, unverified until ``signed_by`` returns true."""

    kid: str
    payload: bytes
    signing_input: bytes
    signature: bytes

    def signed_by(self, key: EllipticCurvePublicKey) -> bool:
        # A token has the two numbers side by side; ``cryptography`` reads them as DER.
        r = int.from_bytes(self.signature[:_HALF], "big")
        s = int.from_bytes(self.signature[_HALF:], "big")
        try:
            key.verify(encode_dss_signature(r, s), self.signing_input, ES256)
        except InvalidSignature:
            return False
        return True


def base64url(data: bytes) -> bytes:
    return urlsafe_b64encode(data).rstrip(b"=")


def header_segment(kid: str) -> bytes:
    """The encoded header; the same for every token of a key, so signers keep it."""
    return base64url(_encode(_Header(alg="ES256", kid=kid, typ="JWT")))


def signing_input(header: bytes, payload: bytes) -> bytes:
    return header + b"." + base64url(payload)


def compact(signed: bytes, der_signature: bytes) -> str:
    """The finished token, from what was signed and the DER signature that OpenSSL and KMS both give."""
    r, s = decode_dss_signature(der_signature)
    raw = r.to_bytes(_HALF, "big") + s.to_bytes(_HALF, "big")
    return (signed + b"." + base64url(raw)).decode("ascii")


def parse(token: str) -> ParsedToken:
    if len(token) > MAX_TOKEN_BYTES:
        raise Unauthenticated("TokenTooLong", f"a token has at most {MAX_TOKEN_BYTES} bytes")
    if not token.isascii():
        raise _invalid("not ASCII")
    segments = token.encode("ascii").split(b".")
    if len(segments) != 3:
        raise _invalid("not three segments")
    header, payload, signature = (_strict_decode(segment) for segment in segments)
    try:
        fields = _header_decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _invalid("not an ES256 header of this platform") from None
    if _encode(fields) != header:
        raise _invalid("the header isn't in canonical form")
    if len(signature) != 2 * _HALF:
        raise _invalid("not an ES256 signature")
    return ParsedToken(fields.kid, payload, segments[0] + b"." + segments[1], signature)


def _strict_decode(segment: bytes) -> bytes:
    try:
        decoded = urlsafe_b64decode(segment + b"=" * (-len(segment) % 4))
    except (binascii.Error, ValueError):
        raise _invalid("not base64url") from None
    # Python skips characters outside of the alphabet; only a round trip shows that there were none.
    if base64url(decoded) != segment:
        raise _invalid("not canonical base64url")
    return decoded


def _invalid(why: str) -> Unauthenticated:
    return Unauthenticated("TokenInvalid", f"the token is malformed: {why}")


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
    """The ES256 signing keys in a document; keys of other kinds are skipped."""
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
