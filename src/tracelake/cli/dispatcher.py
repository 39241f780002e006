"""``tracelake dispatcher``: runs the control plane, on an embedded Postgres or on given ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake import objects
from tracelake.cli.service import LogFormatOption, LogStyle, QueueDsn, StateDsn, serve, write_logs
from tracelake.cli.stack import DEFAULT_HOME
from tracelake.domain.errors import Invalid
from tracelake.stack_connection import DISPATCHER_FILE, INTERNAL_PORT, USER_PORT

if TYPE_CHECKING:
    from tracelake.dev.handle import DispatcherHandle
    from tracelake.dev.home import Home
    from tracelake.dispatcher.app import Endpoints
    from tracelake.dispatcher.settings import DispatcherSettings

_SETTLE_SECONDS = 2.0

HELP = """Run the Dispatcher: it turns events into leased tasks and serves two ports.

The **user port** is for people, the CLI and CI (`/v1/*`, `Authorization: Bearer`); the **internal port** is
for workers (`/internal/*`) and tasks (`/v1/task/*`) and must not be reachable from elsewhere.

Without DSNs it starts a Postgres of its own inside the home. With `--state-dsn` (or `TRACELAKE_STATE_DSN`) it
uses a given one, version 15 or newer; the queue is then a database of its own, given by `--queue-dsn`.

Several may run on the same databases, on one home or on homes that share their `objects` folder: passwords, worker
tokens and signing keys belong to the installation, in the state database, and a further Dispatcher uses those. The
passwords of shared logins may be given when the first one starts: `TRACELAKE_QUEUE_PASSWORD`,
`TRACELAKE_CATALOG_PASSWORD`, `TRACELAKE_AUDIT_PASSWORD`. Later on, other ones are refused.

Examples:

    tracelake dispatcher --home ./home

    tracelake dispatcher --home ./home --user-port 0 --internal-port 0 --ready-file ready.json

    TRACELAKE_STATE_DSN=postgresql://… TRACELAKE_QUEUE_DSN=postgresql://… tracelake dispatcher --home ./home
"""

DispatcherHomeOption = Annotated[
    Path,
    typer.Option(readable=False, help="Folder for keys, tokens, objects and the embedded Postgres."),
]
RuntimeOption = Annotated[
    list[str] | None, typer.Option("--runtime", help="Register another runtime, as NAME=QUEUE. Repeatable.")
]


def dispatcher(
    home: DispatcherHomeOption = DEFAULT_HOME,
    state_dsn: StateDsn = None,
    queue_dsn: QueueDsn = None,
    host: Annotated[str, typer.Option(help="Address that both ports listen on.")] = "127.0.0.1",
    user_port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = USER_PORT,
    internal_port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = INTERNAL_PORT,
    runtime: RuntimeOption = None,
    invoker_url: Annotated[
        str | None,
        typer.Option(
            envvar="TRACELAKE_INVOKER_URL", help="An invoker of functions that doesn't register itself."
        ),
    ] = None,
    query_url: Annotated[
        str | None,
        typer.Option(
            envvar="TRACELAKE_QUERY_URL", help="The Query Service that the user port passes queries on to."
        ),
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the URLs and tokens, there while both ports answer.  [default: HOME/dispatcher.json]"
        ),
    ] = None,
    log_format: LogFormatOption = LogStyle.JSON,
) -> None:
    from tracelake.kernel import forbid_inspection

    # First: other processes of the same user must not read the secrets that follow.
    forbid_inspection()
    from tracelake.dev.home import Home
    from tracelake.dispatcher.settings import DispatcherSettings, tuned
    from tracelake.settings import Secret
    from tracelake.store.installation import given_passwords

    if (state_dsn is None) != (queue_dsn is None):
        raise Invalid("DsnMissing", "--state-dsn and --queue-dsn go together")
    write_logs(log_format)
    place = Home(home)
    with ExitStack() as stack:
        if state_dsn is None or queue_dsn is None:
            state_dsn, queue_dsn = stack.enter_context(_embedded(place))
        settings = DispatcherSettings(
            state_dsn=Secret(state_dsn),
            queue_dsn=Secret(queue_dsn),
            home=place.copies,
            given=given_passwords(os.environ),
            objects=objects.address(place.objects),
            host=host,
            user_port=user_port,
            internal_port=internal_port,
            runtimes=_runtimes(runtime or []),
            invoker_url=invoker_url or None,
            query_url=query_url or None,
        )
        # The default file is shared by the Dispatchers of a home, so ``DispatcherFiles`` manages it.
        chosen = (
            ready_file if ready_file and ready_file.absolute() != place.folder / DISPATCHER_FILE else None
        )
        _serve(place, tuned(settings, os.environ), chosen)


dispatcher.__doc__ = HELP


@contextmanager
def _embedded(place: Home) -> Iterator[tuple[str, str]]:
    from tracelake.dev.home import QUEUE_DATABASE, STATE_DATABASE
    from tracelake.embedded.postgres import Cluster

    with Cluster(place.state_cluster, name="state") as cluster:
        for database in (STATE_DATABASE, QUEUE_DATABASE):
            cluster.ensure_database(database)
        yield cluster.dsn(STATE_DATABASE), cluster.dsn(QUEUE_DATABASE)


def _serve(place: Home, settings: DispatcherSettings, ready_file: Path | None) -> None:
    import asyncio

    from tracelake.dev.handle import DispatcherFiles, settle, write_handle
    from tracelake.dispatcher.app import run_dispatcher
    from tracelake.dispatcher.loops.periodic import every

    files = DispatcherFiles(place.folder)

    def ready(endpoints: Endpoints) -> None:
        handle = _handle(place, endpoints)
        if ready_file is None:
            files.publish(handle)
        else:
            write_handle(ready_file, handle)
        typer.echo(f"ready  user {endpoints.user_url}  internal {endpoints.internal_url}")

    async def run(stop: asyncio.Event, _hurry: asyncio.Event) -> None:
        # Another Dispatcher on this home may be killed: its address must not stay published.
        settling = asyncio.create_task(
            every(_SETTLE_SECONDS, "dispatcher file", lambda: asyncio.to_thread(settle, place.folder))
        )
        try:
            await run_dispatcher(settings, stop, ready)
        finally:
            settling.cancel()

    try:
        serve(run)
    finally:
        if ready_file is None:
            files.withdraw()
        else:
            _remove_ready(ready_file)


def _handle(place: Home, endpoints: Endpoints) -> DispatcherHandle:
    from tracelake.dev.handle import DispatcherHandle
    from tracelake.tokens.opaque_tokens import first_token

    return DispatcherHandle(
        user_url=endpoints.user_url,
        internal_url=endpoints.internal_url,
        user_token=place.secrets().user_token,
        worker_token=first_token(place.worker_tokens),
        pid=os.getpid(),
    )


def _remove_ready(path: Path) -> None:
    """Remove only our own file: a successor on the same home may have written its file already."""
    from tracelake.dev.handle import DispatcherHandle, remove_handle
    from tracelake.stack_connection import read_handle

    handle = read_handle(path, DispatcherHandle)
    if handle is not None and handle.pid == os.getpid():
        remove_handle(path)


def _runtimes(entries: list[str]) -> dict[str, str]:
    runtimes = {}
    for entry in entries:
        name, sep, queue = entry.partition("=")
        if not (sep and name and queue):
            raise Invalid("InvalidRuntime", f"--runtime takes NAME=QUEUE, not {entry!r}")
        runtimes[name] = queue
    return runtimes
