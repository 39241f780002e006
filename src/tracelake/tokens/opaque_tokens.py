"""User tokens and worker tokens: random strings that are kept, and compared, as hashes.

A user token is made once, shown once and stored as a hash. It has 256 random bits, so a plain SHA-256 is enough:
there is nothing to guess that a slow hash would protect, and every request pays for the hash. The prefix lets
secret scanners find a leaked one.

Worker tokens are presented by trusted wrappers and sinks on the worker-only surface. Several are valid at a time,
from a file (one per line, ``#`` comments) and from settings; the file is read again when it changes, so rotation
is: add the new one, move the workers, remove the old one. Only SHA-256 digests stay in memory, and a presented
token is compared with all of them in constant time. A file that becomes unusable (half written, wrong mode, gone)
leaves the last good set in force with an error in the log: a slip of an editor must not lock every worker out. To
revoke a token, save the file without it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path

import structlog

from tracelake.contracts.headers import WORKER_HEADER
from tracelake.domain.errors import TracelakeError, Unauthenticated
from tracelake.durable_files import create_private
from tracelake.tokens.private_files import ChangeMark, read_private

USER_PREFIX = "tlu_"
MAX_USER_LENGTH = 128
WORKER_PREFIX = "tlw_"
MIN_LENGTH = 32
MAX_LENGTH = 512

_log = structlog.get_logger(__name__)


def new_user_token() -> tuple[str, bytes]:
    """A fresh token to show to its owner, and the hash to keep."""
    token = USER_PREFIX + secrets.token_urlsafe(32)
    return token, hash_user_token(token)


def hash_user_token(token: str) -> bytes:
    # A lone surrogate in a presented string leads to a refusal, not to an encoding error.
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def looks_like_user_token(presented: str) -> bool:
    """Whether it's worth asking the database; an arbitrary header value isn't."""
    return presented.startswith(USER_PREFIX) and len(presented) <= MAX_USER_LENGTH and presented.isascii()


def create_token_file(path: Path) -> bool:
    """Write a file with one random token unless there is a file; returns whether this call made it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        return False
    content = f"# Worker tokens, one per line; all of them are valid.\n{new_worker_token()}\n"
    return create_private(path, content.encode())


def new_worker_token() -> str:
    return WORKER_PREFIX + secrets.token_urlsafe(32)


def first_token(path: Path) -> str:
    """The token that a wrapper started beside this file should present: the first one."""
    return valid_tokens(path)[0]


def valid_tokens(path: Path) -> list[str]:
    """All tokens of a file, for a process that must accept any of them."""
    return parse_tokens(path, read_private(path))


class WorkerTokens:
    """The set of valid worker tokens; at least one must be given, by file or by list."""

    def __init__(self, *, file: Path | None = None, tokens: Iterable[str] = ()) -> None:
        self._listed = tuple(_digest(_checked(token, "settings")) for token in tokens)
        self._file = file
        self._mark = ChangeMark(file) if file else None
        self._from_file: tuple[bytes, ...] = ()
        self._problem: str | None = None
        if self._mark is not None:
            # Before the load: a change during the load is found the next time.
            self._mark.changed()
            self._from_file = self._load()
        if not self._listed and not self._from_file:
            raise TracelakeError("NoWorkerToken", "no worker token is configured")

    def __repr__(self) -> str:
        return f"WorkerTokens({len(self._listed) + len(self._from_file)} valid)"

    def check(self, presented: str | None) -> None:
        if not presented:
            raise Unauthenticated("WorkerTokenMissing", f"{WORKER_HEADER} is missing")
        if not self.accepts(presented):
            raise Unauthenticated("WorkerTokenInvalid", "the worker token is not valid")

    def accepts(self, presented: str) -> bool:
        self._reload()
        if len(presented) > MAX_LENGTH:
            return False
        digest = _digest(presented)
        found = False
        # No early exit: the time must not show which one matched.
        for valid in (*self._listed, *self._from_file):
            found |= hmac.compare_digest(valid, digest)
        return found

    def _reload(self) -> None:
        if self._mark is None:
            return
        try:
            if self._mark.changed():
                self._from_file = self._load()
        except (OSError, TracelakeError) as error:
            problem = str(error)
            # Every request comes here: one line in the log for a problem, not one for each request.
            if problem != self._problem:
                _log.error("worker_token_file_unusable", file=str(self._file), problem=problem)
            self._problem = problem
        else:
            self._problem = None

    def _load(self) -> tuple[bytes, ...]:
        if self._file is None:
            return ()
        return tuple(_digest(token) for token in parse_tokens(self._file, read_private(self._file)))


def parse_tokens(path: Path, content: bytes) -> list[str]:
    """The tokens of a file. Messages name the line, never its content."""
    tokens = []
    for number, raw in enumerate(content.splitlines(), start=1):
        line = raw.strip()
        if line and not line.startswith(b"#"):
            # Every byte decodes as latin-1; what isn't ASCII is refused with the line's number.
            tokens.append(_checked(line.decode("latin-1"), f"{path}, line {number}"))
    if not tokens:
        raise TracelakeError("WorkerTokenFileInvalid", f"{path}: no token in it")
    return tokens


def _checked(token: str, where: str) -> str:
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise TracelakeError("WorkerTokenFileInvalid", f"{where}: a token is printable ASCII without spaces")
    if not MIN_LENGTH <= len(token) <= MAX_LENGTH:
        raise TracelakeError(
            "WorkerTokenFileInvalid", f"{where}: a token has {MIN_LENGTH} to {MAX_LENGTH} characters"
        )
    return token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
