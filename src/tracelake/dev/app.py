"""``tracelake dev``: the whole stack on one machine, in the foreground, on one home."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from os import getpid
from pathlib import Path
from urllib.parse import quote

from tracelake.dev.child_process import ChildProcess, ChildSpec
from tracelake.dev.dispatcher_part import DispatcherPart
from tracelake.dev.handle import DEV_FILE, DISPATCHER_FILE, DevHandle, remove_handle, write_handle
from tracelake.dev.home import DATA_DATABASE, QUEUE_DATABASE, QUEUE_ROLE, STATE_DATABASE, Home
from tracelake.dev.postgres_part import PostgresPart
from tracelake.dev.supervisor import Supervisor
from tracelake.dev.worker_part import worker_spec
from tracelake.hot.install import READER_ROLE, STAGING_ROLE, WRITER_ROLE, install
from tracelake.secret import Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class DevOptions:
    user_port: int = 8600
    internal_port: int = 8601
    runtimes: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    rpc_pools: Path | None = None


def run_dev(
    home: Home, options: DevOptions, *, say: Callable[[str], None], on_ready: Callable[[DevHandle], None]
) -> None:
    """Serve until a signal asks for the end; every process that was started is gone on return."""
    supervisor = Supervisor(say)
    _stop_by_signal(supervisor)
    with home.locked():
        stack = _Stack(home, options, supervisor)
        try:
            stack.forget()
            if stack.bring_up():
                stack.publish()
                on_ready(stack.handle())
                supervisor.watch(stack.publish)
                say("stopping")
        finally:
            stack.forget()
            supervisor.stop()
            stack.forget()


def _stop_by_signal(supervisor: Supervisor) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, supervisor.request_stop)
    # Whoever started this with nohup wants it to outlive the terminal.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, supervisor.request_stop)


class _Stack:
    """The parts by name. A further process is a ``ChildSpec`` and an entry in ``bring_up``."""

    def __init__(self, home: Home, options: DevOptions, supervisor: Supervisor) -> None:
        self._home = home
        self._options = options
        self._supervisor = supervisor
        self._state = PostgresPart(
            home.state_cluster, name="state", databases=(STATE_DATABASE, QUEUE_DATABASE)
        )
        self._data = PostgresPart(home.data_cluster, name="data", databases=(DATA_DATABASE,))
        self._dispatcher = DispatcherPart(
            home,
            user_port=options.user_port,
            internal_port=options.internal_port,
            runtimes=options.runtimes,
        )

    def bring_up(self) -> bool:
        """Stage by stage, each needing the ones before; False when a stop was asked for meanwhile."""
        up = self._supervisor.bring_up
        if not up(self._state, self._data):
            return False
        self._prepare_data()
        return up(ChildProcess(self._dispatcher_spec())) and up(*self._workers())

    def _prepare_data(self) -> None:
        passwords = self._home.data_secrets()
        work = install(
            self._data.dsn(DATA_DATABASE),
            staging_password=Secret(passwords.staging_password),
            writer_password=Secret(passwords.writer_password),
            reader_password=Secret(self._home.reading_secrets().reader_password),
        )
        asyncio.run(work)

    def _workers(self) -> list[ChildProcess]:
        options = self._options
        return [
            ChildProcess(
                worker_spec(
                    self._home, runtime, environment=self._worker_environment, operators=options.operators
                )
            )
            for runtime in options.workers
        ]

    def _worker_environment(self) -> dict[str, str]:
        handle = self.handle()
        pools = self._options.rpc_pools
        return {
            **({} if pools is None else {"TRACELAKE_RPC_POOLS": str(pools)}),
            "TRACELAKE_INTERNAL_URL": handle.internal_url,
            "TRACELAKE_WORKER_TOKEN": handle.worker_token,
            "TRACELAKE_QUEUE_DSN": handle.queue_dsn,
            "TRACELAKE_DATA_DSN": handle.data_write_dsn,
            "TRACELAKE_STAGING_DSN": handle.staging_dsn,
            "TRACELAKE_READING_DSN": handle.data_read_dsn,
            "TRACELAKE_OBJECT_ROOT": handle.object_root,
        }

    def _dispatcher_spec(self) -> ChildSpec:
        return self._dispatcher.spec(
            state_dsn=self._state.dsn(STATE_DATABASE), queue_dsn=self._state.dsn(QUEUE_DATABASE)
        )

    def handle(self) -> DevHandle:
        dispatcher = self._dispatcher.handle
        data = self._home.data_secrets()
        reading = self._home.reading_secrets()
        return DevHandle(
            user_url=dispatcher.user_url,
            internal_url=dispatcher.internal_url,
            query_url=None,
            worker_token=dispatcher.worker_token,
            user_token=dispatcher.user_token,
            state_dsn=self._state.dsn(STATE_DATABASE),
            data_dsn=self._data.dsn(DATA_DATABASE),
            queue_dsn=_dsn(QUEUE_ROLE, self._home.secrets().queue_password, self._state.port, QUEUE_DATABASE),
            data_write_dsn=_dsn(WRITER_ROLE, data.writer_password, self._data.port, DATA_DATABASE),
            staging_dsn=_dsn(STAGING_ROLE, data.staging_password, self._data.port, DATA_DATABASE),
            data_read_dsn=_dsn(READER_ROLE, reading.reader_password, self._data.port, DATA_DATABASE),
            object_root=str(self._home.objects),
            operators=self._options.operators,
            rpc_pools=None if self._options.rpc_pools is None else str(self._options.rpc_pools),
            pids={"supervisor": getpid(), **self._supervisor.pids()},
        )

    def publish(self) -> None:
        write_handle(self._home.folder / DEV_FILE, self.handle())

    def forget(self) -> None:
        """Nobody finds a stack that isn't there; what a killed supervisor left is removed as well."""
        for name in (DEV_FILE, DISPATCHER_FILE):
            remove_handle(self._home.folder / name)


def _dsn(role: str, password: str, port: int, database: str) -> str:
    return f"postgresql://{role}:{quote(password, '')}@127.0.0.1:{port}/{database}?sslmode=disable"
