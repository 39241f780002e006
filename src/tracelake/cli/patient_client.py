"""A client for commands that wait: a stack that restarts is waited for, also when it comes back on another port.

Only for what may be said twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import typer

from tracelake.cli.stack import connect
from tracelake.domain.errors import Unavailable

if TYPE_CHECKING:
    from tracelake.client import Client

PATIENCE = 120.0
_PAUSE = 0.5

T = TypeVar("T")


class PatientClient:
    def __init__(self, url: str | None, token: str | None, home: Path | None) -> None:
        self._where = (url, token, home)
        self._client: Client | None = connect(*self._where)
        self._heard = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hang_up()

    def ask(self, question: Callable[[Client], T]) -> T:
        """The first question must be answered at once: a stack that was never there isn't waited for."""
        give_up = time.monotonic() + PATIENCE
        told = False
        while True:
            try:
                if self._client is None:
                    self._client = connect(*self._where)
                answer = question(self._client)
                self._heard = True
                return answer
            except Unavailable as error:
                if not self._heard or time.monotonic() > give_up:
                    raise
                if not told:
                    typer.echo(f"{error.message}; waiting for it to come back", err=True)
                told = True
            self._hang_up()
            time.sleep(_PAUSE)

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client.__exit__(None, None, None)
            self._client = None
