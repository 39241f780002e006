"""``tracelake verify``: proves committed files again, from the data itself and against endpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.cli.datasets import HELP, resolve
from tracelake.cli.failures import ExitCode
from tracelake.cli.rpc import choose_pools, pools_file_of
from tracelake.cli.show import counted, print_fields, print_json, print_table
from tracelake.cli.stack import HomeOption, JsonOption, TokenOption, UrlOption, connect
from tracelake.domain.block_range import MAX_BLOCK, BlockRange
from tracelake.domain.errors import Invalid, NotFound

if TYPE_CHECKING:
    from tracelake.client import Client
    from tracelake.contracts.user_api import DatasetDetail, PartitionSummary
    from tracelake.evm.rpc.pool import Pool
    from tracelake.operators.prove_stored import CommittedTable, StoredProof

_SHOWN = 20
_PAGE = 100


def verify(
    dataset: Annotated[str, typer.Argument(help=HELP)],
    start: Annotated[
        int | None,
        typer.Option("--from", min=0, max=MAX_BLOCK, help="First block.  [default: the first committed one]"),
    ] = None,
    end: Annotated[
        int | None,
        typer.Option("--to", min=0, max=MAX_BLOCK, help="Last block.  [default: the last committed one]"),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(min=1, max=10_000_000, help="Prove this many blocks, chosen at random.  [default: all]"),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="POOL", help="Also compare the blocks with the endpoints of this RPC pool."),
    ] = None,
    pools_file: Annotated[
        Path | None,
        typer.Option(
            "--rpc-pools", help="The file with the pools.  [default: as for `tracelake rpc status`]"
        ),
    ] = None,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove the committed files of a chain's table again.

    Files must have the manifest's size and hash. From their rows, the blocks are built and hashed again: headers
    to block hashes, transactions, receipts with logs and withdrawals to the roots in the headers, as far as the
    job's outputs have the columns; blocks must be linked by parent hash, also across partitions. No endpoint is
    asked for that. The files must be readable here: run it on the machine of the object store.

    The exit code is 0 if everything holds, and 1 if anything doesn't or nothing is committed in the range. Blocks
    of the range that aren't committed are named; what is committed can hold without them.

    Examples:

        tracelake verify past_blocks

        tracelake verify chain_mirror/ingest/logs --from 0 --to 999 --json

        tracelake verify past_transactions --sample 200 --against main
    """
    from tracelake.evm.rpc.pool import Pool

    if start is not None and end is not None and end < start:
        raise typer.BadParameter(f"--to {end} is below --from {start}")
    pools = choose_pools(against, pools_file_of(pools_file, home)) if against is not None else []
    span = BlockRange(start or 0, MAX_BLOCK if end is None else end)
    with connect(url, token, home) as client, ExitStack() as opened:
        pool = None
        if pools:
            pool = opened.enter_context(Pool(pools[0]))
            # Before files are read: a pool that doesn't answer, or is of no chain, is reported at once.
            pool.chain_id()
        proven = prove_dataset(client, dataset, span, sample=sample, pool=pool)
    partitions = proven.subject.partitions
    asked = BlockRange(
        partitions[0].start if start is None else start, partitions[-1].end if end is None else end
    )
    shown = _summary(dataset, proven, asked)
    if as_json:
        print_json(shown)
    else:
        _print(shown, proven.proof)
    if proven.proof.wrong:
        raise typer.Exit(ExitCode.FAILED)


@dataclass(frozen=True, slots=True)
class ProvenDataset:
    """``beside`` are the other outputs of the job, which helped to prove the subject."""

    detail: DatasetDetail
    subject: CommittedTable
    beside: list[CommittedTable]
    proof: StoredProof


def prove_dataset(
    client: Client, name: str, span: BlockRange, *, sample: int | None = None, pool: Pool | None = None
) -> ProvenDataset:
    from tracelake.operators.prove_stored import prove_stored

    detail = client.dataset(resolve(client, name))
    if detail.storage != "parquet":
        raise Invalid(
            "NotInFiles",
            f"{name} has its rows in {detail.storage}, not in files: `integrity_check` checks hot tables",
        )
    subject = _committed(client, str(detail.dataset_uuid), name, span)
    if not subject.partitions:
        raise NotFound("NothingCommitted", f"{name} has no committed blocks in this range")
    beside = _beside(client, detail, span)
    return ProvenDataset(
        detail, subject, beside, prove_stored(subject, beside, span, sample=sample, pool=pool)
    )


def _committed(client: Client, uuid: str, name: str, span: BlockRange) -> CommittedTable:
    from tracelake.operators.prove_stored import CommittedTable

    return CommittedTable(name, list(_partitions(client, uuid, span)))


def _partitions(client: Client, uuid: str, span: BlockRange) -> Iterator[PartitionSummary]:
    after: str | None = None
    while True:
        page = client.partitions(uuid, start=span.start, end=span.end, details=True, limit=_PAGE, after=after)
        yield from page.partitions
        if (after := page.next) is None:
            return


