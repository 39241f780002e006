"""What a deploy says about ``evm_ingest`` jobs: their outputs go by name, their settings are checked."""

from __future__ import annotations

import pytest

from tracelake.domain.dag.checks import Installation
from tracelake.domain.dag.model import DagSpec, Storage
from tracelake.domain.dag.parse import parse_dag
from tracelake.domain.errors import InvalidDag
from tracelake.domain.runtimes import RuntimeTraits

INSTALLATION = Installation(
    {
        "dispatcher": RuntimeTraits(untrusted_ok=False, in_process=True),
        "ecs_spark": RuntimeTraits(untrusted_ok=False),
    }
)


def dag(*lines: str) -> DagSpec:
    job = "\n".join(f"    {line}" for line in lines)
    return parse_dag(
        f"""\
name: chain
jobs:
  - name: ranges
    activation: source
    runtime: dispatcher
    source: {{kind: manual}}
    outputs: 1
  - name: ingest
    activation: reactive
    runtime: ecs_spark
    operator: evm_ingest
    inputs: [{{from: {{job: ranges, output: 0}}}}]
    execution_strategy: PerPartition
{job}
""",
        INSTALLATION,
    )


def outputs(spec: DagSpec) -> list[str]:
    job = spec.jobs[1]
    assert {output.storage for output in job.outputs} == {Storage.PARQUET}
    return [output.name for output in job.outputs]


CONFIG = "config: {rpc_pool: main}"


def test_outputs_are_the_usual_three_or_those_that_are_named() -> None:
    assert outputs(dag(CONFIG)) == ["blocks", "transactions", "logs"]
    assert outputs(dag(CONFIG, "outputs: 2")) == ["blocks", "transactions"]
    assert outputs(dag(CONFIG, "outputs: 5"))[3:] == ["receipts", "withdrawals"]
    named = dag(CONFIG, "outputs: [{name: logs}, {name: traces}]")
    assert outputs(named) == ["logs", "traces"]


def test_defaults_are_written_out_so_that_spelling_one_out_is_no_change() -> None:
    assert dag(CONFIG).jobs[1].config == dag("config: {rpc_pool: main, verify: full}").jobs[1].config


@pytest.mark.parametrize(
    ("lines", "field", "message"),
    [
        (
            (CONFIG, "outputs: [{name: uncles}]"),
            "outputs[0].name",
            "has no output 'uncles'; it has blocks, trans",
        ),
        (
            (CONFIG, "outputs: 7"),
            "outputs",
            "has 6 outputs (blocks, transactions, logs, receipts, withdrawals",
        ),
        ((CONFIG, "outputs: [{name: logs}, {name: logs}]"), "outputs[1].name", "named 'logs' too"),
        ((CONFIG, "outputs: [{name: logs, storage: postgres}]"), "outputs[0].storage", "writes parquet only"),
        (("config: {}",), "config.rpc_pool", "is required"),
        (("config: {rpc_pool: main, verfy: off}",), "config.verfy", "did you mean verify"),
        (("config: {rpc_pool: main, verify: most}",), "config.verify", "must be one of full, bloom, off"),
        (("config: {rpc_pool: main, blocks_per_file: 0}",), "config.blocks_per_file", "from 1 to"),
        (("config: {rpc_pool: main, chain_id: eth}",), "config.chain_id", "whole number"),
        (("config: {rpc_pool: main, finality: soon}",), "config.finality", "latest, safe, finalized"),
    ],
)
def test_what_is_wrong_is_said_at_deploy(lines: tuple[str, ...], field: str, message: str) -> None:
    with pytest.raises(InvalidDag) as refused:
        dag(*lines)
    found = {problem.field: problem.message for problem in refused.value.problems}
    assert message in found.get(f"jobs[1].{field}", ""), found
