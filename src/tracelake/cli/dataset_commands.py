"""``tracelake datasets`` and ``datasets show``."""

from __future__ import annotations

from typing import Annotated

import typer

from tracelake.cli.show import print_fields, print_heading, print_json, print_table
from tracelake.cli.stack import HomeOption, JsonOption, TokenOption, UrlOption, connect

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


@datasets_app.command("show")
def show_dataset(
    name: Annotated[str, typer.Argument(help="Published name, or uuid.")],
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many partitions.")] = 20,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a dataset and its committed partitions.

    Examples:

        tracelake datasets show blocks

        tracelake datasets show blocks --limit 1000 --json
    """
    with connect(url, token, home) as client:
        detail = client.dataset(name)
        page = client.partitions(name, limit=limit)
    if as_json:
        print_json({"dataset": detail, "partitions": page.partitions, "next": page.next})
        return
    print_fields(
        (
            ("dataset", detail.dataset),
            ("uuid", detail.dataset_uuid),
            ("version", detail.dataset_version),
            ("revision", detail.revision),
            ("producer", f"{detail.dag_name}/{detail.job}" if detail.job else detail.dag_name),
            ("output", f"{detail.output_index} ({detail.output_name})"),
            ("storage", detail.storage),
            ("write mode", detail.write_mode),
            ("cursor", detail.cursor),
            ("finalized", detail.finalized),
            ("partitions", detail.partitions),
            ("since", detail.created_at),
        )
    )
    if page.partitions:
        print_heading("partitions" + (f", the first {limit}" if page.next else ""))
        print_table(
            ("RANGE", "ROWS", "REVISION", "COMMITTED", "TASK", "LOCATION"),
            [
                (
                    each.partition_key,
                    each.row_count,
                    each.revision,
                    each.committed_at,
                    each.task_id,
                    each.location,
                )
                for each in page.partitions
            ],
            indent=2,
        )
