"""The ``tracelake`` command: every subcommand and group is registered here.

Commands import what they need when they run: asking for help or for a list of tasks must not wait for the
Dispatcher's modules, and must work where they aren't installed.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tracelake import __version__
from tracelake.cli import failures
from tracelake.cli.backfill import backfill
from tracelake.cli.buffers import buffers_app
from tracelake.cli.bundles import bundle_app
from tracelake.cli.dags import dag_app, deploy, init, plan, schema
from tracelake.cli.database import database_app
from tracelake.cli.datasets import datasets_app
from tracelake.cli.deliveries import deliveries_app
from tracelake.cli.delivery import delivery
from tracelake.cli.dev import dev
from tracelake.cli.devchain import devchain
from tracelake.cli.dispatcher import dispatcher
from tracelake.cli.doctor import doctor
from tracelake.cli.explain import explain
from tracelake.cli.jobs import pause, resume, trigger
from tracelake.cli.keys import keys_app
from tracelake.cli.logs import logs
from tracelake.cli.outbox import outbox_app
from tracelake.cli.query import query
from tracelake.cli.query_service import query_service
from tracelake.cli.rpc import rpc_app
from tracelake.cli.scheduler import scheduler
from tracelake.cli.sink import sink
from tracelake.cli.sources import sources_app
from tracelake.cli.status import status
from tracelake.cli.tasks import cancel, retry, task_app, tasks
from tracelake.cli.verify import verify
from tracelake.cli.worker import worker

DEBUG = "--debug"
_SERVICES = ("dev", "dispatcher", "worker", "sink", "delivery", "scheduler", "query-service", "devchain")


class Commands(TyperGroup):
    """Reports a value that isn't one of an option's as such, without the prefix of the library that checks it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


app = typer.Typer(
    cls=Commands,
    help="Tracelake: events in, leased tasks out, every output committed once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for title, commands in (
    ("Run", (dev, dispatcher, worker, sink, delivery, scheduler, query_service, doctor, logs, devchain)),
    ("Work with DAGs", (init, deploy, plan, trigger, backfill, pause, resume, schema)),
    ("Look and act", (status, query, tasks, explain, verify, cancel, retry)),
):
    for command in commands:
        app.command(rich_help_panel=title)(command)
for name, group in (
    ("task", task_app),
    ("datasets", datasets_app),
    ("buffers", buffers_app),
    ("deliveries", deliveries_app),
    ("outbox", outbox_app),
):
    app.add_typer(group, name=name, rich_help_panel="Look and act")
app.add_typer(sources_app, name="sources", rich_help_panel="Work with DAGs")
app.add_typer(keys_app, name="keys", rich_help_panel="Run")
app.add_typer(database_app, name="database", rich_help_panel="Run")
app.add_typer(rpc_app, name="rpc", rich_help_panel="Run")
app.add_typer(dag_app, name="dag", rich_help_panel="Work with DAGs")
app.add_typer(bundle_app, name="bundle", rich_help_panel="Work with DAGs")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Show a traceback when something fails.")] = False,
) -> None:
    if version:
        typer.echo(f"tracelake {__version__}")
        raise typer.Exit
    if context.invoked_subcommand in _SERVICES:
        close_to_others()


def close_to_others() -> None:
    """Set a umask that keeps other users from writing to files that a service creates. A stricter one stays: files
    that others must read get their mode where they are created."""
    # The umask can only be read by setting one; the strict one holds for the moment in between.
    os.umask(os.umask(0o077) | 0o022)


def main() -> None:
    """Accept ``--debug`` anywhere on the line: people append it to a command that has just failed."""
    given = sys.argv[1:]
    arguments = [each for each in given if each != DEBUG]
    failures.run(lambda: app(arguments, prog_name="tracelake"), debug=len(arguments) < len(given))
