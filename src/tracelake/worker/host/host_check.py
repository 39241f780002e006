"""Checks a new host before it runs any attempt: the view is safe, and each source of operators can be loaded.

One process proves the view, without any foreign code in it. Beside it each source of operators is loaded once in
a process of its own, which reports the names that it found and nothing else: the process that reports a name
determines whose it is. A name that is already taken is refused. So no source decides which code runs for the
operators of another, or for the built-in ones. A source that fails to load with a reason is refused like any
wrong setting. One whose process ends without a report, sends garbage or never ends is left out and logged; the
others go on.

The view is proven by trying, under the operators' own identity: the paths that they need can be read, and those
with credentials can't. Otherwise root refuses to go on. A user without namespaces can't keep their own files from
their own operators; that becomes a warning.
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

from tracelake import kernel
from tracelake.domain.errors import Invalid, TracelakeError
from tracelake.operators.registry import Registry, called_twice, check_name
from tracelake.sandbox.accounts import is_ours
from tracelake.trees import folders_of
from tracelake.worker.host.private_view import interpreter_paths
from tracelake.worker.host.protocol import HostSetup

_SECONDS = 60.0
_MOST_BYTES = 64 * 1024
_MOST_NAMES = 256
_PATH = "/usr/local/bin:/usr/bin:/bin"
_NO_FILTER = (
    "system calls can't be filtered on this machine: operators can use the kernel's keyrings, which others of the"
    " same user find, and make readers of a file wait"
)


class ViewResult(msgspec.Struct, frozen=True):
    refused: str | None = None
    warnings: list[str] = []


class LoadResult(msgspec.Struct, frozen=True):
    refused: str | None = None
    names: list[str] = []


@dataclass(slots=True)
class CheckProcess:
    """``source`` is None for the process that proves the view; ``line`` leads to its keeper. ``output`` grows
    until the process has ended, has sent too much, or time is up."""

    source: str | None
    pid: int
    answer: int
    line: socket.socket
    output: bytearray = field(default_factory=bytearray)
    ended: bool = False

    @property
    def descriptors(self) -> list[int]:
        return [self.answer, self.line.fileno()]

    def close(self) -> None:
        os.close(self.answer)
        self.line.close()

    def read(self) -> None:
        part = os.read(self.answer, _MOST_BYTES)
        self.output += part
        self.ended = not part or len(self.output) > _MOST_BYTES


class HostCheck(msgspec.Struct, frozen=True, kw_only=True):
    """``operators`` by name, each with its source; ``failed`` are the sources that were left out, and why."""

    warnings: list[str]
    operators: dict[str, str | None]
    failed: dict[str, str]


def check_view(setup: HostSetup, needed: Sequence[Path], answer: int) -> NoReturn:
    try:
        viewed = ViewResult(warnings=verify_view(setup, needed))
    except TracelakeError as error:
        viewed = ViewResult(refused=error.message)
    _answer(answer, viewed)


def check_source(source: str, folder: str, answer: int) -> NoReturn:
    set_environment(folder)
    try:
        loaded = LoadResult(names=Registry.of(source).names)
    except TracelakeError as error:
        loaded = LoadResult(refused=error.message)
    _answer(answer, loaded)


def read_all(provers: Iterable[CheckProcess]) -> None:
    """Read from all processes until each has ended, or time is up."""
    until = time.monotonic() + _SECONDS
    waiting = {prover.answer: prover for prover in provers}
    ready = select.poll()
    for answer in waiting:
        ready.register(answer, select.POLLIN)
    while waiting and (left := until - time.monotonic()) > 0:
        for answer, _ in ready.poll(left * 1000):
            waiting[answer].read()
            if waiting[answer].ended:
                ready.unregister(answer)
                del waiting[answer]


def viewed_by(prover: CheckProcess) -> ViewResult | None:
    """The result of the view's proof; None without one, and then its standard error says why."""
    try:
        return msgspec.json.decode(prover.output, type=ViewResult)
    except msgspec.MsgspecError:
        return None


def operators_of(
    known: Mapping[str, str], provers: Iterable[CheckProcess]
) -> tuple[dict[str, str | None], dict[str, str]]:
    """All operators, and the sources that were left out, with the reason. ``known`` are the operators that need
    no source, each with its origin."""
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


