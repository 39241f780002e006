"""``tracelake datasets``, ``datasets show`` and ``datasets gaps``."""

from __future__ import annotations

from typing import Annotated

import typer

from tracelake.cli.dataset_detail import (
    print_buffer,
    print_columns,
    print_dataset,
    print_partitions,
    print_versions,
)
from tracelake.cli.dataset_names import HELP, resolve
from tracelake.cli.dataset_sample import print_sample, take_sample
from tracelake.cli.show import counted, print_json, print_table
from tracelake.cli.stack import HomeOption, JsonOption, TokenOption, UrlOption, connect
from tracelake.domain.block_range import MAX_BLOCK

datasets_app = typer.Typer(invoke_without_command=True)


@datasets_app.callback()
def datasets(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = 100,
    after: Annotated[str | None, typer.Option(help="Go on after a page's `next`.")] = None,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """List datasets in their current version, or show one.

    Examples:

        tracelake datasets

        tracelake datasets --json

        tracelake datasets show blocks
    """
    if context.invoked_subcommand is not None:
        _hand_on(context, context.invoked_subcommand)
        return
    with connect(url, token, home) as client:
        page = client.datasets(limit=limit, after=after)
    if as_json:
        print_json(page)
        return
    if not page.datasets:
        typer.echo("no datasets")
        return
    print_table(
        ("DATASET", "PRODUCER", "OUTPUT", "STORAGE", "REVISION", "CURSOR", "UUID"),
        [
            (
                each.dataset,
                f"{each.dag_name}/{each.job}" if each.job else each.dag_name,
                each.output_name,
                each.storage,
                each.revision,
                each.cursor,
                each.dataset_uuid,
            )
            for each in page.datasets
        ],
    )
    if page.next is not None:
        typer.echo(f"more: --after {page.next}", err=True)


def _hand_on(context: typer.Context, subcommand: str) -> None:
    """Options before a subcommand's name are meant for it; those after it come first."""
    given = {
        name: value
        for name, value in context.params.items()
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    }
    if "after" in given and subcommand == "show":
        raise typer.BadParameter("--after is for lists, and `datasets show` has none")
    context.default_map = {subcommand: given}


@datasets_app.command("show")
def show_dataset(
    name: Annotated[str, typer.Argument(help=HELP)],
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many partitions.")] = 20,
    sample: Annotated[int, typer.Option(min=0, max=1000, help="So many rows of it, 0 for none.")] = 5,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a dataset: its columns, versions, committed partitions, lag, and some of its rows.

    Examples:

        tracelake datasets show blocks

        tracelake datasets show blocks --limit 1000 --json

        tracelake datasets show alert_events --sample 20

        tracelake datasets show chain/ingest/logs
    """
    with connect(url, token, home) as client:
        name = resolve(client, name)
        detail = client.dataset(name)
        page = client.partitions(name, limit=limit)
        seen = take_sample(client, detail, sample)
        buffer = client.buffer(name) if detail.write_mode == "buffered" else None
    if as_json:
        shown = {"dataset": detail, "partitions": page.partitions, "next": page.next}
        print_json({**shown, "buffer": buffer, "sample": seen.rows, "sample_missing": seen.missing})
        return
    print_dataset(detail)
    if buffer is not None:
        print_buffer(buffer)
    if len(detail.versions) > 1:
        print_versions(detail.versions)
    if page.partitions:
        print_partitions(page.partitions, f", the first {limit}" if page.next else "")
    print_columns(detail, seen)
    print_sample(seen)


@datasets_app.command("gaps")
def show_gaps(
    name: Annotated[str, typer.Argument(help=HELP)],
    start: Annotated[
        int | None,
        typer.Option(
            "--from", min=0, max=MAX_BLOCK, help="Look from this block on.  [default: the first committed]"
        ),
    ] = None,
    end: Annotated[
        int | None,
        typer.Option(
            "--to", min=0, max=MAX_BLOCK, help="Up to this block, inclusive.  [default: the last committed]"
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = 100,
    after: Annotated[str | None, typer.Option(help="Go on after a page's `next`.")] = None,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the block ranges that are missing between what is committed.

    Of a dataset with a cursor everything up to it is there, so a gap can only lie outside. With --from and --to
    also what was never begun is shown.

    Examples:

        tracelake datasets gaps blocks

        tracelake datasets gaps chain/ingest/logs --from 0 --to 999999

        tracelake datasets gaps blocks --json
    """
    with connect(url, token, home) as client:
        page = client.gaps(resolve(client, name), start=start, end=end, limit=limit, after=after)
    if as_json:
        print_json(page)
        return
    if page.start is None or page.end is None:
        typer.echo("nothing is committed yet")
        return
    if not page.gaps:
        typer.echo(f"no gaps in {page.start}-{page.end}")
        return
    print_table(("FROM", "TO", "BLOCKS"), [(each.start, each.end, each.blocks) for each in page.gaps])
    if page.next is not None:
        typer.echo(f"more: --after {page.next}", err=True)
    else:
        typer.echo(f"{counted(len(page.gaps), 'gap')} in {page.start}-{page.end}", err=True)
