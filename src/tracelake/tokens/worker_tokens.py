"""Worker tokens: what trusted wrappers and sinks show on the worker-only surface.

Several are valid at a time, from a file (one per line, ``#`` comments) and from settings; the file is
read again when it changes, so rotation is: add the new one, move the workers, remove the old one.
Only SHA-256 digests stay in memory, and a presented token is compared with all of them in constant
time. A file that can't be used while running (half written, wrong mode, gone) leaves the last good set
in force with a loud log line: a slip of an editor must not lock every worker out. To revoke a token,
save the file without it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path

import structlog

from tracelake.domain.errors import TracelakeError, Unauthenticated
from tracelake.tokens.private_files import ChangeMark, create_private, read_private

PREFIX = "tlw_"
MIN_LENGTH = 32
MAX_LENGTH = 512

log = structlog.get_logger(__name__)


def create_token_file(path: Path) -> bool:
    """Write a file with one random token unless there is one; whether this call made it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        return False
    content = f"# Worker tokens, one per line; all of them are valid.\n{new_worker_token()}\n"
    return create_private(path, content.encode())


def new_worker_token() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def first_token(path: Path) -> str:
    """The token that a wrapper started beside this file should present: the first one."""
    return valid_tokens(path)[0]


def valid_tokens(path: Path) -> list[str]:
    """All of them, for who must be known to holders of any."""
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
            self._mark.changed()
            self._from_file = self._load()
        if not self._listed and not self._from_file:
            raise TracelakeError("NoWorkerToken", "no worker token is configured")

    def __repr__(self) -> str:
        return f"WorkerTokens({len(self._listed) + len(self._from_file)} valid)"

    def check(self, presented: str | None) -> None:
        if not presented:
            raise Unauthenticated("WorkerTokenMissing", "X-Trace-Worker-Token is missing")
        if not self.accepts(presented):
            raise Unauthenticated("WorkerTokenInvalid", "the worker token is not valid")

    def accepts(self, presented: str) -> bool:
        self._reload()
        if len(presented) > MAX_LENGTH:
            return False
        digest = _digest(presented)
        found = False
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
            if problem != self._problem:
                log.error("worker_token_file_unusable", file=str(self._file), problem=problem)
            self._problem = problem
        else:
            self._problem = None

    def _load(self) -> tuple[bytes, ...]:
        if self._file is None:
            return ()
        return tuple(_digest(token) for token in parse_tokens(self._file, read_private(self._file)))


def parse_tokens(path: Path, content: bytes) -> list[str]:
    """The tokens of a file. Messages name the line, never what stands in it."""
    tokens = []
    for number, raw in enumerate(content.splitlines(), start=1):
        line = raw.strip()
        if line and not line.startswith(b"#"):
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
