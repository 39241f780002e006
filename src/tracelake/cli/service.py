"""What the commands that serve a stack share: options, how they reach the stack, and running until a signal.

``ServiceConnection`` has the addresses and logins of a worker, a sink or a Query Service: all from the environment,
or all from the stack that runs on a home. Both of them are read once, before anything else is started, and the
variables are removed from the environment: operators and other child processes inherit what stays there.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self, TypeVar

import typer

from tracelake import objects
from tracelake.cli.stack import stack_on
from tracelake.settings import Secret

if TYPE_CHECKING:
    import asyncio

    from tracelake.dev.handle import DevHandle

    Service = Callable[[asyncio.Event, asyncio.Event], Awaitable[None]]
    LeaseHolder = Callable[[asyncio.Event, asyncio.Event, Callable[[], None]], Awaitable[None]]

StateDsn = Annotated[
    str | None, typer.Option(envvar="TRACELAKE_STATE_DSN", help="State database (prefer the variable).")
]
QueueDsn = Annotated[
    str | None, typer.Option(envvar="TRACELAKE_QUEUE_DSN", help="Queue database (prefer the variable).")
]
MetricsHostOption = Annotated[
    str, typer.Option(envvar="TRACELAKE_METRICS_HOST", help="Address of the port for metrics.")
]
MetricsPortOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=65535,
        envvar="TRACELAKE_METRICS_PORT",
        help="For /metrics and /healthz; 0 picks a free one.",
    ),
]


class LogStyle(StrEnum):
    JSON = "json"
    TEXT = "text"


LogFormatOption = Annotated[
    LogStyle, typer.Option("--log-format", case_sensitive=False, help="Form of the log on stderr.")
]

INTERNAL_URL = "TRACELAKE_INTERNAL_URL"
WORKER_CREDENTIAL = "TRACELAKE_WORKER_TOKEN"
QUEUE_DSN = "TRACELAKE_QUEUE_DSN"
DATA_WRITE_DSN = "TRACELAKE_DATA_WRITE_DSN"
DATA_READ_DSN = "TRACELAKE_DATA_READ_DSN"
DATA_ADDRESS = "TRACELAKE_DATA_ADDRESS"
CATALOG_DSN = "TRACELAKE_CATALOG_DSN"
AUDIT_DSN = "TRACELAKE_AUDIT_DSN"
QUERY_URL = "TRACELAKE_QUERY_URL"
OBJECTS = "TRACELAKE_OBJECTS"
_VARIABLES = (
    *(INTERNAL_URL, WORKER_CREDENTIAL, QUEUE_DSN, DATA_WRITE_DSN, DATA_READ_DSN),
    *(DATA_ADDRESS, CATALOG_DSN, AUDIT_DSN, QUERY_URL, OBJECTS),
)
ALIASES = {
    DATA_WRITE_DSN: "TRACELAKE_DATA_DSN",
    DATA_READ_DSN: "TRACELAKE_READING_DSN",
    OBJECTS: "TRACELAKE_OBJECT_ROOT",
}
"""Former names of variables, which go on working (docs/cli.md)."""
_RETIRED = ("TRACELAKE_STAGING_DSN",)
"""Logins of former versions: nobody reads them, and no child process may inherit them either."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConnection:
    """None where the environment doesn't set it. ``objects`` is the address of the object store, by default the
    home's; ``operators`` are the sources that the workers of the home's stack load."""

    internal_url: str | None = None
    worker_token: Secret | None = None
    queue_dsn: Secret | None = None
    data_write_dsn: Secret | None = None
    data_read_dsn: Secret | None = None
    data_address: str | None = None
    catalog_dsn: Secret | None = None
    audit_dsn: Secret | None = None
    query_url: str | None = None
    objects: str
    operators: tuple[str, ...] = ()

    @classmethod
    def from_env_or_home(
        cls, home: Path, environment: MutableMapping[str, str], required: Collection[str]
    ) -> Self:
        """From the environment if that sets all ``required`` variables, otherwise from the stack on the home;
        raises ``Unavailable``, naming the missing ones, if none runs there."""
        # All of them, also those that this command doesn't use: children inherit what stays.
        values = {name: _taken(environment, name) for name in _VARIABLES}
        for name in _RETIRED:
            environment.pop(name, None)
        if missing := [name for name in required if not values[name]]:
            handle = stack_on(home, missing)
            return cls._of_stack(handle, home if CATALOG_DSN in required else None)
        return cls(
            internal_url=values[INTERNAL_URL],
            worker_token=_secret(values[WORKER_CREDENTIAL]),
            queue_dsn=_secret(values[QUEUE_DSN]),
            data_write_dsn=_secret(values[DATA_WRITE_DSN]),
            data_read_dsn=_secret(values[DATA_READ_DSN]),
            data_address=values[DATA_ADDRESS],
            catalog_dsn=_secret(values[CATALOG_DSN]),
            audit_dsn=_secret(values[AUDIT_DSN]),
            query_url=values[QUERY_URL],
            objects=objects.address(values[OBJECTS] or home / "objects"),
        )

    @classmethod
    def _of_stack(cls, handle: DevHandle, home: Path | None) -> Self:
        """``home`` is for the Query Service alone, whose passwords aren't in the handle."""
        catalog, audit = (None, None) if home is None else _query_logins(handle.state_dsn, home)
        return cls(
            internal_url=handle.internal_url,
            worker_token=Secret(handle.worker_token),
            queue_dsn=Secret(handle.queue_dsn),
            data_write_dsn=Secret(handle.data_write_dsn),
            data_read_dsn=Secret(handle.data_read_dsn),
            catalog_dsn=catalog,
            audit_dsn=audit,
            query_url=handle.query_url,
            objects=objects.address(handle.object_root),
            operators=handle.operators,
        )


