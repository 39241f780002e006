"""Committed files of a chain's tables, proven again where they lie: the work behind ``tracelake verify``.

The files of one dataset are the subject; other outputs of the same job help to prove them, since a root in a header
covers a whole table. Files must be those of the manifest, byte for byte. Then blocks are read some at a time: they
must be complete and linked, also across partitions, join as their recorded edges say, and hash to what is stored
(``evm.prove_rows``). With a pool, the endpoints must have the same blocks. Nothing is written, and nothing is
collected that grows with the range but a few hashes per window.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tracelake.contracts.manifest import ChainEdges
from tracelake.contracts.user_api import PartitionFile, PartitionSummary
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Unavailable
from tracelake.evm.prove_rows import RowsProven, prove_rows
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.rpc.pool import Pool
from tracelake.evm.schemas import TABLES
from tracelake.objects.base import ObjectLocation
from tracelake.operators.chain_checks import ChainFinding, SpanEdge, broken_seam, merge_findings, unjoined
from tracelake.operators.integrity_check import against_headers, against_themselves
from tracelake.operators.stored_chain import StoredFile, StoredTable
from tracelake.tables.parquet import local_path

FILES = "files: size, number of rows and SHA-256 are the manifest's"
LINKS = "links: every block is there once and the child of the one before, also across partitions"
EDGES = "edges: the first and the last hash and the parent are those that the manifest records"
CHAIN = "chain: the endpoints have the same block, by hash, count and filter"
_WINDOW = 200
"""Number of blocks whose rows are in memory at a time."""
_CHUNK = 1 << 20
_LONGEST = 200
_UNREADABLE = (OSError, pa.ArrowException)


class CommittedTable:
    """The committed partitions of a dataset that touch a range, in the order of blocks."""

    def __init__(self, name: str, partitions: Sequence[PartitionSummary]) -> None:
        self.name = name
        self.partitions = partitions

    @cached_property
    def dataset(self) -> ChainTable | None:
        """The chain table that has the columns of the first file that can be read."""
        for _, file in self.files():
            try:
                names = set(pq.read_schema(_path(file)).names)
            except _UNREADABLE as error:
                _refuse_if_forbidden(file, error)
                continue
            return next((each for each, table in TABLES.items() if table.has_columns(names)), None)
        return None

    def files(self, blocks: Sequence[int] | None = None) -> Iterator[tuple[PartitionSummary, PartitionFile]]:
        """All files, or those that may hold one of ``blocks``."""
        for partition in self.partitions:
            for file in partition.details or ():
                held = _held(partition, file)
                if blocks is None or any(held.start <= block <= held.end for block in blocks):
                    yield partition, file

    def committed(self, span: BlockRange) -> list[BlockRange]:
        """What ``span`` has of each partition."""
        return [cut for each in self.partitions if (cut := _cut(each, span)) is not None]

    def covers(self, span: BlockRange) -> bool:
        return any(each.start <= span.start and span.end <= each.end for each in self.partitions)

    @cached_property
    def stored(self) -> StoredTable:
        assert self.dataset is not None
        held = [(_path(file), _held(partition, file)) for partition, file in self.files()]
        return StoredTable(
            self.dataset, files=tuple(StoredFile(path, span.start, span.end) for path, span in held)
        )


@dataclass(slots=True)
class StoredProof:
    """``proofs`` counts the blocks, or the files, that each way of proving holds for, by its description."""

    files: int = 0
    bytes: int = 0
    blocks: int = 0
    unproven_blocks: int = 0
    """Blocks without a table of blocks beside them: only their files could be checked."""
    beyond_rows: int = 0
    """Blocks whose hashes cover more than the tables have, as on chains with transaction types of their own."""
    chain_id: int | None = None
    proofs: dict[str, int] = field(default_factory=dict)
    wrong: list[ChainFinding] = field(default_factory=list)

    def held(self, proof: str, count: int) -> None:
        if count:
            self.proofs[proof] = self.proofs.get(proof, 0) + count


def prove_stored(
    subject: CommittedTable,
    beside: Sequence[CommittedTable],
    span: BlockRange,
    *,
    sample: int | None = None,
    pool: Pool | None = None,
) -> StoredProof:
    """``beside`` are the other outputs of the subject's job. ``sample`` is the number of blocks to prove, chosen at
    random; all without it."""
    proof = StoredProof()
    committed = subject.committed(span)
    chosen = None if sample is None else _choose(committed, sample)
    _prove_files(subject, proof, chosen)
    tables = {table.dataset: table for table in (*beside, subject) if table.dataset is not None}
    edges: list[SpanEdge] = []
    for window in _windows(committed, chosen):
        proof.blocks += window.end - window.start + 1
        edges += _prove_window(subject, tables, window, pool, proof)
    proof.wrong += unjoined(edges)
    if chosen is None:
        _compare_edges(subject, span, edges, proof)
    proof.wrong = merge_findings(proof.wrong)
    return proof


def _prove_files(subject: CommittedTable, proof: StoredProof, chosen: Sequence[int] | None) -> None:
    for partition, file in subject.files(chosen):
        proof.files += 1
        proof.bytes += file.bytes
        try:
            what = _differs(file)
        except FileNotFoundError:
            what = f"{_name(file)} is missing"
        except _UNREADABLE as error:
            _refuse_if_forbidden(file, error)
            what = f"{_name(file)} can't be read: {_text(error)}"
        if what is None:
            proof.held(FILES, 1)
        else:
            proof.wrong.append(ChainFinding(partition.start, partition.end, what))


def _differs(file: PartitionFile) -> str | None:
    name = _name(file)
    digest, size = hashlib.sha256(), 0
    with Path(_path(file)).open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    if size != file.bytes:
        return f"{name} has {size} bytes, and the manifest {file.bytes}"
    if file.content_hash is not None and f"sha256:{digest.hexdigest()}" != file.content_hash:
        return f"{name} has other content than the manifest's hash"
    rows = pq.read_metadata(_path(file)).num_rows
    if file.rows is not None and rows != file.rows:
        return f"{name} has {rows} rows, and the manifest {file.rows}"
    return None


def _prove_window(
    subject: CommittedTable,
    tables: Mapping[ChainTable, CommittedTable],
    window: BlockRange,
    pool: Pool | None,
    proof: StoredProof,
) -> list[SpanEdge]:
    try:
        there = {
            dataset: table.stored.rows(window.start, window.end)
            for dataset, table in tables.items()
            if table is subject or table.covers(window)
        }
    except _UNREADABLE as error:
        proof.wrong.append(
            ChainFinding(window.start, window.end, f"has rows that can't be read: {_text(error)}")
        )
        return []
    if ChainTable.BLOCKS not in there or subject.dataset is None:
        proof.unproven_blocks += window.end - window.start + 1
        return []
    findings, edge = against_themselves(there, window.start, window.end)
    findings += _other_chains(there[ChainTable.BLOCKS], window, proof)
    if window.start == window.end:
        # A block of a sample: its parent isn't in the window.
        linked = _sampled_link(tables[ChainTable.BLOCKS], window.start, findings)
    else:
        linked = window.end - window.start + 1
    proof.wrong += findings
    proof.held(LINKS, 0 if findings else linked)
    _add(prove_rows(there, None if pool is None else pool.profile), proof)
    if pool is not None:
        others = list(against_headers(pool, there, window.start, window.end))
        proof.wrong += others
        proof.held(CHAIN, 0 if others else window.end - window.start + 1)
    return [] if edge is None else [edge]


def _sampled_link(blocks: CommittedTable, number: int, findings: list[ChainFinding]) -> int:
    """1 if the block's parent is stored, so that the link could be compared."""
    if number == 0 or not any(each.start < number <= each.end + 1 for each in blocks.partitions):
        return 0
    try:
        rows = blocks.stored.rows(number - 1, number)
    except _UNREADABLE as error:
        findings.append(ChainFinding(number, number, f"has a parent that can't be read: {_text(error)}"))
        return 0
    if (broken := broken_seam(rows, number)) is not None:
        findings.append(broken)
    return int(rows.num_rows == 2)


