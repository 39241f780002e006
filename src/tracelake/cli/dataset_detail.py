"""``tracelake datasets show`` for people, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracelake.cli.show import print_fields, print_heading, print_table, scope

if TYPE_CHECKING:
    from tracelake.cli.dataset_sample import Sample
    from tracelake.contracts.buffers import BufferDetail
    from tracelake.contracts.user_api import DatasetDetail, DatasetLag, DatasetVersion, PartitionSummary


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
    """As they were declared, or as a query finds them."""
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
    """Where to look with ``data_read_dsn``; there from the first commit on."""
    version = dataset.dataset_version if dataset.storage == "postgres" else dataset.hot_version
    return None if version is None else f"data.d_{version.hex}"
