"""``tracelake datasets``, ``datasets show`` and ``datasets gaps``.

A dataset is named by its published name, its uuid, or as DAG/JOB[/OUTPUT] if it has no name. ``show`` prints its
columns, versions, partitions and lag, and a sample of rows by a query, or the reason why there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.cli.show import (
    counted,
    print_fields,
    print_heading,
    print_json,
    print_rows,
    print_table,
    scope,
)
from tracelake.cli.stack import HomeOption, JsonOption, TokenOption, UrlOption, connect
from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.errors import NotFound, TracelakeError

if TYPE_CHECKING:
    from tracelake.client import Client
    from tracelake.contracts.buffers import BufferDetail
    from tracelake.contracts.query_api import QueryResponse
    from tracelake.contracts.user_api import DatasetDetail, DatasetLag, DatasetVersion, PartitionSummary

HELP = "Published name, uuid, or DAG/JOB[/OUTPUT] (an output's name or number)."


datasets_app = typer.Typer(invoke_without_command=True)


@datasets_app.callback()
def datasets(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of entries.")] = 100,
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
        _pass_options(context, context.invoked_subcommand)
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


def _pass_options(context: typer.Context, subcommand: str) -> None:
    """Pass options before a subcommand's name on to it; those after the name take precedence."""
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
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of partitions.")] = 20,
    sample: Annotated[int, typer.Option(min=0, max=1000, help="Number of rows to show, 0 for none.")] = 5,
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
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of entries.")] = 100,
    after: Annotated[str | None, typer.Option(help="Go on after a page's `next`.")] = None,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the block ranges that are missing between the committed ones.

    A dataset with a cursor has everything up to it, so a gap can only lie beyond. With --from and --to, ranges
    before the first and after the last committed block are shown as well.

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


def resolve(client: Client, text: str) -> str:
    """The name or uuid by which the API knows the dataset."""
    if "/" not in text:
        return text
    dag, job, output = [*text.split("/", 2), ""][:3]
    if not dag or not job:
        raise typer.BadParameter(f"a job's output is written DAG/JOB/OUTPUT, not {text!r}")
    found = client.datasets(dag=dag, job=job, limit=1000).datasets
    if not found:
        raise typer.BadParameter(f"there is no active job {dag}/{job} with outputs")
    named = [each for each in found if output in ("", each.output_name, str(each.output_index))]
    if len(named) != 1:
        outputs = ", ".join(each.output_name for each in sorted(found, key=lambda each: each.output_index))
        raise typer.BadParameter(f"{dag}/{job} has the outputs {outputs}: name one, as {dag}/{job}/OUTPUT")
    return str(named[0].dataset_uuid)


def print_dataset(detail: DatasetDetail) -> None:
    current = next((each for each in detail.versions if each.current), None)
    print_fields(
        (
            ("dataset", detail.dataset),
            ("uuid", detail.dataset_uuid),
            ("version", detail.dataset_version),
            ("revision", detail.revision),
            ("producer", f"{detail.dag_name}/{detail.job}" if detail.job else detail.dag_name),
            ("output", f"{detail.output_index} ({detail.output_name})"),
            ("storage", detail.storage),
            ("table", hot_table(detail)),
            ("hot version", detail.hot_version),
            ("write mode", detail.write_mode),
            ("schema hash", detail.schema_hash),
            ("unique", ", ".join(detail.schema.unique) if detail.schema else None),
            ("cursor", detail.cursor),
            ("finalized", detail.finalized),
            ("partitions", detail.partitions),
            ("blocks", scope(current.start, current.end) if current else None),
            ("rows", current.rows if current else None),
            ("lag", lag(detail.lag)),
            ("updated", current.updated_at if current else None),
            ("since", detail.created_at),
        )
    )


def lag(known: DatasetLag | None) -> str | None:
    if known is None or (known.behind is None and known.seconds is None):
        return None
    behind = [] if known.behind is None else [f"{known.behind:,} behind"]
    since = [] if known.seconds is None else [f"{known.seconds:.0f} s since the last commit"]
    return ", ".join(behind + since)


def print_buffer(buffer: BufferDetail) -> None:
    age = buffer.oldest_age_seconds
    print_heading("buffer")
    print_fields(
        (
            ("  writers", ", ".join(buffer.writers) or "none yet"),
            ("  undelivered", buffer.undelivered),
            ("  waiting", buffer.waiting),
            ("  in flight", buffer.in_flight),
            ("  oldest", None if not age else f"{age:.0f} s"),
            ("  dead letters", buffer.dead_letters),
            ("  sink", buffer.sink_status),
        )
    )


def print_versions(versions: Sequence[DatasetVersion]) -> None:
    print_heading("versions")
    print_table(
        ("VERSION", "CURRENT", "REVISION", "STORAGE", "BLOCKS", "ROWS", "CURSOR", "SINCE"),
        [
            (
                each.dataset_version,
                each.current,
                each.revision,
                each.storage,
                scope(each.start, each.end),
                each.rows,
                each.cursor,
                each.created_at,
            )
            for each in versions
        ],
        indent=2,
    )


def print_partitions(partitions: Sequence[PartitionSummary], cut: str) -> None:
    print_heading("partitions" + cut)
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
            for each in partitions
        ],
        indent=2,
    )


def print_columns(detail: DatasetDetail, sample: Sample) -> None:
    """Columns as they were declared, or as a query returned them."""
    if detail.schema is not None:
        print_heading("columns")
        rows = [
            (each.name, each.type, each.by if each.by == "platform" else "") for each in detail.schema.columns
        ]
        print_table(("COLUMN", "TYPE", ""), rows, indent=2)
    elif sample.rows is not None and sample.rows.columns:
        print_heading("columns")
        found = zip(sample.rows.columns, sample.rows.types, strict=True)
        print_table(("COLUMN", "TYPE"), list(found), indent=2)


def hot_table(dataset: DatasetDetail) -> str | None:
    """The table to read with ``data_read_dsn``; it exists from the first commit on."""
    version = dataset.dataset_version if dataset.storage == "postgres" else dataset.hot_version
    return None if version is None else f"data.d_{version.hex}"


@dataclass(frozen=True, slots=True)
class Sample:
    """``missing`` is the reason why there are no ``rows``; both are None when no sample was requested."""

    rows: QueryResponse | None = None
    missing: str | None = None


def take_sample(client: Client, dataset: DatasetDetail, size: int) -> Sample:
    if size == 0:
        return Sample()
    if dataset.dataset is None:
        return Sample(missing="only published datasets can be queried")
    if dataset.storage == "none":
        return Sample(missing="it has no rows: its storage is none (events only)")
    try:
        # Names have letters, digits and underscores alone, so none can end the quotes.
        return Sample(client.query_rows(f'FROM "{dataset.dataset}"', limit=size))
    except NotFound:
        return Sample(missing="this installation has no Query Service")
    except TracelakeError as error:
        # The sample is an extra: everything else is shown without it.
        return Sample(missing=error.message)


def print_sample(sample: Sample) -> None:
    if sample.missing is not None:
        print_heading(f"no sample: {sample.missing}")
    if sample.rows is not None:
        print_heading("sample" if sample.rows.rows else "no rows yet")
        if sample.rows.rows:
            print_rows(sample.rows.columns, sample.rows.types, sample.rows.rows, indent=2)