def _other_chains(blocks: pa.Table, window: BlockRange, proof: StoredProof) -> Iterator[ChainFinding]:
    """A block without transactions has nothing that proves its chain but its neighbours."""
    for chain_id in pc.unique(blocks.column("chain_id")).to_pylist():
        if proof.chain_id is None:
            proof.chain_id = chain_id
        if chain_id != proof.chain_id:
            what = f"has rows of chain {chain_id}, and others are of {proof.chain_id}"
            yield ChainFinding(window.start, window.end, what)


def _add(rows: RowsProven, proof: StoredProof) -> None:
    for way, count in rows.blocks.items():
        proof.held(str(way), count)
    proof.beyond_rows += rows.beyond_rows
    proof.wrong += [ChainFinding(wrong.block, wrong.block, wrong.what) for wrong in rows.wrong]


def _compare_edges(
    subject: CommittedTable, span: BlockRange, edges: Sequence[SpanEdge], proof: StoredProof
) -> None:
    """Compare what partitions record with what their blocks are, where the whole partition was read."""
    starts = {edge.start: edge for edge in edges}
    ends = {edge.end: edge for edge in edges}
    for partition in subject.partitions:
        first, last = starts.get(partition.start), ends.get(partition.end)
        if partition.edges is None or first is None or last is None:
            continue
        found = ChainEdges(
            parent_hash=first.first_parent, first_hash=first.first_hash, last_hash=last.last_hash
        )
        if found == partition.edges:
            proof.held(EDGES, partition.end - partition.start + 1)
        else:
            what = "has other hashes at its edges than its manifest records"
            proof.wrong.append(ChainFinding(partition.start, partition.end, what))


