"""Secrets and RPC pools that this worker may give to its operators.

``SecretProvider`` finds secrets by name, for trusted operators: ``TRACELAKE_SECRET_<NAME>`` first, then a private
file, which is a JSON object of strings or lines of ``NAME=value``. A file that other users may read is refused.

``RpcPools`` reads RPC pools from a file that no operator can read. A job names a pool; its attempt gets that pool
and no other.

Both files are read again whenever they have changed, so that a rotated key needs no restart. Variables with
secrets are removed from the worker's environment, so that no child process inherits one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

from tracelake.contracts.rpc_pool import PoolConfig
from tracelake.domain.errors import Invalid, TracelakeError, Unavailable
from tracelake.evm.rpc.config import parse_pools
from tracelake.settings import Secret
from tracelake.tokens.private_files import ChangeMark, read_private

PREFIX = "TRACELAKE_SECRET_"
CONFIG_FIELD = "rpc_pool"

_log = structlog.get_logger(__name__)


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
        except OSError as error:
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


@dataclass(frozen=True, slots=True)
class JobPool:
    """``pool`` is None when the job names none, or one that isn't among ``known``."""

    pool: PoolConfig | None = None
    known: tuple[str, ...] = ()

    def secrets(self) -> list[str]:
        return [] if self.pool is None else self.pool.secrets()


class RpcPools:
    def __init__(
        self,
        file: Path | None = None,
        environment: MutableMapping[str, str] | None = None,
        *,
        required: bool = True,
    ) -> None:
        """A file that isn't ``required`` may be missing, and may appear later. An unusable file raises here, at
        the start of the worker, rather than in its first task."""
        self._file = file
        self._required = required
        self._mark = None if file is None else ChangeMark(file)
        self._variables = _Variables({} if environment is None else environment)
        self._pools: dict[str, PoolConfig] = {}
        self._read()

    def for_job(self, config: Mapping[str, Any]) -> JobPool:
        name = config.get(CONFIG_FIELD)
        if name is None:
            return JobPool()
        pools = self._read()
        return JobPool(pools.get(name) if isinstance(name, str) else None, tuple(pools))

    def has_changed(self, config: Mapping[str, Any], given: PoolConfig | None) -> bool:
        """Whether an attempt would get another pool now. An unusable file changes nothing."""
        try:
            now = self.for_job(config).pool
        except TracelakeError:
            return False
        return None not in (now, given) and now != given

    def _read(self) -> dict[str, PoolConfig]:
        if self._file is None or self._mark is None:
            return {}
        try:
            if self._mark.changed():
                _warn_of_exposure(self._file)
                self._pools = parse_pools(self._file.read_bytes(), str(self._file), self._variables)
        except FileNotFoundError:
            if self._required:
                raise Unavailable("RpcPoolsUnreadable", f"there is no {self._file}") from None
            self._pools = {}
        except OSError as error:
            raise Unavailable("RpcPoolsUnreadable", f"can't read {self._file}: {error.strerror}") from None
        return self._pools


class _Variables(Mapping[str, str]):
    """A view of the environment that removes a variable when it is looked up, and keeps it for the next reading."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self._environment = environment
        self._taken: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        if name in self._environment:
            self._taken[name] = self._environment.pop(name)
        return self._taken[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._environment, **self._taken})

    def __len__(self) -> int:
        return len({**self._environment, **self._taken})


def _warn_of_exposure(file: Path) -> None:
    if file.stat().st_mode & 0o077:
        _log.warning("rpc_pools_exposed", file=str(file), remedy=f"chmod 600 {file}")
