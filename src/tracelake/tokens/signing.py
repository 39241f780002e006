"""The signer of capability tokens, and the keyring of local PEM keys that is one in Lite.

A key file is named after the second from which it signs: ``key-{seconds}.pem``. Everything else follows
from the names, so that no index can disagree with the keys, a rotation is one atomic file creation, and all
replicas that share the folder switch at the same moment without communicating:

- *active*: the latest key whose second has come. It signs.
- *next*: a key whose second is still to come. It's published already, since verifiers cache.
- *retired*: an earlier key. It stays published until the last token it can have signed is over.

The key is chosen by the token's own ``iat``, which is the state database's time, never a local clock.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import msgspec
import structlog
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tracelake.contracts.token_claims import TokenClaims
from tracelake.domain.errors import TracelakeError
from tracelake.durable_files import create_private, sync_folder
from tracelake.tokens import jose
from tracelake.tokens.jose import Jwk, Jwks, PublicKeys, public_jwk
from tracelake.tokens.private_files import ChangeMark, ensure_private_folder, read_private

MAX_LIFETIME_SECONDS = 24 * 3600
SKEW_SECONDS = 300
"""How long a replica may be late in noticing a new key, and a verifier's clock may be off."""
OVERLAP_SECONDS = 900
"""From publishing a key to signing with it; above the time for which verifiers cache."""

_KEY_FILE = re.compile(r"key-(\d{12})\.pem", re.ASCII)
_log = structlog.get_logger(__name__)
_encode = msgspec.json.Encoder().encode


class Signer(Protocol):
    """Signs claims. Awaited, because the key may live in a remote service that signs over the network."""

    async def sign(self, claims: TokenClaims) -> str: ...

    async def jwks(self, now: datetime) -> Jwks: ...


class KeyState(StrEnum):
    NEXT = "next"
    ACTIVE = "active"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """Public facts about a key; ``published_until`` is None while no successor is known."""

    kid: str
    state: KeyState
    signs_from: int
    published_until: int | None


@dataclass(frozen=True, slots=True)
class _Key:
    signs_from: int
    file: tuple[int, int]
    private: ec.EllipticCurvePrivateKey = field(repr=False)
    public: ec.EllipticCurvePublicKey
    jwk: Jwk
    header: bytes

    @property
    def kid(self) -> str:
        return self.jwk["kid"]


