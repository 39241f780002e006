"""An embedded Spark Connect server, supervised: started, checked and restarted when it dies or hangs.

Each run of it (``SparkServerRun``) is a generation. When one ends it is lost at once: attempts on it learn that
through ``lost``, long before their calls would time out. The server is killed for certain and started again, with
a growing delay when it keeps dying.

A server listens on the loopback interface alone, on a port that it chooses itself and prints to its log's pipe: a
port chosen for it could be in use by the time it starts. It accepts no call without the token, which is new for
every run. Before the address is given out, the worker checks that the server refuses calls without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

import tracelake
from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.domain.backoff import Backoff
from tracelake.domain.errors import TracelakeError, Unauthenticated, Unavailable
from tracelake.program_log import ProgramLog
from tracelake.worker.spark.connect import HealthProbe, SparkRpc, interrupt_attempt, supervised
from tracelake.worker.spark.engine import ProgramStarter, SparkEngine, SparkProgram
from tracelake.worker.spark.launch import (
    LOOPBACK,
    MISCONFIGURED,
    ONLY_WHAT_IS_INSTALLED,
    Launch,
    forget_secrets,
    server_conf,
    server_secrets,
)
from tracelake.worker.spark.remote import RemoteSpark
from tracelake.worker.spark.settings import SparkSettings

_RESTART_BACKOFF = Backoff(first=1.0, longest=30.0)
_STEADY_AFTER = 60.0
_ANSWERS_WITHIN = 5.0
_AGAIN = 1.0
_DOWNLOADS_WITHIN = 900.0
_LISTENS = re.compile(r"SparkConnectServer: Spark Connect server started at: .*:(\d+)$")
_PASSED_ON = ("HADOOP_CONF_DIR", "JAVA_HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "YARN_CONF_DIR")
_FIRST_ANSWER = 30.0
_FIRST_QUERY = 120.0
_LAST_WORDS = 1.0

_log = logging.getLogger(__name__)


def spark_engine(
    settings: SparkSettings,
    host: ProgramStarter,
    folder: Path,
    *,
    log: Path | None = None,
    python_path: Sequence[str] = (),
) -> SparkEngine:
    """The Spark that the settings ask for; ``python_path`` is where its Python workers find modules."""
    if settings.remote is not None:
        return RemoteSpark(settings.remote, settings.token)
    return SparkServer(settings, host, folder, log=log, python_path=python_path)


class SparkServer:
    """``folder`` belongs to the server, which makes it; ``log`` belongs to the worker."""

    def __init__(
        self,
        settings: SparkSettings,
        host: ProgramStarter,
        folder: Path,
        *,
        log: Path | None = None,
        python_path: Sequence[str] = (),
        starts_within: float = 120.0,
        hangs_after: float = 30.0,
    ) -> None:
        self._host = host
        self._hangs_after = hangs_after
        self._spec = ServerSpec(
            settings=settings,
            folder=folder,
            log=log or folder.with_name(f"{folder.name}.log"),
            python_path=os.pathsep.join([str(Path(tracelake.__file__).parents[1]), *python_path]),
            within=max(starts_within, _DOWNLOADS_WITHIN) if settings.packages else starts_within,
        )
        self._generation = 0
        self._life: SparkServerRun | None = None
        self._serving = asyncio.Event()
        self._gone = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def pid(self) -> int:
        return self._current().pid

    @property
    def target(self) -> SparkTarget:
        return self._current().target

    @property
    def group(self) -> int | None:
        account = None if self._life is None else self._life.program.account
        return None if account is None else account.gid

    async def grant(self, places: Sequence[str]) -> None:
        await self._current().program.grant(places)

    async def withdraw(self, places: Sequence[str], *, force: bool = False) -> list[str]:
        return await self._current().program.withdraw(places, force=force)

    async def start(self) -> None:
        await self._begin()

    async def ready(self) -> SparkTarget:
        # It may be lost again before this caller runs.
        while self._life is None:
            await self._serving.wait()
        return self._life.target

    async def healthy(self) -> bool:
        if self._life is None:
            return False
        try:
            await self._life.rpc.version(_ANSWERS_WITHIN)
        except TracelakeError:
            return False
        return True

    async def lost(self, generation: int) -> None:
        if self._life is not None and generation == self._generation:
            await self._gone.wait()

    async def watch(self) -> None:
        """Goes on after any error: without it Spark would be gone without a report."""
        restarts = _RESTART_BACKOFF.counter()
        pause = 0.0
        while True:
            if self._life is not None:
                began = asyncio.get_running_loop().time()
                await self._outlive(self._life)
                if asyncio.get_running_loop().time() - began > _STEADY_AFTER:
                    restarts.succeeded()
                    pause = 0.0
                else:
                    pause = restarts.failed()
            await asyncio.sleep(pause)
            try:
                await self._begin()
            except TracelakeError as error:
                pause = restarts.failed()
                _log.error("Spark could not be started: %s", error)
            except Exception:
                pause = restarts.failed()
                _log.exception("Spark could not be started")

    async def interrupt(self, task_id: str, attempt: int, epoch: int) -> None:
        generation = self._generation
        # The next generation knows nothing of the attempt.
        while self._life is not None and self._generation == generation:
            if await interrupt_attempt(self._life.rpc, task_id, attempt, epoch):
                return
            await asyncio.sleep(_AGAIN)

    async def stop(self) -> None:
        """Cancel ``watch`` first, or it starts the next one."""
        await self._lose()

    async def _outlive(self, life: SparkServerRun) -> None:
        try:
            reason = await life.over(self._hangs_after)
        except Exception as error:
            reason = f"it can't be watched: {type(error).__name__}: {error}"
        _log.warning("Spark generation %d is lost: %s", self._generation, reason)
        try:
            await self._lose()
        except Exception:
            _log.exception("could not clean up everything of Spark generation %d", self._generation)

    async def _begin(self) -> None:
        life = await SparkServerRun.begin(self._spec, self._host)
        self._life = life
        self._generation += 1
        # A new one for each generation: a caller that waits for the end of the last one keeps that.
        self._gone = asyncio.Event()
        self._serving.set()
        _log.info("Spark generation %d serves at %s", self._generation, life.target.url)

    async def _lose(self) -> None:
        # First: attempts must learn of the loss before the server is killed, which may take a while.
        life, self._life = self._life, None
        self._serving.clear()
        self._gone.set()
        if life is not None:
            self._ending = asyncio.create_task(life.end())
        if self._ending is not None:
            # Carried out also when the caller is cancelled; ``stop`` waits for it once more.
            await asyncio.shield(self._ending)

    def _current(self) -> SparkServerRun:
        if self._life is None:
            raise Unavailable("SparkUnavailable", "the Spark server is being started")
        return self._life


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """The parameters of every run of a server."""

    settings: SparkSettings
    folder: Path
    log: Path
    python_path: str
    within: float


class SparkServerRun:
    def __init__(self, spec: ServerSpec, program: SparkProgram, log: ProgramLog) -> None:
        self.pid = program.pid
        self.program = program
        self._spec = spec
        self._log = log
        self._exit = asyncio.create_task(program.wait())
        self._rpc: SparkRpc | None = None
        self._target: SparkTarget | None = None
        self._warming: asyncio.Task[None] | None = None

    @classmethod
    async def begin(cls, spec: ServerSpec, host: ProgramStarter) -> SparkServerRun:
        """Return once the server listens, refuses calls without the token and answers ours; otherwise nothing is
        left behind."""
        token = secrets.token_urlsafe(32)
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        message = msgspec.json.encode(launch_of(spec, token))
        log = ProgramLog(spec.log, lambda line: _note_port(line, port), message)
        try:
            program = await host.start_program(
                [sys.executable, "-s", "-P", "-m", "tracelake.worker.spark.launch"],
                environment_of(spec, os.environ),
                log=log.write_fd,
                folder=spec.folder,
            )
        except BaseException:
            log.close()
            raise
        log.handed_on()
        life = cls(spec, program, log)
        try:
            await life._settle(port, token)
        except BaseException:
            await life.end()
            raise
        return life

    @property
    def target(self) -> SparkTarget:
        assert self._target is not None, "a life that has begun has a target"
        return self._target

    @property
    def rpc(self) -> SparkRpc:
        assert self._rpc is not None, "a life that has begun can be called"
        return self._rpc

    async def over(self, hangs_after: float) -> str:
        """Wait for the end: it exited, or it has been silent for too long. The result is the reason, for people."""
        hangs = asyncio.create_task(HealthProbe(self.rpc, hangs_after).stops())
        try:
            await asyncio.wait({self._exit, hangs}, return_when=asyncio.FIRST_COMPLETED)
            # An exit says more than the silence that came of it.
            return hangs.result() if hangs.done() and not self._exit.done() else await self._why_exited()
        finally:
            hangs.cancel()

    async def end(self) -> None:
        """End the server whatever its state. It has nothing that a graceful end would save."""
        if self._warming is not None:
            self._warming.cancel()
        if self._rpc is not None:
            self._rpc.close()
        if not self._exit.done():
            await self.program.kill()
        await asyncio.wait({self._exit})
        self._log.close()

    async def _settle(self, port: asyncio.Future[int], token: str) -> None:
        await asyncio.wait({port, self._exit}, timeout=self._spec.within, return_when=asyncio.FIRST_COMPLETED)
        if self._exit.done():
            raise Unavailable("SparkNotStarted", await self._why_exited())
        if not port.done():
            raise Unavailable("SparkNotStarted", f"no answer in {self._spec.within:g} s: {self._log.tail()}")
        self._target = SparkTarget(url=supervised(LOOPBACK, port.result()), token=token)
        await _require_refusal(self._target)
        self._rpc = SparkRpc(self._target)
        await self._rpc.version(_FIRST_ANSWER)
        await self._forget_secrets()
        self._warming = asyncio.create_task(self._warm_up(self._rpc))

    async def _forget_secrets(self) -> None:
        try:
            await asyncio.to_thread(forget_secrets, self._spec.folder)
        except OSError as error:
            why = f"the file with the Spark server's token can't be removed: {error.strerror}"
            raise Unavailable("SparkUnprotected", why) from None

    async def _warm_up(self, rpc: SparkRpc) -> None:
        """The first query loads some thousand classes: better now than in a task."""
        with contextlib.suppress(TracelakeError):
            await rpc.select_one(_FIRST_QUERY)

    async def _why_exited(self) -> str:
        code = await self._exit
        await self._log.drained(_LAST_WORDS)
        if code == MISCONFIGURED:
            return self._log.tail(1)
        return f"the Spark server exited with {code}: {self._log.tail() or 'no output'}"


def launch_of(spec: ServerSpec, token: str) -> Launch:
    settings = spec.settings
    return Launch(
        folder=str(spec.folder),
        java=settings.java,
        java_options=settings.java_options,
        driver_memory=settings.driver_memory,
        conf=server_conf(settings, spec.folder, spec.python_path),
        secrets=server_secrets(settings, token),
    )


def environment_of(spec: ServerSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """The server's whole environment: named variables of the worker's, and no secret."""
    settings, folder = spec.settings, spec.folder
    variables = {
        "HOME": str(folder),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": spec.python_path,
        **ONLY_WHAT_IS_INSTALLED,
        "SPARK_LOCAL_DIRS": str(folder / "scratch"),
        "SPARK_USER": "tracelake",
    }
    if settings.runs_here:
        variables["SPARK_LOCAL_IP"] = LOOPBACK
    return {name: inherited[name] for name in _PASSED_ON if name in inherited} | variables


def _note_port(line: str, port: asyncio.Future[int]) -> None:
    found = _LISTENS.search(line)
    if found and not port.done():
        port.set_result(int(found[1]))


async def _require_refusal(target: SparkTarget) -> None:
    anonymous = SparkRpc(target, with_token=False)
    try:
        await anonymous.version(_FIRST_ANSWER)
    except Unauthenticated:
        return
    finally:
        anonymous.close()
    raise Unavailable("SparkUnprotected", "the Spark server accepts calls without its token; it is not used")
