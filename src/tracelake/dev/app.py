"""``run_dev``: the whole stack on one machine, in the foreground, on one home.

It takes the home's lock, chooses ports, starts the parts in stages under a ``Supervisor``, publishes the addresses
in ``dev.json`` once all are ready, and removes that file again before it stops them.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import environ, getpid
from pathlib import Path

from tracelake.dev import parts
from tracelake.dev.addresses import Addresses, Ports, StackPorts, install_data, roles_kept
from tracelake.dev.child_process import ChildProcess
from tracelake.dev.handle import DevHandle, remove_handle, settle, write_handle, write_targets
from tracelake.dev.home import DATA_DATABASE, QUEUE_DATABASE, STATE_DATABASE, Home
from tracelake.dev.home_checks import check_space, take_over
from tracelake.dev.parts import (
    QUERY_FILE,
    PostgresPart,
    QueryPart,
    delivery_spec,
    dispatcher_spec,
    last_port,
    query_spec,
    scheduler_spec,
    sink_spec,
    worker_name,
    worker_spec,
)
from tracelake.dev.supervisor import Part, ProgressListener, Supervisor
from tracelake.domain.errors import Unavailable
from tracelake.domain.runtimes import ECS_SPARK
from tracelake.embedded.postgres import PortRelay
from tracelake.stack_connection import DEV_FILE, INTERNAL_PORT, USER_PORT
from tracelake.store.installation import given_passwords, join_by_dsn

TARGETS_FILE = "prometheus-targets.json"
"""For ``file_sd_configs`` of a Prometheus of this machine: the ports are other ones after each start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevOptions:
    user_port: int = USER_PORT
    internal_port: int = INTERNAL_PORT
    query_port: int = 0
    runtimes: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    rpc_pools: Path | None = None


def run_dev(
    home: Home, options: DevOptions, *, listener: ProgressListener, on_ready: Callable[[DevHandle], None]
) -> None:
    """Serve until a signal ends it; on return, every process that was started has ended."""
    supervisor = Supervisor(listener)
    # Before any process is started: a signal during the start ends all of them in order.
    _stop_by_signal(supervisor)
    with home.locked(), Ports() as ports:
        check_space(home)
        # Under the lock, and before anything in the home is changed.
        take_over(home)
        home.make_objects()
        _forget(home)
        given = given_passwords(environ)
        home.copies.preset(given)
        stack = _Stack(home, options, _addresses(home, options, ports), given, PortRelay())
        try:
            if supervisor.bring_up(stack.stages(), stack.needs()):
                stack.publish(supervisor)
                if stack.query.refused is not None:
                    listener.say(f"without queries: {stack.query.refused}")
                on_ready(stack.handle(supervisor))
                with roles_kept(home, stack.data_owner_dsn):
                    supervisor.watch(lambda: stack.publish(supervisor))
            listener.say("stopping")
        finally:
            _forget(home)
            supervisor.stop()
            # A part that was still starting may have written its file since.
            _forget(home)
        listener.say("stopped")


def _stop_by_signal(supervisor: Supervisor) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, supervisor.request_stop)
    # Started with nohup, it is meant to outlive the terminal.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, supervisor.request_stop)


def _addresses(home: Home, options: DevOptions, ports: Ports) -> Addresses:
    """Hold the requested ports first: one that is chosen here must not take their place."""
    chosen = {
        "user": options.user_port,
        "internal": options.internal_port,
        "query": options.query_port,
    }
    taken = {name: ports.take(name, port) for name, port in chosen.items() if port}
    taken |= {name: ports.take(name, port) for name, port in chosen.items() if not port}
    return Addresses(
        home,
        StackPorts(
            user=taken["user"],
            internal=taken["internal"],
            query=taken["query"],
            state=ports.take_or_any("state database's", last_port(home.state_cluster)),
            data=ports.take_or_any("data database's", last_port(home.data_cluster)),
            metrics={
                name: ports.take_or_any(f"{name}'s metrics", 0)
                for name in (
                    *(parts.QUERY, parts.SINK, parts.DELIVERY, parts.SCHEDULER),
                    *map(worker_name, options.workers),
                )
            },
        ),
    )


def _forget(home: Home) -> None:
    """Remove the handle files, also of a killed supervisor, so that no client finds a stack that isn't running."""
    for name in (DEV_FILE, QUERY_FILE, TARGETS_FILE):
        remove_handle(home.folder / name)
    settle(home.folder)