class PemKeyring:
    """A folder of ES256 keys, made with its first key when there is none; safe to share by replicas."""

    def __init__(self, folder: Path) -> None:
        ensure_private_folder(folder)
        self._folder = folder
        self._mark = ChangeMark(folder)
        self._cached: tuple[_Key, ...] = ()
        self._problem: str | None = None
        if not self._keys():
            # From second 0, so that it signs at once, whatever the database's clock shows.
            create_private(_path(folder, 0), new_pem())
            self._cached = self._load()

    async def sign(self, claims: TokenClaims) -> str:
        key = self._active(claims.iat)
        signed = jose.signing_input(key.header, _encode(claims))
        return jose.compact(signed, key.private.sign(signed, jose.ES256))

    async def jwks(self, now: datetime) -> Jwks:
        return Jwks(keys=[key.jwk for key in self._published(int(now.timestamp()))])

    def public_keys(self, now: datetime) -> PublicKeys:
        """The published keys, for verifying in the process that signs."""
        return {key.kid: key.public for key in self._published(int(now.timestamp()))}

    def keys(self, now: datetime) -> tuple[KeyInfo, ...]:
        """All published keys, oldest first."""
        seconds = int(now.timestamp())
        active = self._active(seconds)
        ends = self._ends()
        return tuple(
            KeyInfo(key.kid, _state(key, active), key.signs_from, ends.get(key.kid))
            for key in self._published(seconds)
        )

    def rotate(self, now: datetime, overlap_seconds: int = OVERLAP_SECONDS) -> str:
        """Publish a key now that signs after the overlap, and return its ``kid``.

        A key that is pending already and signs no later is kept instead, so repeating is harmless.
        """
        seconds = int(now.timestamp())
        # Tokens of the current second keep their key.
        signs_from = seconds + max(1, overlap_seconds)
        # Read anew: another replica may have rotated a moment ago.
        self._cached = self._load()
        self._remove_outlived(seconds)
        pending = [key for key in self._keys() if seconds < key.signs_from <= signs_from]
        if pending:
            return pending[0].kid
        create_private(_path(self._folder, signs_from), new_pem())
        self._cached = self._load()
        return next(key.kid for key in self._cached if key.signs_from == signs_from)

    def _active(self, seconds: int) -> _Key:
        for key in reversed(self._keys()):
            if key.signs_from <= seconds:
                return key
        raise TracelakeError("NoSigningKey", f"no key in {self._folder} signs yet")

    def _ends(self) -> dict[str, int]:
        """Until when each key that has a successor must be published."""
        keys = self._keys()
        return {
            key.kid: successor.signs_from + MAX_LIFETIME_SECONDS + SKEW_SECONDS
            for key, successor in pairwise(keys)
        }

    def _published(self, seconds: int) -> list[_Key]:
        ends = self._ends()
        return [key for key in self._keys() if key.kid not in ends or seconds < ends[key.kid]]

    def _remove_outlived(self, seconds: int) -> None:
        published = self._published(seconds)
        for key in self._keys():
            if key not in published:
                _path(self._folder, key.signs_from).unlink(missing_ok=True)
        sync_folder(self._folder)

    def _keys(self) -> tuple[_Key, ...]:
        try:
            if self._mark.changed():
                found = self._load()
                if self._cached and not found:
                    raise TracelakeError("NoSigningKey", f"no key is left in {self._folder}")
                self._cached = found
        except (OSError, TracelakeError) as error:
            # A running Dispatcher keeps signing with the keys it has; at start it has none.
            if not self._cached:
                raise
            if str(error) != self._problem:
                _log.error("keyring_unusable", folder=str(self._folder), problem=str(error))
            self._problem = str(error)
        else:
            self._problem = None
        return self._cached

    def _load(self) -> tuple[_Key, ...]:
        known = {key.file: key for key in self._cached}
        keys = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                # Hidden files are unfinished writes.
                if entry.name.startswith(".") or not entry.name.endswith(".pem"):
                    continue
                matched = _KEY_FILE.fullmatch(entry.name)
                # Ignored, a misnamed key would look like a finished rotation.
                if matched is None:
                    raise TracelakeError("KeyFileInvalid", f"{entry.path}: not named key-<12 digits>.pem")
                try:
                    found = entry.stat()
                    file = (found.st_ino, found.st_mtime_ns)
                    signs_from = int(matched[1])
                    key = known.get(file)
                    if key is None or key.signs_from != signs_from:
                        key = _parse(Path(entry.path), signs_from, file)
                except FileNotFoundError:
                    continue  # removed by another replica since the listing
                keys.append(key)
        return tuple(sorted(keys, key=lambda key: key.signs_from))


def _state(key: _Key, active: _Key) -> KeyState:
    if key.signs_from > active.signs_from:
        return KeyState.NEXT
    return KeyState.ACTIVE if key.signs_from == active.signs_from else KeyState.RETIRED


def _path(folder: Path, signs_from: int) -> Path:
    return folder / f"key-{signs_from:012d}.pem"


def new_pem() -> bytes:
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _parse(path: Path, signs_from: int, file: tuple[int, int]) -> _Key:
    private = check_pem(path, read_private(path))
    public = private.public_key()
    jwk = public_jwk(public)
    return _Key(signs_from, file, private, public, jwk, jose.header_segment(jwk["kid"]))


def check_pem(path: Path, pem: bytes) -> ec.EllipticCurvePrivateKey:
    """The key in a file; raises when it isn't one that could sign."""
    try:
        private = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):
        raise TracelakeError("KeyFileInvalid", f"{path}: not an unencrypted PEM private key") from None
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.curve.name != "secp256r1":
        raise TracelakeError("KeyFileInvalid", f"{path}: not a P-256 key, which ES256 needs")
    return private
