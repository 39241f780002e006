"""``tracelake backfill``: a range of old blocks through a DAG, and its progress.

The state that it shows, and what it has still to ask for, come from the stack in one answer; so an interrupted
command is resumed by giving it again, and two of them at once ask for nothing twice.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.cli.backfill_report import a_report, failure_line, summary
from tracelake.cli.backfill_run import Backfill
from tracelake.cli.bounds import MAX_CHUNK
from tracelake.cli.job_commands import JobArgument, job_name
from tracelake.cli.patient_client import PatientClient
from tracelake.cli.show import print_json
from tracelake.cli.stack import HomeOption, JsonOption, TokenOption, UrlOption
from tracelake.domain.block_range import MAX_BLOCK

if TYPE_CHECKING:
    from tracelake.contracts.coverage import BackfillState


class Order(StrEnum):
    OLDEST = "oldest"
    NEWEST = "newest"


def backfill(
    job: JobArgument,
    start: Annotated[
        int, typer.Option("--from", min=0, max=MAX_BLOCK, help="The first block.", show_default=False)
    ],
    end: Annotated[
        int, typer.Option("--to", min=0, max=MAX_BLOCK, help="The last block, inclusive.", show_default=False)
    ],
    chunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_CHUNK,
            help="Blocks per task; must divide the splitter's chunk_size.  [default: that]",
        ),
    ] = None,
    order: Annotated[Order, typer.Option(help="Which blocks come first.")] = Order.OLDEST,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")
    ] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Ask for the blocks and don't wait for them.")
    ] = False,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fill in a range of blocks: ask for what is missing of it, and show how it comes in.

    The job is the one that stores the blocks, such as evm_ingest; what it needs before it is a manual source and a
    range_splitter. Only what isn't committed and nobody has asked for yet is asked for, and tasks that failed
    earlier are tried again, so the same command resumes an interrupted one. How many tasks run at once is the
    job's scaling.max_concurrency.

    Ctrl-C ends the command and not the work. The exit code is 1 if tasks failed in the end.

    Examples:

        tracelake backfill chain/ingest --from 0 --to 999999 --dry-run

        tracelake backfill chain/ingest --from 0 --to 999999

        tracelake backfill chain/ingest --from 0 --to 999999 --order newest --no-wait
    """
    dag, name = job_name(job)
    if start > end:
        raise typer.BadParameter(f"--from {start} is behind --to {end}")
    with PatientClient(url, token, home) as client:
        work = Backfill(client, dag, name, start, end, chunk, order.value)
        if dry_run:
            _print_plan(work.look(), as_json)
            return
        with a_report(as_json=as_json) as report:
            work.run(report, wait=not no_wait)


def _print_plan(state: BackfillState, as_json: bool) -> None:
    if as_json:
        print_json(state)
        return
    typer.echo(summary(state))
    through = f"{state.source.dag_name}/{state.source.job}"
    if state.splitter is not None:
        through += f" → {state.splitter.dag_name}/{state.splitter.job}"
    typer.echo(f"through {through}, at most {state.max_concurrency or 'any number'} at once")
    for each in state.runs_also:
        typer.echo(f"runs {each.dag_name}/{each.job} as well")
    for each in state.paused:
        typer.echo(f"waits: {each.dag_name}/{each.job} is paused")
    for event in state.events[:10]:
        typer.echo(f"would ask for {event.start}-{event.end}")
    if len(state.events) > 10 or state.more_events:
        typer.echo("and so on")
    for failure in state.failed[:10]:
        typer.echo(f"would try again: {failure_line(failure)}")
