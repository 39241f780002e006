"""What a worker says of its files holds for its own dataset and nowhere else; names mean one thing to a task.

A manifest may claim any schema hash, so nothing that several datasets share is kept under one. A dataset may be
called almost anything, so no name that somebody else chose stands for an input that it isn't.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import UUID, uuid4

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytest_asyncio

from tests.support.conversation import dag, reactive, source
from tests.support.databases import ORG, build_state_template
from tests.support.postgres import SharedPostgres
from tests.support.query_port import QueryPort, open_query_port, open_steps, parquet_output
from tracelake.contracts.token_claims import TokenDataset
from tracelake.domain.errors import Invalid, InvalidDag, Unavailable
from tracelake.objects.directory import DirectoryStore
from tracelake.query.caller import TaskCaller
from tracelake.query.catalog import ColdFile, names_of_task
from tracelake.query.open_relation import ColdFiles

CLAIMED = "sha256:" + "ab" * 32
DAG = dag(
    source(),
    reactive("mine", "src", storage="parquet"),
    reactive("theirs", "src", storage="parquet"),
    publish={"mine": {"from": {"job": "mine"}}, "theirs": {"from": {"job": "theirs"}}},
)


@pytest.fixture(scope="module")
def dsn(postgres_cluster: SharedPostgres) -> Iterator[str]:
    dsn = postgres_cluster.clone("state", build_state_template)
    yield dsn
    postgres_cluster.drop(dsn)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def port(dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[QueryPort]:
    folder = tmp_path_factory.mktemp("query")
    async with open_steps(dsn, folder) as ctx, open_query_port(ctx, dsn) as port:
        await port.talk.deploy(DAG)
        yield port


@pytest.mark.asyncio(loop_scope="module")
async def test_a_claimed_schema_hash_gives_nobody_the_columns_of_another_dataset(port: QueryPort) -> None:
    blocks = pa.array(range(10), pa.int64())
    tables = {
        "mine": pa.table({"block_number": blocks, "secret": pa.array(["x"] * 10)}),
        "theirs": pa.table({"block_number": blocks, "amount": pa.array(range(10), pa.int64())}),
    }
    await port.talk.trigger(0, 9)
    for job, table in tables.items():
        lease = await port.talk.lease(job)
        output = parquet_output(lease, table, 0, 9)
        assert output.manifest is not None
        forged = msgspec.structs.replace(output.manifest, schema_hash=CLAIMED)
        await port.talk.complete(lease, msgspec.structs.replace(output, manifest=forged))
    for job, table in tables.items():
        body = (await port.ask(" ".join(("SELECT * FROM", job, "WHERE block_number < 3")))).json()
        assert body["columns"] == table.column_names, job
        assert len(body["rows"]) == 3


def test_columns_are_those_of_the_file_that_is_there(tmp_path: Path) -> None:
    """Also after somebody has put another one in its place, of the same size."""
    files = ColdFiles(DirectoryStore(tmp_path))
    place = tmp_path / "a.parquet"
    known = ColdFile(f"file://{place}", 1)
    for name in ("one", "two"):
        pq.write_table(pa.table({name: [1]}), place.with_suffix(".new"))
        os.replace(place.with_suffix(".new"), place)
        assert files.columns(known).names == [name]


def test_a_file_that_would_fill_the_services_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A footer of a few megabytes becomes gigabytes of columns in the process that serves everybody."""
    files, wide, lying = (
        ColdFiles(DirectoryStore(tmp_path)),
        tmp_path / "wide.parquet",
        tmp_path / "lying.parquet",
    )
    pq.write_table(pa.table({f"c{number}": pa.array([], pa.int64()) for number in range(5001)}), wide)
    lying.write_bytes(b"PAR1" + b"x" * 100 + (2**31).to_bytes(4, "little") + b"PAR1")
    for place, why in ((wide, "5,001 columns"), (lying, "2,147,483,648 bytes")):
        with pytest.raises(Invalid, match=why):
            files.columns(ColdFile(f"file://{place}", place.stat().st_size))
    (tmp_path / "short").write_bytes(b"PAR1")
    with pytest.raises(Unavailable, match="can't be read"):
        files.columns(ColdFile(f"file://{tmp_path / 'short'}", 4))


def _task(*names: str | None) -> tuple[TaskCaller, list[UUID]]:
    versions = [uuid4() for _ in names]
    datasets = tuple(
        TokenDataset(dataset_uuid=uuid4(), dataset_version=version, name=name)
        for version, name in zip(versions, names, strict=True)
    )
    return TaskCaller(uuid4(), 1, ORG, datasets), versions


def test_a_dataset_that_is_called_like_an_input_stands_for_no_other_input() -> None:
    caller, [own, other] = _task(None, "input_0")
    names = names_of_task(caller)
    assert "input_0" not in names, "it would mean two things"
    assert names == {"input_1": other}
    caller, [own, other] = _task("blocks", "logs")
    assert names_of_task(caller) == {"input_0": own, "blocks": own, "input_1": other, "logs": other}
    caller, [own] = _task("input_0")
    assert names_of_task(caller) == {"input_0": own}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ["input_0", "input_17", "scope_blocks"])
async def test_names_that_tasks_have_already_cannot_be_published(port: QueryPort, name: str) -> None:
    text = dag(
        source(),
        reactive("work", "src", storage="parquet"),
        name="another",
        publish={name: {"from": {"job": "work"}}},
    )
    with pytest.raises(InvalidDag, match="choose another"):
        await port.talk.deploy(text)
