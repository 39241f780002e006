"""A home's copies of the installation's secrets: files for the workers and the CLI of one machine.

    installation.json    which installation the home belongs to, and which worker tokens and keys it had last
    secrets.json         the first user's token, which is this home's own, and the queue's password
    query_secrets.json   the passwords of the Query Service's logins
    worker_tokens        one per line
    keys/                signing keys

The state database owns the shared secrets (``store/installation.py``); a copy that differs is overwritten. Only
worker tokens and keys may be changed here: a line or a key that was added or removed since the last time is
carried over to the installation, and from there to the other replicas' homes. ``installation.json`` records the
last state; it is read before the files that it describes and written after them, so that two replicas on one home
never mistake each other's writes for an edit.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from tracelake.domain.errors import Invalid, Unavailable
from tracelake.durable_files import replace_private
from tracelake.tokens.opaque_tokens import new_user_token, parse_tokens
from tracelake.tokens.private_files import ensure_private_folder, read_private
from tracelake.tokens.signing import check_pem

INSTALLATION_FILE = "installation.json"
WORKER_TOKENS_FILE = "worker_tokens"
KEY_FOLDER = "keys"
_KEY_FILE = re.compile(r"key-(\d{12})\.pem", re.ASCII)
_PASSWORDS = ("queue_password", "catalog_password", "audit_password")

Kept = TypeVar("Kept", bound=msgspec.Struct)


class HomeSecrets(msgspec.Struct, frozen=True):
    user_token: str
    queue_password: str

    def __repr__(self) -> str:
        return "HomeSecrets(…)"


class QuerySecrets(msgspec.Struct, frozen=True):
    """Passwords of the Query Service in the state database: to read the catalog, and to add audit rows."""

    catalog_password: str
    audit_password: str

    def __repr__(self) -> str:
        return "QuerySecrets(…)"


class Membership(msgspec.Struct, frozen=True):
    """``worker_tokens`` and ``keys`` are digests; None while the home's file isn't a copy yet."""

    installation_id: str
    worker_tokens: tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class SigningKey:
    """Named by the second from which it signs, as its file is."""

    signs_from: int
    pem: str

    def __repr__(self) -> str:
        return f"SigningKey({self.signs_from})"


@dataclass(frozen=True, slots=True, repr=False)
class Shared:
    """The secrets that the replicas of an installation share."""

    installation_id: str
    passwords: Mapping[str, str]
    worker_tokens: tuple[str, ...]
    keys: tuple[SigningKey, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Copies:
    """The secrets in a home; a new home has none."""

    membership: Membership | None
    user_token: str | None
    passwords: Mapping[str, str]
    worker_tokens: tuple[str, ...]
    keys: tuple[SigningKey, ...]


class HomeCopies:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def key_folder(self) -> Path:
        return self.folder / KEY_FOLDER

    @property
    def worker_token_file(self) -> Path:
        return self.folder / WORKER_TOKENS_FILE

    def read(self) -> Copies:
        membership = self._decoded(INSTALLATION_FILE, Membership)
        home = self._decoded("secrets.json", HomeSecrets)
        query = self._decoded("query_secrets.json", QuerySecrets)
        passwords = {
            **({"queue_password": home.queue_password} if home else {}),
            **(msgspec.structs.asdict(query) if query else {}),
        }
        return Copies(
            membership, home.user_token if home else None, passwords, self._worker_tokens(), self._keys()
        )

    def preset(self, given: Mapping[str, str]) -> None:
        """Before a home's first start: passwords given by settings are the home's first ones."""
        copies = self.read()
        if not given or copies.membership is not None:
            return
        chosen = (
            {name: secrets.token_urlsafe(24) for name in _PASSWORDS} | dict(copies.passwords) | dict(given)
        )
        token = copies.user_token or new_user_token()[0]
        self._encode("secrets.json", HomeSecrets(token, chosen["queue_password"]))
        query = QuerySecrets(chosen["catalog_password"], chosen["audit_password"])
        self._encode("query_secrets.json", query)

    def keep(self, shared: Shared, seen: Copies, *, restore: bool = True) -> bool:
        """Make the files agree with ``shared``; returns whether an existing one differed. Files edited after
        ``seen`` are left for the next time. Missing tokens and keys are restored at a start only (``restore``):
        until then an operator may be moving them."""
        before, passwords = self.read(), shared.passwords
        # The user's token is the home's own: no other replica knows a better one.
        token = before.user_token or new_user_token()[0]
        self._encode("secrets.json", HomeSecrets(token, passwords["queue_password"]))
        query = QuerySecrets(passwords["catalog_password"], passwords["audit_password"])
        self._encode("query_secrets.json", query)
        membership = seen.membership or Membership(shared.installation_id)
        token_base, key_base = membership.worker_tokens, membership.keys
        if before.worker_tokens == seen.worker_tokens and (restore or before.worker_tokens):
            if set(before.worker_tokens) != set(shared.worker_tokens):
                self._write(self.worker_token_file, self._lines_with(shared.worker_tokens))
            token_base = tuple(map(token_digest, shared.worker_tokens))
        if before.keys == seen.keys and (restore or before.keys):
            if before.keys != shared.keys:
                self._write_keys(shared.keys)
            key_base = tuple(map(key_digest, shared.keys))
        self._encode(INSTALLATION_FILE, Membership(shared.installation_id, token_base, key_base))
        lost_token = bool(before.worker_tokens) and before.worker_tokens[0] not in shared.worker_tokens
        return lost_token or any(passwords[name] != value for name, value in before.passwords.items())

    def disown_worker_tokens(self) -> None:
        """Before a new token file is made: its tokens are added to the installation's and replace none of them."""
        membership = self._decoded(INSTALLATION_FILE, Membership)
        if membership is not None:
            self._encode(INSTALLATION_FILE, Membership(membership.installation_id, None, membership.keys))

    def _worker_tokens(self) -> tuple[str, ...]:
        try:
            return tuple(parse_tokens(self.worker_token_file, read_private(self.worker_token_file)))
        except (FileNotFoundError, NotADirectoryError):
            return ()

    def _lines_with(self, tokens: Sequence[str]) -> bytes:
        """The token file with these tokens; comments stay where they are."""
        try:
            # Comments may be in any encoding, and latin-1 decodes every byte.
            lines = read_private(self.worker_token_file).decode("latin-1").splitlines()
        except FileNotFoundError:
            lines = ["# Worker tokens, one per line; all of them are valid."]
        kept = [
            line
            for line in lines
            if not line.strip() or line.strip().startswith("#") or line.strip() in tokens
        ]
        known = {line.strip() for line in kept}
        return "".join(
            f"{line}\n" for line in (*kept, *(each for each in tokens if each not in known))
        ).encode()

    def _keys(self) -> tuple[SigningKey, ...]:
        try:
            names = sorted(os.listdir(self.key_folder))
        except (FileNotFoundError, NotADirectoryError):
            return ()
        found = []
        for name in names:
            if matched := _KEY_FILE.fullmatch(name):
                path = self.key_folder / name
                try:
                    pem = read_private(path)
                except FileNotFoundError:
                    continue  # removed by another replica since the listing
                check_pem(path, pem)
                found.append(SigningKey(int(matched[1]), pem.decode("ascii")))
        return tuple(found)

    def _write_keys(self, keys: Iterable[SigningKey]) -> None:
        ensure_private_folder(self.key_folder)
        wanted = {f"key-{key.signs_from:012d}.pem": key.pem for key in keys}
        for name, pem in wanted.items():
            self._write(self.key_folder / name, pem.encode("ascii"))
        # The new ones first: a keyring must never be seen empty.
        for name in os.listdir(self.key_folder):
            if _KEY_FILE.fullmatch(name) and name not in wanted:
                (self.key_folder / name).unlink(missing_ok=True)

    def _decoded(self, name: str, kind: type[Kept]) -> Kept | None:
        path = self.folder / name
        try:
            return msgspec.json.decode(read_private(path), type=kind)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except msgspec.DecodeError as error:
            raise Invalid("HomeDamaged", f"{path} can't be read: {error}") from None

    def _encode(self, name: str, value: msgspec.Struct) -> None:
        self._write(self.folder / name, msgspec.json.encode(value))

    def _write(self, path: Path, content: bytes) -> None:
        try:
            # An unchanged file keeps its times, so that its watchers don't load it again.
            if path.exists() and read_private(path) == content:
                return
            replace_private(path, content)
        except OSError as error:
            raise Unavailable(
                "HomeUnusable",
                f"can't write {path}: {error.strerror}; make room for it, or choose another home",
            ) from None


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def key_digest(key: SigningKey) -> str:
    return hashlib.sha256(f"{key.signs_from}:{key.pem}".encode()).hexdigest()