class _Stack:
    """The parts by name. Another process takes a ``ChildSpec``, an entry in ``stages`` and one in ``needs``."""

    def __init__(
        self,
        home: Home,
        options: DevOptions,
        addresses: Addresses,
        given: Mapping[str, str],
        relay: PortRelay,
    ) -> None:
        self._home = home
        self._given = given
        self._options = options
        self._addresses = addresses
        self.query = QueryPart(query_spec(home, addresses))
        self._state = PostgresPart(
            home.state_cluster,
            name="state",
            port=addresses.ports.state,
            relay=relay,
            databases=(STATE_DATABASE, QUEUE_DATABASE),
            prepare=self._prepare_state,
        )
        self._data = PostgresPart(
            home.data_cluster,
            name="data",
            port=addresses.ports.data,
            relay=relay,
            databases=(DATA_DATABASE,),
            prepare=self._prepare_data,
        )

    def stages(self) -> list[list[Part]]:
        home, addresses, options = self._home, self._addresses, self._options
        environment = addresses.for_workers(options.rpc_pools)
        dispatcher = dispatcher_spec(
            home, addresses, databases=self._owned_databases, runtimes=options.runtimes
        )
        metrics = addresses.ports.metrics
        scheduler = scheduler_spec(home, metrics[parts.SCHEDULER], environment=addresses.for_scheduler())
        workers = [
            worker_spec(
                home,
                runtime,
                metrics[worker_name(runtime)],
                environment=environment,
                operators=options.operators,
            )
            for runtime in options.workers
        ]
        platform = [
            sink_spec(home, metrics[parts.SINK], environment=environment),
            delivery_spec(home, metrics[parts.DELIVERY], environment=addresses.for_delivery()),
        ]
        return [
            [self._state, self._data],
            [self.query, ChildProcess(dispatcher)],
            [ChildProcess(spec) for spec in (*platform, scheduler, *workers)],
        ]

    def needs(self) -> dict[str, frozenset[str]]:
        """The parts that must be ready before each part. A Spark server takes longest to start and its worker
        waits for the others itself, so it starts at once. The other workers start after the Dispatcher: their
        backoff would make them notice it late."""
        after_dispatcher = frozenset({parts.DISPATCHER, self._data.name})
        others = [worker_name(runtime) for runtime in self._options.workers if runtime != ECS_SPARK]
        return {
            parts.DISPATCHER: frozenset({self._state.name}),
            parts.SCHEDULER: frozenset({parts.DISPATCHER}),
            **dict.fromkeys([parts.SINK, parts.DELIVERY, *others], after_dispatcher),
        }

    def _prepare_state(self, postgres: PostgresPart) -> None:
        """Join the installation: the other parts were given the home's secrets, which must be the same."""
        if asyncio.run(join_by_dsn(postgres.dsn(STATE_DATABASE), self._home.copies, self._given)):
            raise self._secrets_restored("state")

    def _prepare_data(self, postgres: PostgresPart) -> None:
        before = self._home.data_secrets(), self._home.reading_secrets()
        install_data(self._home, postgres.dsn(DATA_DATABASE))
        if (self._home.data_secrets(), self._home.reading_secrets()) != before:
            raise self._secrets_restored("data")

    def _secrets_restored(self, database: str) -> Unavailable:
        return Unavailable(
            "HomeSecretsRestored",
            f"what {self._home.folder} had of the installation's secrets was lost or changed; it has been "
            f"restored from the {database} database: start again",
        )

    def data_owner_dsn(self) -> str:
        return self._data.dsn(DATA_DATABASE)

    def _owned_databases(self) -> dict[str, str]:
        return {
            "TRACELAKE_STATE_DSN": self._state.dsn(STATE_DATABASE),
            "TRACELAKE_QUEUE_DSN": self._state.dsn(QUEUE_DATABASE),
        }

    def handle(self, supervisor: Supervisor) -> DevHandle:
        addresses, options = self._addresses, self._options
        return DevHandle(
            user_url=addresses.user_url,
            internal_url=addresses.internal_url,
            query_url=addresses.query_url,
            worker_token=addresses.worker_token,
            user_token=addresses.user_token,
            state_dsn=self._state.port_dsn(STATE_DATABASE),
            data_owner_dsn=self._data.port_dsn(DATA_DATABASE),
            queue_dsn=addresses.dsns.queue,
            data_write_dsn=addresses.dsns.data_write,
            data_read_dsn=addresses.dsns.data_read,
            object_root=addresses.object_root,
            operators=options.operators,
            rpc_pools=None if options.rpc_pools is None else str(options.rpc_pools),
            metrics=self._metrics(),
            pids={"supervisor": getpid(), **supervisor.pids()},
        )

    def _metrics(self) -> dict[str, str]:
        found = self._addresses.metrics()
        # Its port is held, but nobody answers there.
        if self.query.refused is not None:
            del found[parts.QUERY]
        return found

    def publish(self, supervisor: Supervisor) -> None:
        write_targets(self._home.folder / TARGETS_FILE, self._metrics())
        write_handle(self._home.folder / DEV_FILE, self.handle(supervisor))