def _names(prover: CheckProcess) -> list[str]:
    if not prover.ended:
        raise _LeftOutError(f"loading it took more than {_SECONDS:g} s")
    try:
        loaded = msgspec.json.decode(prover.output, type=LoadResult)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise _LeftOutError("the process that loaded it exited before it reported its operators") from None
    if loaded.refused is not None:
        raise Invalid("OperatorHostRefused", loaded.refused)
    try:
        for name in loaded.names:
            check_name(name)
    except Invalid:
        raise _LeftOutError("it has an operator with an invalid name") from None
    names = list(dict.fromkeys(loaded.names))
    if not 0 < len(names) <= _MOST_NAMES:
        raise _LeftOutError(f"it has {len(names)} operators; 1 to {_MOST_NAMES} are allowed")
    return names


def _answer(answer: int, what: ViewResult | LoadResult) -> NoReturn:
    with os.fdopen(answer, "wb") as file:
        file.write(msgspec.json.encode(what))
    os._exit(0)


def clear_environment() -> None:
    os.environ.clear()
    os.environ.update(PATH=_PATH, LANG="C.UTF-8", TZ="UTC")


def set_environment(folder: str) -> None:
    """Set the whole environment that an operator process inherits; an attempt adds its own."""
    clear_environment()
    os.environ.update(HOME=folder, TMPDIR=os.path.join(folder, "tmp"), PYTHONUNBUFFERED="1")
    os.chdir(folder)


def needed_paths(setup: HostSetup) -> list[Path]:
    """The needed paths that exist; code that looks for a missing one reports it better than this check could."""
    shown = [Path(path) for path in setup.shown if os.path.exists(path)]
    return [*interpreter_paths(), Path(setup.object_root), Path(setup.folder), *shown]


def verify_view(setup: HostSetup, needed: Sequence[Path]) -> list[str]:
    """Check the view; the result are warnings. Raises when operators wouldn't work, or could read credentials."""
    account = setup.account
    unreachable = [str(path) for path in needed if not _readable(path)]
    if unreachable:
        user = account.name if account is not None else "this user"
        remedy = "make it readable for others" if setup.namespaces else "allow namespaces, or move it"
        raise Invalid(
            "OperatorsCannotRead",
            f"operators run as {user}, who can't read {unreachable[0]}; {remedy}, or run the worker as a user"
            " that isn't root",
        )
    meant = (setup.object_root, setup.work_folder, *map(str, needed))
    exposed = [path for place in _secrets(setup) if (path := _leaking(place, meant)) is not None]
    # Keyrings show whether there is a system call filter: it blocks them together with leases on files.
    warnings = [_NO_FILTER] if kernel.keyrings_can_be_used() else []
    if not exposed:
        return warnings
    if account is not None or setup.namespaces:
        raise Invalid(
            "OperatorsWouldReadSecrets",
            f"operators would be able to read {exposed[0]}; close it to other users, or allow namespaces",
        )
    exposure = f"operators run as the worker's own user without a private view: they can read {exposed[0]}"
    return [*warnings, exposure]


def describe_view(setup: HostSetup) -> str:
    account = setup.account
    if account is None:
        who = "operators run as this user"
    elif is_ours(account.uid):
        who = f"operators run as accounts of their own (the first is uid {account.uid})"
    else:
        who = f"operators run as {account.name} (uid {account.uid})"
    if setup.namespaces:
        return f"{who}, each in a private view: files, processes and shared memory of its own"
    return f"{who}, without a private view: they see the machine's processes and every file open to that user"


def _secrets(setup: HostSetup) -> list[Path]:
    return [Path(path) for path in ([setup.home] if setup.home else []) + setup.hidden]


def _readable(path: Path) -> bool:
    wanted = os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK
    return os.access(path, wanted)


def _leaking(place: Path, meant_for_operators: Iterable[str]) -> Path | None:
    """A file at or below this place whose content can be read."""
    if not os.path.isdir(place):
        return place if _has_content(place) else None
    spared = {os.path.realpath(path) for path in meant_for_operators}
    for folder, names in folders_of(place, spared):
        for name in names:
            if _has_content(path := Path(folder, name)):
                return path
    return None


def _has_content(path: Path) -> bool:
    try:
        # A FIFO must not make the proof wait.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return bool(file.read(1))
    except OSError:
        return False
