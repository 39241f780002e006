"""What docs/operators.md shows for ``sql_transform`` is what its example job gives on a real Spark."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import msgspec
import pyarrow.parquet as pq
import yaml

from scripts.reference import example_rows
from scripts.reference.example_rows import SQL_RESULT
from scripts.reference.operators_page import example_dag
from tests.support.operator_process import a_task, an_output, operator_process
from tracelake.contracts.dispatcher_api import InputFile, PayloadInput
from tracelake.contracts.operator_protocol import Call, Finished, ListFiles, Reply, SparkTarget
from tracelake.objects.base import ObjectLocation


def test_the_example_of_sql_transform_gives_the_rows_on_the_page(
    tmp_path: Path, spark_target: SparkTarget
) -> None:
    end = example_rows.BLOCKS - 1
    transfers = tmp_path / f"events_0_{end}.parquet"
    pq.write_table(example_rows.transfers(), transfers)
    files = [InputFile(f"file://{transfers}", 1, transfers.stat().st_size, 0, end)]
    [job] = [job for job in yaml.safe_load(example_dag())["jobs"] if job["operator"] == "sql_transform"]
    source = PayloadInput(0, uuid4(), uuid4(), 0, None, "parquet", start=0, end=end)
    output = an_output(storage="parquet", staging=f"file://{tmp_path}/staging/{uuid4()}/")
    task = a_task(
        "sql_transform", config=job["config"], inputs=[source], outputs=[output], runtime="ecs_spark"
    )
    with operator_process(tmp_path) as process:
        process.ready()
        process.run(task, {"TRACE_ATTEMPT": "1"}, spark=spark_target)
        while not isinstance(message := process.receive(), Finished):
            if isinstance(message, Call):
                assert message.action == ListFiles(0)
                process.send(Reply(call_id=message.call_id, value=msgspec.to_builtins(files)))
        assert message.status == "Completed", process.log()
        [manifest] = [each.manifest for each in message.outputs]
        assert manifest is not None
        [written] = ["/" + ObjectLocation.parse(file.location).path for file in manifest.files]
    rows = pq.read_table(written).to_pylist()[: example_rows.ROWS]
    assert tuple(rows[0]) == SQL_RESULT.columns
    assert [tuple(example_rows.shown(value) for value in row.values()) for row in rows] == SQL_RESULT.rows
