"""A slot answers as the plain engine does, whichever way a relation's rows are handed to it, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytest_asyncio

from tests.support.wide_integers import stored_integer
from tracelake.domain.errors import Forbidden, Invalid, Unavailable
from tracelake.evm.columns import UINT256_ARROW, UINT256_PARTS
from tracelake.query.engine.attach import AttachedRelation
from tracelake.query.engine.restrict import MIB, MOST_DESCRIPTORS, SlotLimits
from tracelake.query.engine.slot import ResultStream
from tracelake.query.engine.slots import Slots

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("sandbox")]

SCHEMA = pa.schema(
    [
        ("block_number", pa.int64()),
        ("address", pa.string()),
        ("amount", pa.decimal128(38, 0)),
        ("mined_at", pa.timestamp("us", tz="UTC")),
        ("data", pa.binary()),
    ]
)


def rows(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    columns = {
        "block_number": list(numbers),
        "address": [f"0x{n % 7:040x}" for n in numbers],
        "amount": [n * 10**20 for n in numbers],
        "mined_at": [n * 1_000_000 for n in numbers],
        "data": [bytes([n % 256]) for n in numbers],
    }
    return pa.table(columns, SCHEMA)


def file_of(folder: Path, table: pa.Table, mode: int = 0o644) -> int:
    path = folder / f"{len(list(folder.iterdir()))}.parquet"
    pq.write_table(table, path)
    path.chmod(mode)
    return os.open(path, os.O_RDONLY)


def memory_of(table: pa.Table, form: str = "stream") -> int:
    descriptor = os.memfd_create("rows")
    with open(descriptor, "wb", closefd=False) as file:
        make = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
        with make(file, table.schema) as writer:
            writer.write_table(table)
    return descriptor


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slots() -> AsyncIterator[Slots]:
    limits = SlotLimits(seconds=30, memory_bytes=512 * MIB, spill_bytes=256 * MIB)
    opened = await Slots.open(2, limits, queue=4)
    yield opened
    await opened.close()


async def ask(
    slots: Slots,
    sql: str,
    relations: Sequence[AttachedRelation] = (),
    params: Sequence[Any] | Mapping[str, Any] = (),
    **more: int,
) -> tuple[pa.Table, ResultStream]:
    try:
        async with slots.take(30) as slot:
            await slot.parse(sql, params)
            result = await slot.run(relations, **more)
            return await result.table(), result
    finally:
        for relation in relations:
            relation.close()


QUERIES = [
    "SELECT * FROM logs ORDER BY block_number",
    "SELECT address, count(*) AS n, sum(amount) AS total, max(mined_at) AS last FROM logs GROUP BY ALL ORDER BY 1",
    "SELECT block_number FROM logs WHERE block_number BETWEEN 15 AND 32 AND address <> '0x' ORDER BY 1 DESC",
    "SELECT count(*) AS n FROM logs -- nothing more",
]


@pytest.mark.parametrize("sql", QUERIES)
@pytest.mark.parametrize(
    "handed_in", ["files", "a private file", "arrow stream", "arrow file", "both", "nothing"]
)
async def test_the_answer_is_the_plain_engines(
    slots: Slots, tmp_path: Path, sql: str, handed_in: str
) -> None:
    parts = [rows(0, 20), rows(20, 20)]
    logs = pa.concat_tables(parts) if handed_in != "nothing" else SCHEMA.empty_table()
    files, tables = {
        "files": lambda: ([file_of(tmp_path, part) for part in parts], []),
        "a private file": lambda: ([file_of(tmp_path, parts[0], 0o600), file_of(tmp_path, parts[1])], []),
        "arrow stream": lambda: ([], [memory_of(logs)]),
        "arrow file": lambda: ([], [memory_of(part, "file") for part in parts]),
        "both": lambda: ([file_of(tmp_path, parts[0])], [memory_of(parts[1])]),
        "nothing": lambda: ([], []),
    }[handed_in]()

    table, result = await ask(slots, sql, [AttachedRelation("logs", SCHEMA, files=files, tables=tables)])

    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        plain = connection.register("logs", logs).sql(sql)
        expected = plain.to_arrow_table()
        assert result.types == [str(kind) for kind in plain.types]
    assert table.schema == expected.schema
    assert table.to_pylist() == expected.to_pylist()
    assert result.row_count == expected.num_rows
    assert not result.truncated
    assert logs.num_rows == 0 or result.bytes_scanned > 0


async def test_columns_are_matched_by_name_and_cast_and_what_is_missing_is_null(
    slots: Slots, tmp_path: Path
) -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.float64())])
    file = file_of(tmp_path, pa.table({"B": ["x"], "a": pa.array([1], pa.int32())}))
    memory = memory_of(pa.table({"c": [0.5], "a": pa.array([2], pa.int16())}))

    relation = AttachedRelation("odd_name", schema, files=[file], tables=[memory])
    table, result = await ask(slots, "SELECT * FROM odd_name ORDER BY a", [relation])

    assert table.to_pylist() == [{"a": 1, "b": "x", "c": None}, {"a": 2, "b": None, "c": 0.5}]
    assert result.types == ["BIGINT", "VARCHAR", "DOUBLE"]


@pytest.mark.parametrize(
    ("sql", "params", "answer"),
    [
        ("SELECT ? + 1 AS a, ? AS b, ? AS c, ? AS d", [1, "x'", None, True], [2, "x'", None, True]),
        ("SELECT $low AS a, $high AS b", {"low": 1, "high": 2.5}, [1, 2.5]),
        ("SELECT ?::VARCHAR AS a", [2**70], [str(2**70)]),
        ("SELECT 1 AS a;", [], [1]),
    ],
)
async def test_parameters_stand_for_values(slots: Slots, sql: str, params: Any, answer: list[Any]) -> None:
    table, _ = await ask(slots, sql, params=params)

    assert list(table.to_pylist()[0].values()) == answer


async def test_the_answer_is_cut_at_the_rows_and_bytes_that_were_asked_for(slots: Slots) -> None:
    def numbers() -> list[AttachedRelation]:
        return [AttachedRelation("n", pa.schema([("a", pa.int64())]), tables=[memory])]

    memory = memory_of(pa.table({"a": range(100_000)}))
    keep = os.dup(memory)

    table, result = await ask(slots, "SELECT a FROM n ORDER BY a", numbers(), max_rows=10)
    assert (table["a"].to_pylist(), result.row_count, result.truncated) == (list(range(10)), 10, True)

    memory = os.dup(keep)
    table, result = await ask(slots, "SELECT a FROM n", numbers(), max_rows=100_000)
    assert (table.num_rows, result.truncated) == (100_000, False)

    memory = keep
    table, result = await ask(slots, "SELECT a FROM n", numbers(), max_rows=100_000, max_bytes=100_000)
    assert 0 < table.num_rows < 13_000
    assert result.truncated

    with pytest.raises(Invalid) as refused:
        await ask(slots, "SELECT repeat('x', 200000) AS a", max_bytes=100_000)
    assert refused.value.reason == "ResultTooLarge"


async def test_the_engines_complaint_is_told_without_the_names_of_files(slots: Slots, tmp_path: Path) -> None:
    torn = tmp_path / "private-name.parquet"
    torn.write_bytes(b"PAR1 this is not Parquet PAR1")
    relation = AttachedRelation("logs", SCHEMA, files=[os.open(torn, os.O_RDONLY)])

    with pytest.raises(Invalid) as refused:
        await ask(slots, "SELECT count(*) FROM logs", [relation])

    assert refused.value.reason == "QueryFailed"
    assert "private-name" not in refused.value.message
    assert "/proc" not in refused.value.message

    with pytest.raises(Invalid) as refused:
        await ask(slots, "SELECT nothing FROM logs", [AttachedRelation("logs", SCHEMA)])
    assert (refused.value.reason, "nothing" in refused.value.message) == ("QueryFailed", True)


async def test_a_refused_query_and_one_that_is_not_run_cost_no_process(slots: Slots) -> None:
    alive = set(slots._alive)
    for _ in range(3):
        with pytest.raises(Forbidden):
            await ask(slots, "SELECT * FROM read_csv('/etc/passwd')")
        with pytest.raises(Invalid):
            await ask(slots, "SELECT FROM WHERE")
        async with slots.take(30) as slot:
            parsed = await slot.parse("SELECT a FROM logs")
            assert set(parsed.relations) == {"logs"}
        async with slots.take(30):
            pass

    await ask(slots, "SELECT 1 AS a")
    assert set(slots._alive) == alive or len(alive) < slots.count + 1


async def test_a_sum_of_a_wide_integer_is_made_of_its_digits(slots: Slots, tmp_path: Path) -> None:
    """Which shows in files whose digits are another number's. Those of a file that lacks a number's aren't used,
    and neither are those of a small one."""
    stored = [stored_integer("value", 5) | {"value_e0": e0} for e0 in (100, 200, None)]
    kinds = {f"value{part}": kind for part, kind in zip(UINT256_PARTS, UINT256_ARROW, strict=True)}
    schema = pa.schema(kinds)
    large = os.urandom(4 << 20)
    for some, padding, expected in (
        (stored[:2], large, "300"),
        (stored, large, "15"),
        (stored[:2], b"", "10"),
    ):
        rows = pa.Table.from_pylist(some, schema).append_column("padding", pa.array([padding] * len(some)))
        file = file_of(tmp_path, rows)
        table, result = await ask(
            slots, "SELECT sum(value) FROM t", [AttachedRelation("t", schema, files=[file])]
        )
        assert result.types == ["BIGNUM"]
        assert table.column(0).to_pylist() == [expected]


async def test_a_thousand_files_are_one_relation(slots: Slots, tmp_path: Path) -> None:
    schema = pa.schema([("n", pa.int64())])
    files = [file_of(tmp_path, pa.table({"n": [n]}, schema)) for n in range(3)]
    files += [os.open(tmp_path / f"{n % 3}.parquet", os.O_RDONLY) for n in range(997)]

    table, _ = await ask(
        slots, "SELECT count(*) AS c FROM many", [AttachedRelation("many", schema, files=files)]
    )

    assert table.to_pylist() == [{"c": 1000}]


async def test_more_files_than_can_be_handed_over_are_refused_with_a_reason(slots: Slots) -> None:
    relation = AttachedRelation("many", SCHEMA)
    relation.files = [0] * (MOST_DESCRIPTORS + 1)
    async with slots.take(30) as slot:
        await slot.parse("SELECT count(*) FROM many")
        with pytest.raises(Invalid) as refused:
            await slot.run([relation])
    relation.files = []

    assert refused.value.reason == "TooManyFiles"


async def test_random_numbers_differ_from_query_to_query(slots: Slots) -> None:
    answers = [(await ask(slots, "SELECT random() AS a, uuid() AS b"))[0].to_pylist()[0] for _ in range(4)]

    assert len({answer["a"] for answer in answers}) == len({answer["b"] for answer in answers}) == 4


async def test_no_descriptor_is_left_after_many_queries(slots: Slots, tmp_path: Path) -> None:
    descriptor = file_of(tmp_path, rows(0, 10))
    await ask(slots, "SELECT 1 AS a")
    before = len(os.listdir("/proc/self/fd"))

    async def some(count: int) -> None:
        for _ in range(count):
            relation = AttachedRelation("logs", SCHEMA, files=[os.dup(descriptor)])
            table, _ = await ask(slots, "SELECT count(*) AS n FROM logs", [relation])
            assert table.to_pylist() == [{"n": 10}]

    await asyncio.gather(some(100), some(100))

    assert len(os.listdir("/proc/self/fd")) <= before
    os.close(descriptor)


async def test_callers_are_served_in_their_order_and_turned_away_when_there_are_too_many(
    slots: Slots,
) -> None:
    order: list[int] = []

    async def wait_for_one(number: int) -> None:
        async with slots.take(30):
            order.append(number)

    async with slots.take(30), slots.take(30):
        with pytest.raises(Unavailable) as busy:
            async with slots.take(0.01):
                pass
        assert busy.value.reason == "QueryServiceBusy"
        waiting = [asyncio.ensure_future(wait_for_one(number)) for number in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="waiting already"):
            async with slots.take(30):
                pass
        waiting[1].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)

    assert order == [0, 2, 3]
    assert slots.confined


async def test_one_caller_leaves_a_slot_to_others_however_much_it_asks(slots: Slots) -> None:
    served: list[str] = []

    async def ask_as(key: str) -> None:
        async with slots.take(30, key=key):
            served.append(key)

    async with slots.take(30, key="greedy"):
        more = asyncio.ensure_future(ask_as("greedy"))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="of your queries"):
            async with slots.take(30, key="greedy"):
                pass
        await ask_as("other")
        assert served == ["other"]
    await more
    assert served == ["other", "greedy"]
