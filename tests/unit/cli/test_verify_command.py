"""``tracelake verify``: what it proves of files, what it finds wrong, and its exit codes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from uuid import UUID, uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from tests.support.hot_scene import rows_of
from tracelake.cli.main import app
from tracelake.contracts.manifest import ChainEdges
from tracelake.contracts.user_api import (
    DatasetDetail,
    DatasetPage,
    PartitionFile,
    PartitionPage,
    PartitionSummary,
)
from tracelake.domain.errors import TracelakeError
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import running
from tracelake.evm.raw_block import ChainTable

LAST = 39
USUAL = (ChainTable.BLOCKS, ChainTable.TRANSACTIONS, ChainTable.LOGS)


@dataclass
class FakeClient:
    """The user API, as far as the command uses it, over files of a folder."""

    details: dict[str, DatasetDetail]
    partitions_of: dict[str, list[PartitionSummary]]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def dataset(self, name: str) -> DatasetDetail:
        return next(each for each in self.details.values() if name in (each.dataset, str(each.dataset_uuid)))

    def datasets(self, **_: object) -> DatasetPage:
        return DatasetPage(list(self.details.values()), None)

    def partitions(
        self, name: str, *, start: int, end: int, details: bool, limit: int, after: str | None
    ) -> PartitionPage:
        assert details
        detail = self.dataset(name)
        found = [
            each
            for each in self.partitions_of[detail.output_name]
            if each.end >= start and each.start <= end and (after is None or each.start > int(after))
        ]
        page = found[:1]
        more = str(page[-1].start) if len(found) > 1 else None
        return PartitionPage(detail.dataset_uuid, detail.dataset_version, page, more)


class Scene:
    """Files of a dev chain, in partitions of 20 blocks; ``change`` alters rows before they are written."""

    def __init__(self, folder: Path) -> None:
        self.chain = DevChain(seed=7, blocks=LAST)
        self.folder = folder
        self.client = FakeClient({}, {})
        for index, table in enumerate(USUAL):
            self.client.details[table] = detail(table, index)
            self.client.partitions_of[table] = [self.write(table, 0, 19), self.write(table, 20, LAST)]

    def write(
        self, table: ChainTable, start: int, end: int, change: Callable[[pa.Table], pa.Table] | None = None
    ) -> PartitionSummary:
        rows = rows_of(self.chain, table, start, end)
        path = self.folder / f"{table}_{start}_{end}.parquet"
        pq.write_table(change(rows) if change else rows, path)
        content = path.read_bytes()
        file = PartitionFile(
            f"file://{path}", len(content), len(rows), "sha256:" + hashlib.sha256(content).hexdigest()
        )
        blocks = rows_of(self.chain, ChainTable.BLOCKS, start, end)
        edges = ChainEdges(
            parent_hash="0x" + blocks["parent_hash"][0].as_py().hex(),
            first_hash="0x" + blocks["block_hash"][0].as_py().hex(),
            last_hash="0x" + blocks["block_hash"][-1].as_py().hex(),
        )
        return PartitionSummary(
            f"{start}-{end}", start, end, True, 0, len(rows), None, datetime.now(UTC),
            task_id=None, attempt=None, files=[file.location], verified="full", edges=edges, details=[file],
        )  # fmt: skip

    def rewrite(self, table: ChainTable, start: int, end: int, change: Any) -> None:
        """The second half of a table, other than the chain has it, with a manifest that agrees with its files."""
        self.client.partitions_of[table][1] = self.write(table, start, end, change)


def detail(table: ChainTable, index: int, storage: str = "parquet") -> DatasetDetail:
    return DatasetDetail(
        f"past_{table}", uuid4(), UUID(int=index), 0, storage, "task", "chain", "ingest", index, str(table),
        None, None, datetime.now(UTC), 2,
    )  # fmt: skip


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    monkeypatch.setattr("tracelake.cli.verify.connect", lambda *_: scene.client)
    return scene


def run(*arguments: str) -> Result:
    ended = CliRunner().invoke(app, ["verify", *arguments], env={"COLUMNS": "200"})
    if isinstance(ended.exception, TracelakeError):
        raise ended.exception
    return ended


def proofs(ended: Result) -> dict[str, int]:
    return {each["what"]: each["count"] for each in json.loads(ended.stdout)["proofs"]}


@pytest.mark.parametrize("table", USUAL)
def test_files_that_are_right_are_proven_in_every_way_that_the_tables_allow(
    scene: Scene, table: ChainTable
) -> None:
    ended = run(f"past_{table}", "--json")
    assert ended.exit_code == 0, ended.stdout
    answer = json.loads(ended.stdout)
    assert answer["holds"] is True
    assert answer["levels"] == [{"start": 0, "end": LAST, "verified": "full"}]
    assert proofs(ended) == {
        "files": 2,
        **dict.fromkeys(
            ["links", "block hash", "transactions root", "logs bloom", "receipts root", "rows", "edges"],
            LAST + 1,
        ),
    }


def test_the_text_says_what_was_proven_and_how(scene: Scene) -> None:
    ended = run("past_transactions")
    assert ended.exit_code == 0
    for text in (
        "past_blocks, past_logs",
        "receipts root",
        "0-39 full",
        "blob_gas_price",
        "everything holds",
    ):
        assert text in ended.stdout


def test_a_range_and_a_sample_narrow_what_is_read(scene: Scene) -> None:
    part = run("past_blocks", "--from", "5", "--to", "8", "--json")
    assert proofs(part)["block hash"] == 4
    some = run("past_blocks", "--sample", "3", "--json")
    assert proofs(some)["block hash"] == 3
    everything = run("past_blocks", "--sample", "1000", "--json")
    assert everything.exit_code == 0
    assert proofs(everything)["links"] == LAST, "the first block has no parent here to compare with"


def test_a_sampled_block_is_compared_with_its_parent(scene: Scene) -> None:
    scene.chain.reorg(25)
    for table in USUAL:
        scene.rewrite(table, 20, LAST, None)
    ended = run("past_blocks", "--from", "20", "--to", "20", "--sample", "1")
    assert ended.exit_code == 0, "the block before it is out of the range"
    ended = run("past_blocks", "--sample", "40")
    assert ended.exit_code == 1
    assert "block 20: is not the child" in ended.stderr


def test_blocks_of_the_range_that_are_not_committed_are_named(scene: Scene) -> None:
    for table in USUAL:
        scene.client.partitions_of[table] = [scene.write(table, 5, 14), scene.write(table, 20, 29)]
    ended = run("past_blocks", "--json")
    answer = json.loads(ended.stdout)
    assert (ended.exit_code, answer["start"], answer["end"], answer["blocks"]) == (0, 5, 29, 20)
    assert answer["missing"] == [{"start": 15, "end": 19}], "none before the first and after the last"
    assert [(each["start"], each["end"]) for each in answer["levels"]] == [(5, 14), (20, 29)]

    wider = run("past_blocks", "--from", "0", "--to", "35")
    assert wider.exit_code == 0
    assert "0-4, 15-19, 30-35" in wider.stdout
    assert "everything that is committed holds" in wider.stdout

    within = json.loads(run("past_blocks", "--from", "7", "--to", "9", "--json").stdout)
    assert (within["start"], within["end"], within["missing"]) == (7, 9, [])
    assert within["levels"] == [{"start": 7, "end": 9, "verified": "full"}]


def test_a_sampled_block_whose_parents_file_is_gone_is_a_finding(scene: Scene) -> None:
    halves = [scene.write(ChainTable.BLOCKS, 20, 29), scene.write(ChainTable.BLOCKS, 30, LAST)]
    files = [
        replace(file, min_block=half.start, max_block=half.end)
        for half in halves
        for file in half.details or ()
    ]
    scene.client.partitions_of[ChainTable.BLOCKS][1] = replace(halves[1], start=20, details=files)
    (scene.folder / "blocks_20_29.parquet").unlink()
    ended = run("past_logs", "--from", "30", "--to", "30")
    assert ended.exit_code == 1
    assert "block 30: has a parent that can't be read: blocks_20_29.parquet is missing" in ended.stderr


def test_a_file_that_was_changed_is_not_the_manifests(scene: Scene) -> None:
    path = scene.folder / "logs_20_39.parquet"
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    ended = run("past_logs", "--json")
    assert ended.exit_code == 1
    assert any("other content" in each["what"] for each in json.loads(ended.stdout)["wrong"])


def test_a_file_that_is_gone_or_cut_off_is_named(scene: Scene) -> None:
    (scene.folder / "logs_0_19.parquet").unlink()
    cut = scene.folder / "logs_20_39.parquet"
    cut.write_bytes(cut.read_bytes()[:100])
    ended = run("past_logs")
    assert ended.exit_code == 1
    assert "blocks 0 to 19: logs_0_19.parquet is missing" in ended.stderr
    assert str(scene.folder) not in ended.stderr
    assert "logs_20_39.parquet has 100 bytes" in ended.stderr


def test_rows_that_a_writer_altered_are_found_though_the_manifest_agrees(scene: Scene) -> None:
    def alter(rows: pa.Table) -> pa.Table:
        values = [value + 1 for value in rows["gas_used"].to_pylist()]
        return rows.set_column(rows.schema.get_field_index("gas_used"), "gas_used", pa.array(values))

    scene.rewrite(ChainTable.BLOCKS, 20, LAST, alter)
    ended = run("past_blocks", "--json")
    assert ended.exit_code == 1
    found = json.loads(ended.stdout)["wrong"]
    assert {each["start"] for each in found} == set(range(20, LAST + 1))
    assert "the header's hash is" in found[0]["what"]


def test_two_halves_of_different_forks_are_found(scene: Scene) -> None:
    scene.chain.reorg(25)
    for table in USUAL:
        scene.rewrite(table, 20, LAST, None)
    ended = run("past_logs")
    assert ended.exit_code == 1
    assert "block 20: is not the child of the block before it" in ended.stderr


def test_endpoints_are_asked_if_wanted(scene: Scene, tmp_path: Path) -> None:
    pools = tmp_path / "rpc.toml"
    with running(scene.chain) as node:
        pools.write_text(f'[[pools.main.endpoints]]\nurl = "{node.url}"\n')
        pools.chmod(0o600)
        arguments = ("past_blocks", "--against", "main", "--rpc-pools", str(pools), "--json")
        agreed = run(*arguments)
        assert (agreed.exit_code, proofs(agreed)["chain"]) == (0, LAST + 1)
        scene.chain.reorg(5)
        other = run(*arguments)
    assert other.exit_code == 1
    assert {each["start"] for each in json.loads(other.stdout)["wrong"]} == set(range(35, LAST + 1))


def test_bad_input_is_refused_with_a_reason(scene: Scene) -> None:
    assert run("past_blocks", "--from", "9", "--to", "8").exit_code == 2
    assert run("past_blocks", "--sample", "0").exit_code == 2
    with pytest.raises(TracelakeError, match="no committed blocks"):
        run("past_blocks", "--from", "1000")
    scene.client.details["hot"] = detail(ChainTable.TRACES, 9, "postgres")
    with pytest.raises(TracelakeError, match="not in files"):
        run("past_traces")
    with pytest.raises(TracelakeError, match="there is no"):
        run("past_blocks", "--against", "main", "--rpc-pools", str(scene.folder / "none.toml"))
