"""``decode_events`` in a real operator process, on a real Spark and without: the test plays the wrapper and its
Dispatcher."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from psycopg import sql
from psycopg.rows import dict_row

from tests.support.abi_encoding import log_of
from tests.support.hot_scene import HotScene
from tests.support.operator_process import OperatorUnderTest, a_task, an_input, an_output, operator_process
from tests.support.wide_integers import stored_integer
from tracelake.contracts.dispatcher_api import InputFile, PayloadInput
from tracelake.contracts.operator_protocol import Call, Finished, ListFiles, Progress, Reply, SparkTarget
from tracelake.domain.event_abi import parse_signature
from tracelake.domain.operators.decode_events import read_config
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.schemas import TABLES
from tracelake.objects.base import ObjectLocation
from tracelake.operators.decode_events.operator import decode_events
from tracelake.worker.spark import session as spark_session

TOKEN, NFT, VAULT = (bytes([byte]) * 20 for byte in (0x11, 0x22, 0x33))
ERC20, ERC721 = read_config({"events": ["erc20_transfers", "erc721_transfers"]}).events
DEPOSIT_TEXT = "event Deposit(address indexed user, uint256[] amounts, string memo)"
DEPOSIT = parse_signature(DEPOSIT_TEXT)


def a_log(block: int, index: int, address: bytes, topics: list[bytes], data: bytes) -> dict[str, Any]:
    return {
        "chain_id": 7,
        "block_number": block,
        "block_hash": block.to_bytes(32, "big"),
        "timestamp": block * 12_000_000,
        "transaction_index": 0,
        "log_index": index,
        "transaction_hash": index.to_bytes(32, "big"),
        "address": address,
        **{f"topic{place}": topic for place, topic in enumerate(topics)},
        "data": data,
    }


def chain_logs() -> pa.Table:
    """In each of 40 blocks: a transfer of tokens, one of an NFT, a deposit, a broken transfer and a stranger."""
    rows = []
    for block in range(40):
        who, whom = bytes([block + 1]) * 20, bytes([block + 2]) * 20
        for index, (address, (topics, data)) in enumerate(
            (
                (TOKEN, log_of(ERC20, [who, whom, 2**256 - 1 - block])),
                (NFT, log_of(ERC721, [who, whom, block])),
                (VAULT, log_of(DEPOSIT, [who, [block, 2**255], f"memo {block}"])),
                (TOKEN, (log_of(ERC20, [who, whom, 1])[0], b"short")),
                (VAULT, ([bytes([255]) * 32], b"")),
            )
        ):
            rows.append(a_log(block, index, address, topics, data))
    return pa.Table.from_pylist(rows, schema=TABLES[ChainTable.LOGS].arrow)


class Site:
    def __init__(self, folder: Path, process: OperatorUnderTest, spark: SparkTarget | None) -> None:
        self.process = process
        self._spark = spark
        self._staging = folder / "staging"
        self.progress: dict[str, Any] = {}
        source = folder / "source"
        source.mkdir()
        logs = chain_logs()
        self.files = []
        for start in (0, 20):
            path = source / f"logs_{start}_{start + 19}.parquet"
            part = logs.slice(start * 5, 100)
            pq.write_table(part, path)
            self.files.append(InputFile(f"file://{path}", part.num_rows, 100, start, start + 19))

    def run(self, *, scope: dict[str, Any] | None = None, **config: Any) -> Finished:
        source = PayloadInput(0, uuid4(), uuid4(), 0, "logs", "parquet", **(scope or {"start": 0, "end": 29}))
        output = an_output(name="events", storage="parquet", staging=f"file://{self._staging}/{uuid4()}/")
        task = a_task(
            "decode_events",
            config=config,
            inputs=[source],
            outputs=[output],
            runtime="ecs_spark" if self._spark else "ecs_python",
        )
        self.process.run(task, {}, spark=self._spark)
        while not isinstance(message := self.process.receive(), Finished):
            if isinstance(message, Call):
                assert message.action == ListFiles(0)
                self.process.send(Reply(call_id=message.call_id, value=msgspec.to_builtins(self.files)))
            elif isinstance(message, Progress):
                self.progress = message.fields
        if message.tidying:
            self.process.ready()
        return message

    def rows(self, finished: Finished) -> pa.Table:
        assert finished.status == "Completed", self.process.log()
        [output] = finished.outputs
        assert output.manifest is not None
        paths = ["/" + ObjectLocation.parse(file.location).path for file in output.manifest.files]
        return pa.concat_tables([pq.read_table(path) for path in paths])


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorUnderTest]:
    with operator_process(tmp_path_factory.mktemp("work")) as process:
        process.ready()
        yield process


@pytest.fixture
def on_spark(tmp_path: Path, process: OperatorUnderTest, spark_target: SparkTarget) -> Site:
    return Site(tmp_path, process, spark_target)


@pytest.fixture
def without_spark(tmp_path: Path, process: OperatorUnderTest) -> Site:
    return Site(tmp_path, process, None)


def test_transfers_of_the_scope_become_typed_rows_and_what_does_not_decode_is_counted(on_spark: Site) -> None:
    finished = on_spark.run(events="erc20_transfers")
    table = on_spark.rows(finished)
    assert table.column_names == [
        *("chain_id", "block_number", "block_hash", "timestamp", "transaction_index", "log_index"),
        *("transaction_hash", "address", "event"),
        *("from_address", "to_address", *stored_integer("value", None)),
    ]
    assert table.schema.field("timestamp").type == pa.timestamp("us", tz="UTC")
    assert table["block_number"].to_pylist() == list(range(30))
    expected = [stored_integer("value", 2**256 - 1 - block) for block in range(30)]
    assert table.select(list(expected[0])).to_pylist() == expected
    assert set(table["address"].to_pylist()) == {TOKEN}
    counted = {"decoded": 30, "skipped": 60, "skipped_other_layout": 30, "skipped_wrong_length": 30}
    assert {name: on_spark.progress.get(name) for name in counted} == counted
    assert "skipped_wrong_length=30" in on_spark.process.log()
    [output] = finished.outputs
    assert (output.start, output.end, output.row_count) == (0, 29, 30)


def test_spark_and_the_process_alone_write_the_same_files(on_spark: Site, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    alone = Site(tmp_path / "alone", on_spark.process, None)
    config = {"events": ["erc20_transfers", "erc721_transfers", DEPOSIT_TEXT], "blocks_per_file": 10}
    cursor = {"after": 4, "upto": 37}
    written = [site.run(scope=cursor, **config).outputs[0].manifest for site in (on_spark, alone)]
    assert written[0] is not None
    assert written[1] is not None
    assert len(written[0].files) == 4
    assert written[0].schema_hash == written[1].schema_hash
    assert [f.content_hash for f in written[0].files] == [f.content_hash for f in written[1].files]
    assert written[0].row_count == 33 * 3


def test_thousands_of_events_and_any_names_are_one_job(on_spark: Site) -> None:
    named = (
        "event Transfer(address indexed __tracelake_skipped, address indexed ctid, uint256 __tracelake_cell)"
    )
    others = [f"event E{number}(address indexed who, uint256 amount)" for number in range(4_999)]
    table = on_spark.rows(on_spark.run(events=[{"abi": [*others, named]}]))
    assert set(table["event"].to_pylist()) == {"Transfer"}
    assert table["__tracelake_skipped_param"].to_pylist() == [bytes([block + 1]) * 20 for block in range(30)]
    assert table["ctid_param"].to_pylist() == [bytes([block + 2]) * 20 for block in range(30)]
    texts = [str(2**256 - 1 - block) for block in range(30)]
    assert table["__tracelake_cell_param_string"].to_pylist() == texts
    assert table["amount_binary"].null_count == 30
    assert on_spark.progress["skipped_wrong_length"] == 30


def test_only_the_wanted_contracts_are_decoded(without_spark: Site) -> None:
    finished = without_spark.run(events=["erc20_transfers", "erc721_transfers"], addresses=["0x" + NFT.hex()])
    assert without_spark.rows(finished)["token_id_string"].to_pylist() == [str(n) for n in range(30)]
    assert without_spark.progress["skipped"] == 0


def test_dynamic_parameters_are_text_and_json(without_spark: Site) -> None:
    table = without_spark.rows(without_spark.run(scope={"start": 3, "end": 3}, events=DEPOSIT_TEXT))
    [row] = table.to_pylist()
    assert (row["amounts"], row["memo"]) == (f'["3","{2**255}"]', "memo 3")


def test_no_events_in_the_scope_is_a_table_without_rows(on_spark: Site) -> None:
    table = on_spark.rows(on_spark.run(events="event Nobody(uint256 ever, bool[] wrote)"))
    assert table.num_rows == 0
    assert table.column_names[-8:] == ["event", *stored_integer("ever", None), "wrote"]


def test_a_bad_abi_is_not_tried_again(tmp_path: Path) -> None:
    with operator_process(tmp_path) as process:
        process.ready()
        finished = Site(tmp_path, process, None).run(events="event E(uint a")
    assert (finished.status, finished.retryable) == ("Failed", False)
    assert "config: events: position 15: expected ','" in (finished.error_message or "")


def test_a_table_that_is_not_logs_is_not_tried_again(tmp_path: Path) -> None:
    pq.write_table(pa.table({"block_number": [1], "address": [b"x"]}), tmp_path / "other.parquet")
    with operator_process(tmp_path) as process:
        process.ready()
        site = Site(tmp_path, process, None)
        site.files = [InputFile(f"file://{tmp_path}/other.parquet", 1, 1, 0, 29)]
        finished = site.run(events="erc20_transfers")
    assert (finished.status, finished.retryable) == ("Failed", False)
    told = "not a table of logs: it has no column topic0, topic1, topic2, topic3, data"
    assert told in (finished.error_message or "")


HOT_LOGS = UUID(int=77)


def hot_logs(scene: HotScene) -> PayloadInput:
    """The same logs in a hot table, and an input that reads some of them."""
    ctx = scene.begin(an_input(start=0, end=39), versions=[HOT_LOGS])
    schema = TABLES[ChainTable.LOGS]
    ctx.outputs[0].stage(schema.to_hot(chain_logs()), types=schema.postgres_types)
    ctx.finish()
    return PayloadInput(0, uuid4(), HOT_LOGS, 0, "logs", "postgres", start=10, end=19)


@pytest.mark.parametrize("runtime", ["ecs_spark", "ecs_python"])
def test_hot_logs_become_a_hot_table_with_exact_numbers(
    data_dsn: str, spark_target: SparkTarget, runtime: str
) -> None:
    work = spark_session.begin(spark_session.open_session(spark_target), str(uuid4()), 1, 1)
    scene = HotScene(data_dsn, work.session)
    try:
        config = {
            "events": ["erc20_transfers", DEPOSIT_TEXT],
            "addresses": [f"0x{TOKEN.hex()}", f"0x{VAULT.hex()}"],
        }
        ctx = scene.begin(hot_logs(scene), operator="decode_events", config=config, runtime=runtime)
        decode_events(ctx)
        [output], _ = ctx.finish()
        assert (output.start, output.end, output.row_count) == (10, 19, 20)
        name = f"d_{ctx.task.outputs[0].dataset_version.hex}"
        with psycopg.connect(data_dsn, row_factory=dict_row) as connection:
            table = sql.Identifier("data", name)
            query = sql.SQL("SELECT * FROM {} ORDER BY block_number, log_index").format(table)
            rows = connection.execute(query).fetchall()
            indexed = connection.execute(
                "SELECT count(*) AS n FROM pg_indexes WHERE schemaname = 'data' AND tablename = %s",
                [name],
            ).fetchone()
        assert [row["value"] for row in rows[::2]] == [2**256 - 1 - block for block in range(10, 20)]
        assert rows[1]["amounts"] == ["10", str(2**255)]
        assert (rows[1]["event"], rows[1]["user"], rows[1]["memo"]) == (
            "Deposit",
            bytes([11]) * 20,
            "memo 10",
        )
        assert indexed is not None
        assert indexed["n"] == 3
    finally:
        scene.close()
        work.end()


def test_a_hot_table_takes_whatever_parameters_are_called(data_dsn: str) -> None:
    long = "x" * 80
    scene = HotScene(data_dsn)
    try:
        config = {"events": f"event Transfer(address indexed {long}, address indexed {long}y, uint256 xmin)"}
        ctx = scene.begin(hot_logs(scene), operator="decode_events", config=config, runtime="ecs_python")
        decode_events(ctx)
        ctx.finish()
        name = f"d_{ctx.task.outputs[0].dataset_version.hex}"
        with psycopg.connect(data_dsn, row_factory=dict_row) as connection:
            table = sql.Identifier("data", name)
            rows = connection.execute(
                sql.SQL("SELECT * FROM {} ORDER BY block_number").format(table)
            ).fetchall()
        assert [row["xmin_param"] for row in rows] == [2**256 - 1 - block for block in range(10, 20)]
        assert (rows[0]["x" * 63], rows[0]["x" * 57 + "_param"]) == (bytes([11]) * 20, bytes([12]) * 20)
    finally:
        scene.close()
