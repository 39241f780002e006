"""The operator host as the wrapper uses it: operator processes and programs on request.

A host is never restarted. When it ends, so does everything that it started: its processes raise ``OperatorGone``,
its programs have ended, ``died`` returns, and a new host may be started. It ends with the wrapper, however that
ends.
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

from tracelake.contracts.operator_protocol import VERSION, Ready, SparkTarget
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.sandbox.accounts import Account
from tracelake.trees import remove_if_possible, remove_tree
from tracelake.worker.host.identity import Accounts
from tracelake.worker.host.keeper import TEMPORARY
from tracelake.worker.host.launch import HostSpec, LaunchedHost, launch
from tracelake.worker.host.operator_process import (
    HOST_GONE,
    HostedProcess,
    HostedProgram,
    OperatorGone,
    OperatorProcess,
)
from tracelake.worker.host.protocol import (
    FromHost,
    Gone,
    Kill,
    ProcessIdentity,
    Program,
    Refused,
    Spawn,
    Spawned,
    SpawnFailed,
    ToHost,
    Up,
    read_from_host,
    send_packet,
)

__all__ = ["HostSpec", "HostedProgram", "OperatorGone", "OperatorHost", "OperatorProcess"]

_START_SECONDS = 120.0
_READY_SECONDS = 60.0
_KILL_SECONDS = 20.0
_OPERATOR, _PROGRAM = "operator", "spark"
"""Purposes that accounts are held for."""

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")


class OperatorHost:
    def __init__(self, spec: HostSpec, launched: LaunchedHost, accounts: Accounts) -> None:
        self.spec = spec
        self.view = ""
        """A description of how operators are isolated, for people to read."""
        self.warnings: list[str] = []
        """Weaknesses of this view, for people to read."""
        self.operators: dict[str, str | None] = {}
        """All operators by name, each with the source that a process has to load for it."""
        self.failed: dict[str, str] = {}
        """Sources whose operators can't be run, with the reason."""
        self.sealed = False
        """Whether a process loses all access to files that are withdrawn from it, so that it may be used again."""
        self.spark: SparkTarget | None = None
        """The Spark server that processes connect to as they start; settable."""
        self._launched = launched
        self._accounts = accounts
        self._work_folder = Path(os.path.realpath(spec.work_folder))
        self._removing: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._keys = itertools.count(1)
        self._greeting: asyncio.Future[Up] = self._loop.create_future()
        self._starting: dict[int, _Starting] = {}
        self._hosted: dict[int, HostedProcess] = {}
        self._gone = asyncio.Event()
        self._burial: asyncio.Task[None] | None = None
        self._loop.add_reader(launched.control, self._readable)
        launched.on_exit(self._exited)

    @classmethod
    async def start(cls, spec: HostSpec) -> OperatorHost:
        """Start a host. Raises with reason and remedy when operators can't be run here."""
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
            # One for the proof of the view, and one for each source that is loaded.
            taken = [await accounts.take(_OPERATOR) for _ in (None, *spec.sources)]
            host = cls(spec, launch(), accounts)
        except BaseException:
            accounts.close()
            raise
        try:
            _make_work_folder(host._work_folder)
            places = [
                ProcessIdentity(
                    str(await host._make_folder(f"proof-{os.getpid()}-{number}", account)), account
                )
                for number, account in enumerate(taken)
            ]
            host._order(spec.setup(namespaces=namespaces, own=places[0], provers=places[1:]))
            async with asyncio.timeout(_START_SECONDS):
                # Shielded: the timeout must not cancel a future that the reader may still set.
                up = await asyncio.shield(host._greeting)
        except TimeoutError:
            await host.stop()
            why = f"the operator host wasn't ready after {_START_SECONDS:g} s{host._launched.log_tail()}"
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
        """Start a process with the operators of ``source``; it is ready when this returns."""
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
                raise OperatorGone("an operator process did not send Ready with this protocol version")
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
        """Start a program in a view and under an identity of its own.

        ``folder``, directly below the work folder, is made anew for it and removed when it has ended, so that one
        run leaves no code for the next. ``log`` stays the caller's.
        """
        account, own = await self._prepare(_PROGRAM, folder.name)
        order = Program(next(self._keys), str(own), account, list(argv), dict(env))
        hosted = await self._begin(order, log, lambda: self._tidy(_PROGRAM, account, own))
        return HostedProgram(hosted)

    async def died(self) -> None:
        """Wait until the host and everything that it started has ended."""
        await self._gone.wait()

    def has_ended(self) -> bool:
        return self._gone.is_set()

    async def stop(self) -> None:
        self._launched.hang_up()
        await self._gone.wait()
        if self._removing:
            await asyncio.wait(self._removing)
        # Last: accounts are free for others only when none of their processes and files is left.
        self._accounts.close()

    async def _begin(
        self, order: Spawn | Program, descriptor: int, gone: Callable[[], None]
    ) -> HostedProcess:
        """``gone`` is called when nothing of the process is left, or if it never started."""
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
            why = f"the operator host could not set it up{self._launched.log_tail()}"
            raise Unavailable("OperatorNotStarted", why) from None
        except BaseException:
            # The caller is gone, and nothing else would end the process.
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
        """Make an empty folder for one process, closed to all others. A leftover of that name is removed."""
        folder = self._work_folder / name
        try:
            await asyncio.to_thread(_make_anew, folder, account)
        except OSError as error:
            raise _no_folder(folder, error) from None
        return folder

    def _tidy(self, purpose: str, account: Account | None, folder: Path) -> None:
        """Clean up after a process. Its folder's name is free at once; the account is reused only when none of
        its files is left."""
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
        """Send an order. A host that doesn't read is broken, and is killed."""
        if self._launched.control.fileno() < 0:
            raise Unavailable("OperatorHostGone", "the operator host has ended")
        try:
            send_packet(self._launched.control, order, descriptors)
        except OSError as error:
            self._launched.hang_up()
            why = f"sending to the operator host failed: {error.strerror}"
            raise Unavailable("OperatorHostGone", why) from None

    def _kill(self, key: int) -> None:
        with suppress(Unavailable):
            self._order(Kill(key))
        self._loop.call_later(_KILL_SECONDS, self._kill_stuck_host, key)

    def _kill_stuck_host(self, key: int) -> None:
        """Kill a host that can't kill a process; everything that it started ends with it."""
        if key in self._hosted:
            _log.error("operator_host_cannot_kill", pid=self._hosted[key].pid)
            self._launched.hang_up()

    def _readable(self) -> None:
        try:
            received = read_from_host(self._launched.control)
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            _log.error("operator_host_invalid_message", error=str(error))
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
                # The caller was cancelled before the process had started.
                if not _resolve(starting.hosted, hosted):
                    self._kill(key)
            case SpawnFailed(key, why):
                self._starting.pop(key).failed(Unavailable("OperatorNotStarted", f"the operator host {why}"))
            case Gone(key, status):
                self._hosted.pop(key).ended(status)

    def _exited(self) -> None:
        self._launched.hang_up()
        error = Unavailable("OperatorHostGone", f"the operator host has ended{self._launched.log_tail()}")
        _fail(self._greeting, error)
        for starting in self._starting.values():
            starting.failed(error)
        self._starting.clear()
        self._burial = self._loop.create_task(self._reap_leftovers())

    async def _reap_leftovers(self) -> None:
        """Usually all processes are gone by now, but not if the host's guardian was killed."""
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
    """An order that isn't answered yet. ``gone`` is called once: if the process never starts, or when it has
    ended."""

    order: Spawn | Program
    line: socket.socket
    gone: Callable[[], None]
    hosted: asyncio.Future[HostedProcess]

    def started(self, handle: int, kill: Callable[[int], None]) -> HostedProcess:
        order = self.order
        folder = Path(order.folder)
        hosted = HostedProcess(order.key, handle, self.line, kill, account=order.account, folder=folder)
        hosted.gone.add_done_callback(lambda _: self.gone())
        return hosted

    def failed(self, error: Unavailable) -> None:
        self.line.close()
        self.gone()
        _fail(self.hosted, error)


def _make_work_folder(folder: Path) -> None:
    """Make the folder that holds the processes' own folders; each process sees only its own."""
    try:
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        # mkdir's mode is subject to the umask. Other accounts may pass through this folder, and not list it.
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
    """Set a future's result; False when it is no longer waited for."""
    if future.done():
        return False
    future.set_result(value)
    return True


def _fail(future: asyncio.Future[_T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        # The future may have no waiter, which is no reason for a warning.
        future.exception()
