"""The operator host as the wrapper sees it: operator processes and programs on request.

A host lives once. When it is gone, so is everything that it started: its processes say ``OperatorGone``, its
programs have ended, ``died`` returns, and a new host may be started. It ends with the wrapper, however that ends.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from tracelake.contracts.operator_protocol import VERSION, Ready, SparkTarget
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.worker.host.hosted import HOST_GONE, Hosted, HostedProgram
from tracelake.worker.host.launch import LaunchedHost, launch
from tracelake.worker.host.operator_process import OperatorGone, OperatorProcess
from tracelake.worker.host.protocol import (
    Failed,
    FromHost,
    Gone,
    Inspect,
    Inspected,
    Kill,
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

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")


class OperatorHost:
    def __init__(self, spec: HostSpec, launched: LaunchedHost) -> None:
        self.spec = spec
        self.view = ""
        """How far operators are kept apart, in words."""
        self.warnings: list[str] = []
        """What isn't as it should be, for people to read."""
        self.uid: int | None = None
        """Whom operators run as; None when it's the wrapper's own user."""
        self.spark: SparkTarget | None = None
        """What processes connect to as they start; settable."""
        self._launched = launched
        self._loop = asyncio.get_running_loop()
        self._keys = itertools.count(1)
        self._greeting: asyncio.Future[Up] = self._loop.create_future()
        self._starting: dict[int, asyncio.Future[Hosted]] = {}
        self._inspected: dict[int, asyncio.Future[int]] = {}
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
        host = cls(spec, launch())
        try:
            host._order(spec.setup(namespaces=namespaces))
            async with asyncio.timeout(_START_SECONDS):
                up = await asyncio.shield(host._greeting)
        except TimeoutError:
            await host.stop()
            why = f"the operator host wasn't ready after {_START_SECONDS:g} s{host._launched.last_words()}"
            raise Unavailable("OperatorHostSlow", why) from None
        except BaseException:
            await host.stop()
            raise
        host.view, host.uid, host.warnings = up.view, up.uid, list(up.warnings)
        _log.info("operator_host_up", view=up.view, operators=up.operators)
        for warning in up.warnings:
            _log.warning("operator_host_exposed", warning=warning)
        return host

    async def spawn(self) -> OperatorProcess:
        """A new process that has said that it's ready."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                hosted = await self._begin(Spawn(next(self._keys), self.spark), theirs.fileno())
        except BaseException:
            ours.close()
            raise
        process = OperatorProcess(hosted, ours)
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
        self, argv: Sequence[str], env: Mapping[str, str], *, log: int, cwd: Path
    ) -> HostedProgram:
        """In the operators' view and under their identity. ``log`` stays the caller's."""
        order = Program(next(self._keys), list(argv), dict(env), str(cwd))
        return HostedProgram(await self._begin(order, log))

    async def children(self, process: OperatorProcess) -> int:
        """How many processes it has left running."""
        key = process.hosted.key
        answer: asyncio.Future[int] = self._loop.create_future()
        self._inspected[key] = answer
        self._order(Inspect(key))
        return await answer

    async def died(self) -> None:
        """Returns when the host and all that it started is gone."""
        await self._gone.wait()

    def has_ended(self) -> bool:
        return self._gone.is_set()

    async def stop(self) -> None:
        self._launched.hang_up()
        await self._gone.wait()

    async def _begin(self, order: Spawn | Program, descriptor: int) -> Hosted:
        started: asyncio.Future[Hosted] = self._loop.create_future()
        self._starting[order.key] = started
        self._order(order, descriptor)
        return await started

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
                hosted = self._hosted[key] = Hosted(key, handles.pop(), self._kill)
                if not _resolve(self._starting.pop(key), hosted):
                    self._kill(key)
            case Failed(key, why):
                error = Unavailable("OperatorNotStarted", f"the operator host {why}")
                _fail(self._starting.pop(key), error)
            case Inspected(key, children):
                _resolve(self._inspected.pop(key), children)
            case Gone(key, status):
                self._hosted.pop(key).ended(status)

    def _exited(self) -> None:
        self._launched.hang_up()
        error = Unavailable("OperatorHostGone", f"the operator host has ended{self._launched.last_words()}")
        _fail(self._greeting, error)
        for started in self._starting.values():
            _fail(started, error)
        for inspected in self._inspected.values():
            _fail(inspected, error)
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
