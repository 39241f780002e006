"""Compact JWS with ES256, and nothing else.

There is one algorithm and one form of header, ``{"alg":"ES256","kid":…,"typ":"JWT"}`` byte for byte.
So ``none``, HMAC with a public key, ``jku``, ``x5u``, ``jwk``, ``crit``, repeated or reordered fields
aren't cases to defend against one by one: whatever isn't that header is refused before any key is
looked up. Base64 is accepted in its one canonical spelling. ``cryptography`` is called directly, since
signing is on the claim path and a general JWT library adds more than half of the signature's own cost;
the tests hold the result against such a library.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from typing import Literal

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from tracelake.domain.errors import Unauthenticated

MAX_TOKEN_BYTES = 16 * 1024
ES256 = ECDSA(hashes.SHA256())
_HALF = 32


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    alg: Literal["ES256"]
    kid: str
    typ: Literal["JWT"]


_encode = msgspec.json.Encoder().encode
_header_decoder = msgspec.json.Decoder(_Header)


@dataclass(frozen=True, slots=True)
class ParsedToken:
    """A token taken apart; nothing in it is proven before ``signed_by`` says so."""

    kid: str
    payload: bytes
    signing_input: bytes
    signature: bytes

    def signed_by(self, key: EllipticCurvePublicKey) -> bool:
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
