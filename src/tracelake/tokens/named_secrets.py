"""Secrets by name, for trusted operators and for deliveries.

``SecretProvider`` finds them: ``TRACELAKE_SECRET_<NAME>`` first, then a private file, which is a JSON object of
strings or lines of ``NAME=value``. A file that other users may read is refused. It is read again whenever it has
changed, so that a rotated key needs no restart. Variables with secrets are removed from the process's environment,
so that no child process inherits one.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from pathlib import Path

import msgspec

from tracelake.domain.errors import Invalid, TracelakeError, Unavailable
from tracelake.settings import Secret
from tracelake.tokens.private_files import ChangeMark, read_private

PREFIX = "TRACELAKE_SECRET_"


class MissingSecret(Invalid):
    """A secret that isn't provided; no retry would find it."""


class SecretProvider:
    def __init__(self, environment: MutableMapping[str, str], file: Path | None) -> None:
        """Removes the secrets from ``environment``."""
        names = [name for name in environment if name.startswith(PREFIX)]
        self._given = {name.removeprefix(PREFIX): Secret(environment.pop(name)) for name in names}
        self._file = file
        self._mark = ChangeMark(file) if file is not None else None
        self._kept: dict[str, Secret] = {}
        if file is not None:
            self._from_file()

    def resolve(self, names: Iterable[str]) -> dict[str, Secret]:
        """The values of these secrets. Raises ``MissingSecret`` with the names of all that are missing."""
        names = list(names)
        if not names:
            return {}
        kept = self._from_file()
        found: dict[str, Secret] = {}
        for name in names:
            value = self._given.get(name) or self._given.get(name.upper()) or kept.get(name)
            if value is not None:
                found[name] = value
        missing = [name for name in names if name not in found]
        if missing:
            raise MissingSecret(
                "SecretMissing",
                f"the worker has no secret {', '.join(missing)}: set {PREFIX}{missing[0].upper()} "
                "for the worker, or add it to TRACELAKE_SECRETS_FILE",
            )
        return found

    def _from_file(self) -> dict[str, Secret]:
        if self._file is None or self._mark is None:
            return {}
        try:
            if self._mark.changed():
                self._kept = _parse(self._file, read_private(self._file))
        except TracelakeError:
            # It stays unusable until it is changed again: it isn't taken for one that was read.
            self._mark = ChangeMark(self._file)
            raise
        except OSError as error:
            self._mark = ChangeMark(self._file)
            raise Unavailable("SecretsUnreadable", f"can't read {self._file}: {error.strerror}") from None
        return self._kept


def _parse(path: Path, content: bytes) -> dict[str, Secret]:
    if content.lstrip().startswith(b"{"):
        try:
            return {name: Secret(value) for name, value in _json(content).items()}
        except msgspec.DecodeError:
            # The parser's message may quote the file's content.
            raise _damaged(path, "it isn't a JSON object of texts") from None
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise _damaged(path, "it isn't UTF-8") from None
    found: dict[str, Secret] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            raise _damaged(path, f"line {number} isn't NAME=value")
        found[name.strip()] = Secret(value.strip())
    return found


def _json(content: bytes) -> dict[str, str]:
    return msgspec.json.decode(content, type=dict[str, str])


def _damaged(path: Path, why: str) -> TracelakeError:
    return Invalid("SecretsInvalid", f"{path} can't be used: {why}")
