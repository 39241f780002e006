"""RPC pools that this worker may give to its operators.

``RpcPools`` reads RPC pools from a file that no operator can read. A job names a pool; its attempt gets that pool
and no other. The file is read again whenever it has changed, so that a rotated key needs no restart. Variables with
keys are removed from the worker's environment, so that no child process inherits one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from tracelake.contracts.rpc_pool import PoolConfig
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.evm.rpc.config import parse_pools
from tracelake.tokens.private_files import ChangeMark

CONFIG_FIELD = "rpc_pool"

_log = structlog.get_logger(__name__)


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