def _beside(client: Client, detail: DatasetDetail, span: BlockRange) -> list[CommittedTable]:
    """The other outputs of the job that are in files."""
    if detail.job is None:
        return []
    others = client.datasets(dag=detail.dag_name, job=detail.job, limit=1000).datasets
    return [
        _committed(client, str(each.dataset_uuid), each.dataset or each.output_name, span)
        for each in others
        if each.dataset_uuid != detail.dataset_uuid and each.storage == "parquet"
    ]


def _summary(name: str, proven: ProvenDataset, asked: BlockRange) -> dict[str, object]:
    from tracelake.evm.schemas import unproven_columns

    subject, proof = proven.subject, proven.proof
    committed = subject.committed(asked)
    return {
        "dataset": name,
        "dataset_version": proven.detail.dataset_version,
        "table": subject.dataset,
        "with": [table.name for table in proven.beside if table.dataset is not None],
        "start": committed[0].start,
        "end": committed[-1].end,
        "missing": [{"start": gap.start, "end": gap.end} for gap in _missing(committed, asked)],
        "partitions": len(subject.partitions),
        "levels": _levels(subject.partitions, committed),
        "files": proof.files,
        "bytes": proof.bytes,
        "blocks": proof.blocks,
        "blocks_without_headers": proof.unproven_blocks,
        "blocks_beyond_rows": proof.beyond_rows,
        "proofs": [
            {"what": what.partition(": ")[0], "how": what.partition(": ")[2], "count": count}
            for what, count in proof.proofs.items()
        ],
        "nodes_word": unproven_columns(subject.dataset) if subject.dataset is not None else [],
        "wrong": [{"start": found.start, "end": found.end, "what": found.what} for found in proof.wrong],
        "holds": not proof.wrong,
    }


def _missing(committed: Sequence[BlockRange], asked: BlockRange) -> Iterator[BlockRange]:
    """The blocks of the range that no partition has."""
    wanted = asked.start
    for part in committed:
        if wanted < part.start:
            yield BlockRange(wanted, part.start - 1)
        wanted = part.end + 1
    if wanted <= asked.end:
        yield BlockRange(wanted, asked.end)


def _levels(
    partitions: Sequence[PartitionSummary], committed: Sequence[BlockRange]
) -> list[dict[str, object]]:
    """The level at which blocks were proven when they were written, by range: neighbours of one level are one."""
    found: list[tuple[BlockRange, str | None]] = []
    for partition, part in zip(partitions, committed, strict=True):
        if found and found[-1][1] == partition.verified and found[-1][0].end + 1 == part.start:
            part = BlockRange(found.pop()[0].start, part.end)
        found.append((part, partition.verified))
    return [{"start": part.start, "end": part.end, "verified": level} for part, level in found]


def _print(shown: dict[str, object], proof: StoredProof) -> None:
    levels = shown["levels"]
    assert isinstance(levels, list)
    recorded = ", ".join(
        f"{each['start']}-{each['end']} {each['verified'] or 'not recorded'}" for each in levels
    )
    helping, nodes_word, missing = shown["with"], shown["nodes_word"], shown["missing"]
    assert isinstance(helping, list)
    assert isinstance(missing, list)
    assert isinstance(nodes_word, list)
    print_fields(
        (
            ("dataset", shown["dataset"]),
            ("table", shown["table"] or "none of a chain's"),
            ("proven with", ", ".join(helping) or None),
            ("blocks", f"{shown['start']}-{shown['end']}, {proof.blocks} of them read"),
            ("not committed", ", ".join(f"{gap['start']}-{gap['end']}" for gap in missing) or None),
            ("files", f"{proof.files}, {proof.bytes} bytes"),
            ("when written", recorded),
            ("node's word", ", ".join(nodes_word) or None),
        )
    )
    rows = [(what.partition(": ")[0], count, what.partition(": ")[2]) for what, count in proof.proofs.items()]
    if rows:
        print_table(("PROVEN", "COUNT", "HOW"), rows)
    if proof.unproven_blocks:
        typer.echo(
            f"{counted(proof.unproven_blocks, 'block')} without headers: the job has no table of blocks there, "
            "so only the files were checked"
        )
    if proof.beyond_rows:
        typer.echo(
            f"{counted(proof.beyond_rows, 'block')} can't be proven from rows alone: the chain's hashes cover more "
            "than its tables have; --against compares with endpoints"
        )
    for found in proof.wrong[:_SHOWN]:
        typer.echo(str(found), err=True)
    if len(proof.wrong) > _SHOWN:
        typer.echo(f"and {len(proof.wrong) - _SHOWN} more", err=True)
    holds = "everything that is committed holds" if missing else "everything holds"
    typer.echo(f"findings: {len(proof.wrong)}" if proof.wrong else holds)