def given(value: T | None) -> T:
    """A field that the command requires: ``from_env_or_home`` returns no connection without it."""
    assert value is not None
    return value


def _taken(environment: MutableMapping[str, str], name: str) -> str | None:
    """The variable's value, or its former name's; both are removed."""
    values = [environment.pop(each, "") for each in (name, ALIASES.get(name)) if each is not None]
    return next(filter(None, values), None)


def _secret(value: str | None) -> Secret | None:
    return None if value is None else Secret(value)


def _query_logins(state_dsn: str, home: Path) -> tuple[Secret, Secret]:
    from tracelake.dev.addresses import audit_dsn, catalog_dsn
    from tracelake.dev.home import Home

    passwords = Home(home).query_secrets()
    return Secret(catalog_dsn(state_dsn, passwords)), Secret(audit_dsn(state_dsn, passwords))


def operators_at(source: str) -> str:
    """A file's full path: it is loaded by a process in another folder, and once however it was named."""
    path = Path(source)
    return str(path.absolute()) if path.suffix == ".py" or path.is_dir() else source


def write_logs(log_format: LogStyle) -> None:
    from tracelake.logs import configure_logs

    configure_logs("json" if log_format is LogStyle.JSON else "text")


def serve(service: Service) -> None:
    """Run ``service`` in the foreground. It gets two events: to stop, set by the first signal, and to stop at once,
    set by the second one."""
    import asyncio

    import uvloop

    from tracelake.serving.end_of_tasks import end_tasks

    async def main() -> None:
        stop, stop_now = asyncio.Event(), asyncio.Event()

        def asked() -> None:
            # A second signal means that the person doesn't want to wait.
            (stop_now if stop.is_set() else stop).set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, asked)
        try:
            await service(stop, stop_now)
        finally:
            await end_tasks()

    uvloop.run(main())


def serve_tasks(service: LeaseHolder, name: str, ready_file: Path | None) -> None:
    """``serve`` for a worker or a sink, which also gets a function to call once it takes work: it prints the name
    and writes the process id to ``ready_file``, which exists until the end."""
    from tracelake.dev.handle import write_ready

    def ready() -> None:
        write_ready(ready_file)
        typer.echo(f"ready  {name}")

    try:
        serve(lambda stop, stop_now: service(stop, stop_now, ready))
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)
