"""The operator host as the wrapper sees it: operator processes and programs on request.

A host lives once. When it is gone, so is everything that it started: its processes say ``OperatorGone``, its
programs have ended, ``died`` returns, and a new host may be started. It ends with the wrapper, however that ends.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from tracelake.accounts import Account
from tracelake.contracts.operator_protocol import VERSION, Ready, SparkTarget
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.trees import remove_if_possible, remove_tree
from tracelake.worker.host.hosted import HOST_GONE, Hosted, HostedProgram
from tracelake.worker.host.identity import Accounts
from tracelake.worker.host.keeper import TEMPORARY
from tracelake.worker.host.launch import LaunchedHost, launch
from tracelake.worker.host.operator_process import OperatorGone, OperatorProcess
from tracelake.worker.host.protocol import (
    Failed,
    FromHost,
    Gone,
    Kill,
    Place,
    Program,
    Refused,
    Spawn,
    Spawned,
    ToHost,
    Up,
    read_from_host,
    send_packet,
)
from tracelake.worker.host.spec import HostSpec

__all__ = ["HostSpec", "HostedProgram", "OperatorGone", "OperatorHost", "OperatorProcess"]

_START_SECONDS = 120.0
_READY_SECONDS = 60.0
_KILL_SECONDS = 20.0
_OPERATOR, _PROGRAM = "operator", "spark"
"""What accounts are held for."""

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")


class OperatorHost:
    def __init__(self, spec: HostSpec, launched: LaunchedHost, accounts: Accounts) -> None:
        self.spec = spec
        self.view = ""
        """How far operators are kept apart, in words."""
        self.warnings: list[str] = []
        """What isn't as it should be, for people to read."""
        self.operators: dict[str, str | None] = {}
        """All that there are, each with the source that a process has to load for it."""
        self.failed: dict[str, str] = {}
        """Sources whose operators can't be run, and why."""
        self.sealed = False
        """A process can't keep what it was shown: it may be used again."""
        self.spark: SparkTarget | None = None
        """What processes connect to as they start; settable."""
        self._launched = launched
        self._accounts = accounts
        self._work_folder = Path(os.path.realpath(spec.work_folder))
        self._removing: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._keys = itertools.count(1)
        self._greeting: asyncio.Future[Up] = self._loop.create_future()
        self._starting: dict[int, _Starting] = {}
        self._hosted: dict[int, Hosted] = {}
        self._gone = asyncio.Event()
        self._burial: asyncio.Task[None] | None = None
        self._loop.add_reader(launched.control, self._readable)
        launched.on_exit(self._exited)

    @classmethod
    async def start(cls, spec: HostSpec) -> OperatorHost:
        """Raises with reason and remedy when operators can't be run here."""
        if spec.namespaces != "never":
            try:
                return await cls._start(spec, namespaces=True)
            except _NoNamespaces as refusal:
                if spec.namespaces == "required":
                    raise Unavailable("NoPrivateView", refusal.message) from None
                host = await cls._start(spec, namespaces=False)
                host.warnings.insert(0, refusal.message)
                _log.warning("no_private_view", why=refusal.message)
                return host
        return await cls._start(spec, namespaces=False)

    @classmethod
    async def _start(cls, spec: HostSpec, *, namespaces: bool) -> OperatorHost:
        accounts = Accounts(spec.chosen_user)
        try:
            taken = [await accounts.take(_OPERATOR) for _ in (None, *spec.sources)]
            host = cls(spec, launch(), accounts)
        except BaseException:
            accounts.close()
            raise
        try:
            _make_work_folder(host._work_folder)
            places = [
                Place(str(await host._make_folder(f"proof-{os.getpid()}-{number}", account)), account)
                for number, account in enumerate(taken)
            ]
            host._order(spec.setup(namespaces=namespaces, own=places[0], provers=places[1:]))
            async with asyncio.timeout(_START_SECONDS):
                up = await asyncio.shield(host._greeting)
        except TimeoutError:
            await host.stop()
            why = f"the operator host wasn't ready after {_START_SECONDS:g} s{host._launched.last_words()}"
            raise Unavailable("OperatorHostSlow", why) from None
        except BaseException:
            await host.stop()
            raise
        for place in places:
            host._tidy(_OPERATOR, place.account, Path(place.folder))
        host.view, host.warnings = up.view, list(up.warnings)
        host.operators, host.failed, host.sealed = up.operators, up.failed, up.sealed
        _log.info("operator_host_up", view=up.view, operators=sorted(up.operators))
        for warning in up.warnings:
            _log.warning("operator_host_exposed", warning=warning)
        for source, why in up.failed.items():
            _log.error("operators_left_out", source=source, why=why)
        return host

    async def spawn(self, source: str | None = None) -> OperatorProcess:
        """A new process that has said that it's ready, with the operators of ``source``."""
        key = next(self._keys)
        account, folder = await self._prepare(_OPERATOR, f"process-{key}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

        try:
            with theirs:
                order = Spawn(key, str(folder), account, self.spark, source)
                hosted = await self._begin(
                    order, theirs.fileno(), lambda: self._tidy(_OPERATOR, account, folder)
                )
        except BaseException:
            ours.close()
            raise
        process = OperatorProcess(hosted, ours, source)
        try:
            async with asyncio.timeout(_READY_SECONDS):
                message = await process.receive()
            if not isinstance(message, Ready) or message.version != VERSION:
                raise OperatorGone("an operator process didn't say that it is ready for this wrapper")
        except TimeoutError:
            await process.kill()
            raise OperatorGone(f"an operator process wasn't ready after {_READY_SECONDS:g} s") from None
        except BaseException:
            await process.kill()
            raise
        return process

    async def start_program(
        self, argv: Sequence[str], env: Mapping[str, str], *, log: int, folder: Path
    ) -> HostedProgram:
        """In a view and under an identity of its own. ``folder``, directly below the work folder, is its own: made
        anew for it, and gone with it, so that what runs in one life leaves no code for the next. ``log`` stays the
        caller's."""
        account, own = await self._prepare(_PROGRAM, folder.name)
        order = Program(next(self._keys), str(own), account, list(argv), dict(env))
        hosted = await self._begin(order, log, lambda: self._tidy(_PROGRAM, account, own))
        return HostedProgram(hosted)

    async def died(self) -> None:
        """Returns when the host and all that it started is gone."""
        await self._gone.wait()

    def has_ended(self) -> bool:
        return self._gone.is_set()

    async def stop(self) -> None:
        self._launched.hang_up()
        await self._gone.wait()
        if self._removing:
            await asyncio.wait(self._removing)
        self._accounts.close()

    async def _begin(self, order: Spawn | Program, descriptor: int, gone: Callable[[], None]) -> Hosted:
        """``gone`` is called when everything of it is, or if it never was."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        starting = _Starting(order, ours, gone, self._loop.create_future())
        try:
            with theirs:
                self._order(order, descriptor, theirs.fileno())
        except BaseException:
            ours.close()
            gone()
            raise
        self._starting[order.key] = starting
        hosted = await starting.hosted
        try:
            await asyncio.shield(hosted.born)
        except Unavailable:
            why = f"the operator host could not set it up{self._launched.last_words()}"
            raise Unavailable("OperatorNotStarted", why) from None
        except BaseException:
            self._kill(order.key)
            raise
        return hosted

    async def _prepare(self, purpose: str, name: str) -> tuple[Account | None, Path]:
        account = await self._accounts.take(purpose)
        try:
            return account, await self._make_folder(name, account)
        except BaseException:
            self._accounts.give_back(purpose, account)
            raise

    async def _make_folder(self, name: str, account: Account | None) -> Path:
        """For one process, empty and closed to everybody else. What lies there was left by somebody."""
        folder = self._work_folder / name
        try:
            await asyncio.to_thread(_make_anew, folder, account)
        except OSError as error:
            raise _no_folder(folder, error) from None
        return folder

    def _tidy(self, purpose: str, account: Account | None, folder: Path) -> None:
        """When a process is gone. Its folder's name is free at once; the account is given to somebody else only
        when none of its files is left."""
        aside = self._work_folder / f"gone-{next(self._keys)}"
        with suppress(OSError):
            folder.rename(aside)
            folder = aside
        removing = self._loop.create_task(self._remove(purpose, account, folder))
        self._removing.add(removing)
        removing.add_done_callback(self._removing.discard)

    async def _remove(self, purpose: str, account: Account | None, folder: Path) -> None:
        if await asyncio.to_thread(remove_if_possible, folder):
            self._accounts.give_back(purpose, account)

    def _order(self, order: ToHost, *descriptors: int) -> None:
        """The host always reads; if it doesn't, it's no use to anybody."""
        if self._launched.control.fileno() < 0:
            raise Unavailable("OperatorHostGone", "the operator host has ended")
        try:
            send_packet(self._launched.control, order, descriptors)
        except OSError as error:
            self._launched.hang_up()
            why = f"the operator host doesn't listen: {error.strerror}"
            raise Unavailable("OperatorHostGone", why) from None

    def _kill(self, key: int) -> None:
        with suppress(Unavailable):
            self._order(Kill(key))
        self._loop.call_later(_KILL_SECONDS, self._insist, key)

    def _insist(self, key: int) -> None:
        """A host that can't kill is killed, and takes everything along."""
        if key in self._hosted:
            _log.error("operator_host_cannot_kill", pid=self._hosted[key].pid)
            self._launched.hang_up()

    def _readable(self) -> None:
        try:
            received = read_from_host(self._launched.control)
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            _log.error("operator_host_garbled", error=str(error))
            received = None
        if received is None:
            self._launched.hang_up()
            return
        self._take(*received)

    def _take(self, message: FromHost, handles: list[int]) -> None:
        match message:
            case Up():
                self._greeting.set_result(message)
            case Refused():
                self._greeting.set_exception(_refusal(message))
            case Spawned(key):
                starting = self._starting.pop(key)
                self._hosted[key] = hosted = starting.started(handles.pop(), self._kill)
                if not _resolve(starting.hosted, hosted):
                    self._kill(key)
            case Failed(key, why):
                self._starting.pop(key).failed(Unavailable("OperatorNotStarted", f"the operator host {why}"))
            case Gone(key, status):
                self._hosted.pop(key).ended(status)

    def _exited(self) -> None:
        self._launched.hang_up()
        error = Unavailable("OperatorHostGone", f"the operator host has ended{self._launched.last_words()}")
        _fail(self._greeting, error)
        for starting in self._starting.values():
            starting.failed(error)
        self._starting.clear()
        self._burial = self._loop.create_task(self._bury())

    async def _bury(self) -> None:
        """Usually all are gone by now; not yet, when the host's guardian was killed."""
        hosted = list(self._hosted.values())
        with suppress(TimeoutError):
            async with asyncio.timeout(_KILL_SECONDS):
                for each in hosted:
                    await each.over()
        for each in hosted:
            each.ended(HOST_GONE)
        self._hosted.clear()
        self._gone.set()


class _NoNamespaces(Unavailable):
    pass


@dataclass(frozen=True, slots=True)
class _Starting:
    """What was ordered and isn't there yet. ``gone`` is called once, if it never is or when it is gone."""

    order: Spawn | Program
    line: socket.socket
    gone: Callable[[], None]
    hosted: asyncio.Future[Hosted]

    def started(self, handle: int, kill: Callable[[int], None]) -> Hosted:
        order = self.order
        folder = Path(order.folder)
        hosted = Hosted(order.key, handle, self.line, kill, account=order.account, folder=folder)
        hosted.gone.add_done_callback(lambda _: self.gone())
        return hosted

    def failed(self, error: Unavailable) -> None:
        self.line.close()
        self.gone()
        _fail(self.hosted, error)


def _make_work_folder(folder: Path) -> None:
    """Processes reach their own folder in it, and see no other."""
    try:
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        folder.chmod(0o711 if os.geteuid() == 0 else 0o700)
    except OSError as error:
        raise _no_folder(folder, error) from None


def _make_anew(folder: Path, account: Account | None) -> None:
    with suppress(FileNotFoundError):
        remove_tree(folder)
    for path in (folder, folder / TEMPORARY):
        path.mkdir(mode=0o700)
        if account is not None:
            os.chown(path, account.uid, account.gid, follow_symlinks=False)


def _no_folder(folder: Path, error: OSError) -> Unavailable:
    return Unavailable("WorkFolderUnusable", f"can't make the work folder {folder}: {error.strerror}")


def _refusal(refused: Refused) -> Unavailable | Invalid:
    if refused.kind == "NoNamespaces":
        return _NoNamespaces("NoNamespaces", refused.message)
    return Invalid("OperatorHostRefused", f"operators can't be run here: {refused.message}")


def _resolve(future: asyncio.Future[_T], value: _T) -> bool:
    """False when nobody waits any more."""
    if future.done():
        return False
    future.set_result(value)
    return True


def _fail(future: asyncio.Future[_T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        # Nobody may be waiting, which is no reason for a warning.
        future.exception()
