"""``tracelake.testing``: what people test their own operators and DAGs with behaves as a worker and a deploy do."""

from __future__ import annotations

import sys
import zipfile
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import httpx
import pyarrow as pa
import pytest

from tracelake.contracts.query_api import QueryRequest, QueryResponse
from tracelake.dispatcher.runtimes import RuntimeRegistry
from tracelake.domain.errors import Invalid
from tracelake.operators import Context, operator
from tracelake.testing import check_dag, devchain, run_operator

DAG = """
name: mine
jobs:
  - { name: tick, activation: source, runtime: dispatcher, source: { kind: manual }, outputs: 1 }
  - name: work
    activation: reactive
    runtime: RUNTIME
    operator: my_operator
    inputs: [{ from: { job: tick, output: 0 } }]
    outputs: [{ name: rows, storage: parquet }]
    execution_strategy: PerPartition
"""


def test_an_operator_reads_tables_within_its_scope_and_its_outputs_come_back() -> None:
    def doubled(ctx: Context) -> None:
        logs = ctx.inputs["logs"].arrow()
        ctx.outputs["rows"].write(logs.append_column("twice", pa.array([2 * n.as_py() for n in logs["n"]])))

    logs = pa.table({"block_number": [1, 2, 3, 4], "n": [10, 20, 30, 40]})
    run = run_operator(doubled, blocks=range(2, 4), inputs={"logs": logs}, outputs=["rows"])
    assert run.outputs["rows"].to_pylist() == [
        {"block_number": 2, "n": 20, "twice": 40},
        {"block_number": 3, "n": 30, "twice": 60},
    ]


def test_events_records_state_progress_and_the_log_are_recorded() -> None:
    @operator("speaks")
    def speaks(ctx: Context) -> None:
        sys.stdout.write("printed\n")
        ctx.log.info("logged", blocks=len(ctx.blocks))
        ctx.progress(done=ctx.state + 1)
        ctx.save(ctx.state + 1)
        assert ctx.publish("alerts", [{"key": "a", "raw": b"\x01"}]) == 1

    run = run_operator(speaks, blocks=range(5, 6), outputs={"done": "none"}, state=1)
    assert (run.state, run.progress, run.outputs) == (2, {"done": 2}, {})
    assert run.published == {"alerts": [{"key": "a", "raw": "0x01"}]}
    assert [(event.start, event.end) for event in run.events] == [(5, 5)]
    assert "printed" in run.log
    assert "logged blocks=1" in run.log


def test_a_source_that_never_ends_is_stopped_after_its_events() -> None:
    def ticks(ctx: Context) -> None:
        number = 0
        while ctx.sleep(0):
            ctx.emit(ctx.outputs[0].event(cursor=number))
            number += 1

    run = run_operator(ticks, outputs={"ticks": "none"}, stop_after_events=3)
    assert [event.cursor for event in run.events] == [0, 1, 2]


@pytest.mark.parametrize("body", ["text", b"\xff\x00", b"x" * 40_000])
def test_a_source_gets_what_its_task_is_for(body: str | bytes) -> None:
    def reads(ctx: Context) -> None:
        assert ctx.source is not None
        assert ctx.source.delivery is not None
        assert (ctx.source.tick, ctx.source.request) == (None, None)
        ctx.save([ctx.source.delivery.bytes, ctx.source_body().hex()])

    sent = body if isinstance(body, bytes) else body.encode()
    run = run_operator(
        reads, source={"kind": "webhook", "delivery": {"body": body}}, outputs={"done": "none"}
    )
    assert run.state == [len(sent), sent.hex()]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ({"kind": "cron"}, "a tick for kind cron"),
        ({"kind": "manual", "tick": 1}, "a tick for kind cron"),
        ({"kind": "hourly", "tick": 1}, "not one of a payload"),
        ({"kind": "cron", "tick": "noon"}, "not one of a payload"),
    ],
)
def test_a_source_of_no_payload_is_refused(source: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        run_operator(lambda ctx: None, source=source)
    with pytest.raises(ValueError, match="neither blocks nor inputs"):
        run_operator(lambda ctx: None, source={"kind": "cron", "tick": 1}, blocks=range(1))


def test_a_refusal_is_the_workers_own_and_carries_the_log() -> None:
    def forgets(ctx: Context) -> None:
        ctx.log.info("about to forget")

    with pytest.raises(Invalid, match="was not written") as refused:
        run_operator(forgets, blocks=range(1))
    assert "about to forget" in refused.value.__notes__[0]


def test_queries_are_answered_by_the_test() -> None:
    def asks(ctx: Context) -> None:
        [[count]] = ctx.query("SELECT count(*) FROM logs").rows
        ctx.progress(done=count)

    def answer(request: QueryRequest) -> QueryResponse:
        assert request.sql == "SELECT count(*) FROM logs"
        return QueryResponse(["count"], ["BIGINT"], [[7]], 1, truncated=False, query_id=uuid4())

    assert run_operator(asks, blocks=range(1), outputs={"x": "none"}, query=answer).progress == {"done": 7}
    with pytest.raises(Invalid, match="query="):
        run_operator(asks, blocks=range(1), outputs={"x": "none"})


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"blocks": range(0)}, "at least one"), ({"outputs": {"x": "postgres"}}, "here")],
)
def test_arguments_that_make_no_sense_are_refused(wrong: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        run_operator("noop", **wrong)


def test_a_source_asks_a_dev_chain_for_its_head() -> None:
    def head(ctx: Context) -> None:
        [endpoint] = ctx.rpc_pool().endpoints
        question = {"jsonrpc": "2.0", "id": 1, "method": "eth_blockNumber", "params": []}
        answer = httpx.post(endpoint.url, json=question, trust_env=False).json()
        ctx.emit(ctx.outputs[0].event(cursor=int(answer["result"], 16)))

    with devchain(blocks=20, seed=7) as node:
        node.chain.mine(3)
        run = run_operator(head, outputs={"head": "none"}, rpc_pool=node.url)
    assert [event.cursor for event in run.events] == [23]


def test_a_dag_is_checked_as_a_deploy_checks_it(tmp_path: Path) -> None:
    assert check_dag(DAG.replace("RUNTIME", "ecs_python")) == []
    [problem] = check_dag(DAG.replace("RUNTIME", "gpu"))
    assert (problem.line, problem.field) == (7, "jobs[1].runtime")
    assert check_dag(DAG.replace("RUNTIME", "gpu"), runtimes=["gpu"]) == []
    for name, traits in RuntimeRegistry().traits().items():
        assert (check_dag(DAG.replace("RUNTIME", name)) == []) == (
            not traits.in_process and not traits.invoked
        )


def test_a_function_is_checked_with_its_bundle(tmp_path: Path) -> None:
    bundle = tmp_path / "function.zip"
    with zipfile.ZipFile(bundle, "w") as archive:
        archive.writestr("main.py", "def handler(event, context): ...\n")
    reference = f"sha256:{sha256(bundle.read_bytes()).hexdigest()}"
    job = f"udf: {{bundle: '{reference}', entrypoint: main.handler}}"
    dag = DAG.replace("RUNTIME", "lambda").replace("operator: my_operator", job).replace("parquet", "none")
    assert [problem.field for problem in check_dag(dag)] == ["jobs[1].udf.bundle"]
    assert check_dag(dag, bundles=[bundle]) == []