def _windows(committed: Sequence[BlockRange], chosen: Sequence[int] | None) -> Iterator[BlockRange]:
    if chosen is not None:
        yield from (BlockRange(block, block) for block in chosen)
        return
    for part in committed:
        for start in range(part.start, part.end + 1, _WINDOW):
            yield BlockRange(start, min(start + _WINDOW - 1, part.end))


def _choose(committed: Sequence[BlockRange], count: int) -> list[int]:
    """Different blocks, each as likely as any other. Which ones must not be foreseeable: a liar would know them."""
    sizes = [part.end - part.start + 1 for part in committed]
    places = random.SystemRandom().sample(range(sum(sizes)), min(count, sum(sizes)))
    found = []
    for place in sorted(places):
        for part, size in zip(committed, sizes, strict=True):
            if place < size:
                found.append(part.start + place)
                break
            place -= size
    return found


def _cut(partition: PartitionSummary, span: BlockRange) -> BlockRange | None:
    start, end = max(partition.start, span.start), min(partition.end, span.end)
    return BlockRange(start, end) if start <= end else None


def _held(partition: PartitionSummary, file: PartitionFile) -> BlockRange:
    """The blocks that a file may hold: those it declares, or else all of its partition."""
    if file.min_block is None or file.max_block is None:
        return BlockRange(partition.start, partition.end)
    return BlockRange(file.min_block, file.max_block)


def _path(file: PartitionFile) -> str:
    return str(local_path(ObjectLocation.parse(file.location)))


def _name(file: PartitionFile) -> str:
    return file.location.rpartition("/")[2]


def _refuse_if_forbidden(file: PartitionFile, error: Exception) -> None:
    """A file that this user may not read isn't wrong."""
    if isinstance(error, PermissionError):
        raise Unavailable(
            "FileUnreadable", f"can't read {file.location}: run this as a user who may read the object store"
        ) from None


def _text(error: Exception) -> str:
    if isinstance(error, FileNotFoundError) and error.errno is None:
        # Arrow's own: its text is the path and nothing else.
        return f"{Path(str(error)).name} is missing"
    return str(error).splitlines()[0][:_LONGEST] if str(error) else type(error).__name__
