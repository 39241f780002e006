"""What the first processes of a host have found out, before anybody's attempt is run.

One process proves the view, without a line of anybody's code in it. Beside it each source of operators is loaded
once in a process of its own, which says the names that it found there and nothing else: whose they are is known by
whose process said so. A name that somebody else has already is refused. So no source has a say in which code runs
for the operators of another, or for those that ship with the platform.

A source that can't be loaded, and says why, is refused like any wrong setting. One whose process ends without a
word, says nonsense or never ends is left out and reported; the others go on.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from tracelake.domain.errors import Invalid, TracelakeError
from tracelake.operators.api import check_name
from tracelake.operators.registry import Registry, called_twice
from tracelake.worker.host.operator_environment import set_environment, verify
from tracelake.worker.host.protocol import Setup

_SECONDS = 60.0
_MOST_BYTES = 64 * 1024
_MOST_NAMES = 256


class Viewed(msgspec.Struct, frozen=True):
    refused: str | None = None
    warnings: list[str] = []


class Loaded(msgspec.Struct, frozen=True):
    refused: str | None = None
    names: list[str] = []


@dataclass(slots=True)
class Prover:
    """``source`` is None for the one that proves the view; ``line`` leads to the process's keeper. ``said`` grows
    until the process has ended, or has said too much, or time is over."""

    source: str | None
    pid: int
    answer: int
    line: socket.socket
    said: bytearray = field(default_factory=bytearray)
    ended: bool = False

    @property
    def descriptors(self) -> list[int]:
        return [self.answer, self.line.fileno()]

    def close(self) -> None:
        os.close(self.answer)
        self.line.close()

    def hear(self) -> None:
        part = os.read(self.answer, _MOST_BYTES)
        self.said += part
        self.ended = not part or len(self.said) > _MOST_BYTES


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """``operators`` by name, each with its source; ``failed`` are the sources that were left out, and why."""

    warnings: list[str]
    operators: dict[str, str | None]
    failed: dict[str, str]


def prove_view(setup: Setup, needed: Sequence[Path], answer: int) -> NoReturn:
    try:
        viewed = Viewed(warnings=verify(setup, needed))
    except TracelakeError as error:
        viewed = Viewed(refused=error.message)
    _say(answer, viewed)


def prove_source(source: str, folder: str, answer: int) -> NoReturn:
    set_environment(folder)
    try:
        loaded = Loaded(names=Registry.of(source).names)
    except TracelakeError as error:
        loaded = Loaded(refused=error.message)
    _say(answer, loaded)


def hear_all(provers: Iterable[Prover]) -> None:
    """Until each has ended, or time is over for all."""
    until = time.monotonic() + _SECONDS
    waiting = {prover.answer: prover for prover in provers}
    ready = select.poll()
    for answer in waiting:
        ready.register(answer, select.POLLIN)
    while waiting and (left := until - time.monotonic()) > 0:
        for answer, _ in ready.poll(left * 1000):
            waiting[answer].hear()
            if waiting[answer].ended:
                ready.unregister(answer)
                del waiting[answer]


def viewed_by(prover: Prover) -> Viewed | None:
    """None when it didn't get that far; what it said to standard error says why."""
    try:
        return msgspec.json.decode(prover.said, type=Viewed)
    except msgspec.MsgspecError:
        return None


def operators_of(
    known: Mapping[str, str], provers: Iterable[Prover]
) -> tuple[dict[str, str | None], dict[str, str]]:
    """All of them, and the sources that were left out, with the reason. ``known`` are those that need no source,
    each with where it is from."""
    operators: dict[str, str | None] = dict.fromkeys(known)
    failed: dict[str, str] = {}
    for prover in provers:
        assert prover.source is not None
        try:
            names = _names(prover)
        except _LeftOutError as why:
            failed[prover.source] = str(why)
            continue
        for name in names:
            if name in operators:
                raise called_twice(name, operators[name] or known[name], prover.source)
            operators[name] = prover.source
    return operators, failed


class _LeftOutError(Exception):
    pass


def _names(prover: Prover) -> list[str]:
    if not prover.ended:
        raise _LeftOutError(f"loading it took more than {_SECONDS:g} s")
    try:
        loaded = msgspec.json.decode(prover.said, type=Loaded)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise _LeftOutError("the process that loaded it ended before it could say what is in it") from None
    if loaded.refused is not None:
        raise Invalid("OperatorHostRefused", loaded.refused)
    try:
        for name in loaded.names:
            check_name(name)
    except Invalid:
        raise _LeftOutError("it has an operator whose name is none") from None
    names = list(dict.fromkeys(loaded.names))
    if not 0 < len(names) <= _MOST_NAMES:
        raise _LeftOutError(f"it has {len(names)} operators, and {_MOST_NAMES} is the most")
    return names


def _say(answer: int, what: Viewed | Loaded) -> NoReturn:
    with os.fdopen(answer, "wb") as file:
        file.write(msgspec.json.encode(what))
    os._exit(0)
