"""One life of an embedded Spark Connect server: from its start to the reason why it ended.

It listens on the loopback interface alone, on a port that it chooses itself and tells through its log's pipe: a
port picked for it could be somebody else's by the time it is there. It takes no call without the token, which
is made anew for every life. That it refuses others is asked of it before anybody is sent there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.domain.errors import TracelakeError, Unauthenticated, Unavailable
from tracelake.worker.logs.program_log import ProgramLog
from tracelake.worker.spark.channel import supervised
from tracelake.worker.spark.conf import LOOPBACK, ONLY_WHAT_IS_INSTALLED, server_conf, server_secrets
from tracelake.worker.spark.engine import HostedProgram, ProgramStarter
from tracelake.worker.spark.launch import MISCONFIGURED, Launch, forget_secrets
from tracelake.worker.spark.pulse import Pulse
from tracelake.worker.spark.rpc import SparkRpc
from tracelake.worker.spark.settings import SparkSettings

_LISTENS = re.compile(r"SparkConnectServer: Spark Connect server started at: .*:(\d+)$")
_PASSED_ON = ("HADOOP_CONF_DIR", "JAVA_HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "YARN_CONF_DIR")
_FIRST_ANSWER = 30.0
_FIRST_QUERY = 120.0
_LAST_WORDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """What every life of a server starts from."""

    settings: SparkSettings
    folder: Path
    log: Path
    python_path: str
    within: float


class SparkLife:
    def __init__(self, birth: Birth, program: HostedProgram, log: ProgramLog) -> None:
        self.pid = program.pid
        self.program = program
        self._birth = birth
        self._log = log
        self._exit = asyncio.create_task(program.wait())
        self._rpc: SparkRpc | None = None
        self._target: SparkTarget | None = None
        self._warming: asyncio.Task[None] | None = None

    @classmethod
    async def begin(cls, birth: Birth, host: ProgramStarter) -> SparkLife:
        """Returns once it listens, refuses strangers and answers us; nothing is left behind otherwise."""
        token = secrets.token_urlsafe(32)
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        told = msgspec.json.encode(launch(birth, token))
        log = ProgramLog(birth.log, lambda line: _note_port(line, port), told)
        try:
            program = await host.start_program(
                [sys.executable, "-s", "-P", "-m", "tracelake.worker.spark.launch"],
                environment(birth, os.environ),
                log=log.write_fd,
                folder=birth.folder,
            )
        except BaseException:
            log.close()
            raise
        log.handed_on()
        life = cls(birth, program, log)
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
        """Waits for the end: it exited, or it has been silent for too long. Why, for people."""
        hangs = asyncio.create_task(Pulse(self.rpc, hangs_after).stops())
        try:
            await asyncio.wait({self._exit, hangs}, return_when=asyncio.FIRST_COMPLETED)
            return hangs.result() if hangs.done() and not self._exit.done() else await self._why_exited()
        finally:
            hangs.cancel()

    async def end(self) -> None:
        """Whatever its state, it is gone afterwards. It keeps nothing that a slow goodbye would save."""
        if self._warming is not None:
            self._warming.cancel()
        if self._rpc is not None:
            self._rpc.close()
        if not self._exit.done():
            await self.program.kill()
        await asyncio.wait({self._exit})
        self._log.close()

    async def _settle(self, port: asyncio.Future[int], token: str) -> None:
        await asyncio.wait(
            {port, self._exit}, timeout=self._birth.within, return_when=asyncio.FIRST_COMPLETED
        )
        if self._exit.done():
            raise Unavailable("SparkNotStarted", await self._why_exited())
        if not port.done():
            raise Unavailable("SparkNotStarted", f"no answer in {self._birth.within:g} s: {self._log.tail()}")
        self._target = SparkTarget(url=supervised(LOOPBACK, port.result()), token=token)
        await _require_refusal(self._target)
        self._rpc = SparkRpc(self._target)
        await self._rpc.version(_FIRST_ANSWER)
        await self._forget_secrets()
        self._warming = asyncio.create_task(self._warm_up(self._rpc))

    async def _forget_secrets(self) -> None:
        try:
            await asyncio.to_thread(forget_secrets, self._birth.folder)
        except OSError as error:
            why = f"the file with the Spark server's token can't be removed: {error.strerror}"
            raise Unavailable("SparkUnprotected", why) from None

    async def _warm_up(self, rpc: SparkRpc) -> None:
        """The first query loads some thousand classes: better now than in somebody's task."""
        with contextlib.suppress(TracelakeError):
            await rpc.select_one(_FIRST_QUERY)

    async def _why_exited(self) -> str:
        code = await self._exit
        await self._log.drained(_LAST_WORDS)
        if code == MISCONFIGURED:
            return self._log.tail(1)
        return f"the Spark server ended with {code}: {self._log.tail() or 'without a word'}"


def launch(birth: Birth, token: str) -> Launch:
    settings = birth.settings
    return Launch(
        folder=str(birth.folder),
        java=settings.java,
        java_options=settings.java_options,
        driver_memory=settings.driver_memory,
        conf=server_conf(settings, birth.folder, birth.python_path),
        secrets=server_secrets(settings, token),
    )


def environment(birth: Birth, inherited: Mapping[str, str]) -> dict[str, str]:
    """All that the server knows of its surroundings: nothing of the worker's is passed on unnamed. No secret."""
    settings, folder = birth.settings, birth.folder
    told = {
        "HOME": str(folder),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": birth.python_path,
        **ONLY_WHAT_IS_INSTALLED,
        "SPARK_LOCAL_DIRS": str(folder / "scratch"),
        "SPARK_USER": "tracelake",
    }
    if settings.runs_here:
        told["SPARK_LOCAL_IP"] = LOOPBACK
    return {name: inherited[name] for name in _PASSED_ON if name in inherited} | told


def _note_port(line: str, port: asyncio.Future[int]) -> None:
    found = _LISTENS.search(line)
    if found and not port.done():
        port.set_result(int(found[1]))


async def _require_refusal(target: SparkTarget) -> None:
    stranger = SparkRpc(target, with_token=False)
    try:
        await stranger.version(_FIRST_ANSWER)
    except Unauthenticated:
        return
    finally:
        stranger.close()
    raise Unavailable("SparkUnprotected", "the Spark server takes calls without its token: not used")
