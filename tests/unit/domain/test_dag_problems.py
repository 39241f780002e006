"""Every kind of problem in a DAG file, found with its line and field, and nothing else with it."""

from __future__ import annotations

import pytest

from tracelake.domain.dag.checks import Installation
from tracelake.domain.dag.parse import parse_dag
from tracelake.domain.errors import DagProblem, InvalidDag
from tracelake.domain.operators.catalog import CATALOG
from tracelake.domain.runtimes import RuntimeTraits

INSTALLATION = Installation(
    runtimes={
        "dispatcher": RuntimeTraits(untrusted_ok=False, in_process=True),
        "ecs_spark": RuntimeTraits(untrusted_ok=False),
        "ecs_python": RuntimeTraits(untrusted_ok=True),
    },
    published_elsewhere={"prices": "market", "mine": "dag"},
)

BASE = """\
name: dag
defaults: {runtime: ecs_python}
jobs:
  - name: src
    activation: source
    source: {kind: manual}
  - name: mid
    activation: reactive
    operator: own
    inputs: [{from: {job: src, output: 0}}]
    outputs: 2
"""


def problems(text: str | bytes) -> tuple[DagProblem, ...]:
    with pytest.raises(InvalidDag) as invalid:
        parse_dag(text, INSTALLATION)
    return invalid.value.problems


def only(text: str | bytes, line: int, field: str, message: str) -> None:
    found = problems(text)
    assert [(problem.line, problem.field) for problem in found] == [(line, field)], found
    assert message in found[0].message


def edited(old: str, new: str) -> str:
    assert BASE.count(old) == 1
    return BASE.replace(old, new)


def with_job(*lines: str) -> str:
    """A third job, whose first line is line 12."""
    first, *rest = lines
    return BASE + f"  - {first}\n" + "".join(f"    {line}\n" for line in rest)


REACTIVE = ("name: new", "activation: reactive", "operator: own", "inputs: [{from: {job: src, output: 0}}]")
"""Lines 12 to 15."""


def test_the_base_is_right() -> None:
    assert len(parse_dag(BASE, INSTALLATION).jobs) == 2
    assert len(parse_dag(with_job(*REACTIVE), INSTALLATION).jobs) == 3


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "message"),
    [
        ("name: dag\n", "name: Dag\n", 1, "name", "does not match ^[a-z][a-z0-9_-]{0,127}$"),
        ("name: dag\n", "", 1, "name", "is required"),
        ("name: dag\n", "name: 7\n", 1, "name", "must be a string, not a number"),
        ("jobs:\n", "extra: 1\njobs:\n", 3, "extra", "unknown field"),
        (
            "runtime: ecs_python}",
            "runtme: ecs_python, runtime: ecs_python}",
            2,
            "defaults.runtme",
            "mean runtime?",
        ),
        (
            "runtime: ecs_python}",
            "runtime: ecs_python, retry: {bse: 1s}}",
            2,
            "defaults.retry.bse",
            "mean base?",
        ),
        ("name: mid", "name: src", 7, "jobs[1].name", "the job on line 4 too"),
        ("name: mid", "name: 'mid '", 7, "jobs[1].name", "does not match"),
        ("activation: reactive", "activation: reactiv", 8, "jobs[1].activation", "did you mean reactive?"),
        ("    activation: reactive\n", "", 7, "jobs[1].activation", "is required"),
        ("    operator: own\n", "", 7, "jobs[1].operator", "is required"),
        ("operator: own", "operator: [own]", 9, "jobs[1].operator", "not a list"),
        ("{kind: manual}", "{kind: cron}", 6, "jobs[0].source.schedule", "is required"),
        ("{kind: manual}", "{kind: cron, schedule: '@reboot'}", 6, "jobs[0].source.schedule", "five fields"),
        ("{kind: manual}", "{kind: cron, schedule: 0 0 30 2 *}", 6, "jobs[0].source.schedule", "never fires"),
        ("{kind: manual}", "{kind: webhook}\n    outputs: 2", 7, "jobs[0].outputs", "on output 0 only"),
        (
            "{kind: manual}",
            "{kind: webhook}\n    outputs: [{}, {name: more}]",
            7,
            "jobs[0].outputs[1]",
            "a webhook source without code has its events on output 0 only",
        ),
        (
            "{kind: manual}",
            "{kind: cron, schedule: '* 2 * 3 SUN#2', timezone: America/New_York}",
            6,
            "jobs[0].source.schedule",
            "never fires in America/New_York",
        ),
        (
            "{kind: manual}",
            "{kind: cron, schedule: 0 0 * * * *}",
            6,
            "jobs[0].source.schedule",
            "has 6 fields",
        ),
        ("{kind: manual}", "{kind: cron, schedule: 5}", 6, "jobs[0].source.schedule", "must be a string"),
        (
            "{kind: manual}",
            "{kind: cron, schedule: 0 3 * * *, timezone: Europe/Berln}",
            6,
            "jobs[0].source.timezone",
            "did you mean Europe/Berlin?",
        ),
        (
            "{kind: manual}",
            "{kind: cron, schedule: 0 3 * * *, catch_up: some}",
            6,
            "jobs[0].source.catch_up",
            "must be one of latest, all, none",
        ),
        (
            "{kind: manual}",
            "{kind: cron, schedule: 0 3 * * *, signature: github}",
            6,
            "jobs[0].source.signature",
            "isn't for kind: cron",
        ),
        ("{kind: manual}", "{kind: manual, schedule: 0 3 * * *}", 6, "jobs[0].source.schedule", "isn't for"),
        (
            "{kind: manual}",
            "{kind: webhook, signature: hmac}",
            6,
            "jobs[0].source.signature",
            "must be one of",
        ),
        ("{kind: manual}", "{kind: hourly}", 6, "jobs[0].source.kind", "must be one of"),
        ("{kind: manual}", "{}", 6, "jobs[0].source.kind", "is required"),
        ("{kind: manual}", "manual", 6, "jobs[0].source", "must be a map, not a string"),
        ("outputs: 2", "outputs: -1", 11, "jobs[1].outputs", "between 0 and 64"),
        ("outputs: 2", "outputs: many", 11, "jobs[1].outputs", "must be a whole number"),
        ("outputs: 2", "outputs: {name: x}", 11, "jobs[1].outputs", "must be a list, not a map"),
        ("outputs: 2", "outputs: [x]", 11, "jobs[1].outputs[0]", "must be a map"),
        ("outputs: 2", "outputs: [{name: A}]", 11, "jobs[1].outputs[0].name", "does not match"),
        (
            "outputs: 2",
            "outputs: [{storage: s3}]",
            11,
            "jobs[1].outputs[0].storage",
            "parquet, postgres, none",
        ),
        (
            "outputs: 2",
            "outputs: [{name: a}, {name: a}]",
            11,
            "jobs[1].outputs[1].name",
            "output 0 is named 'a'",
        ),
        ("job: src", "job: sr", 10, "jobs[1].inputs[0].from.job", "did you mean src?"),
        ("job: src", "job: mid", 10, "jobs[1].inputs[0].from.job", "its own input"),
        ("output: 0", "output: 1", 10, "jobs[1].inputs[0].from.output", "src has only output 0"),
        ("output: 0", "output: -1", 10, "jobs[1].inputs[0].from.output", "between 0 and 63"),
        (
            "output: 0",
            "dataset: prices",
            10,
            "jobs[1].inputs[0].from.job",
            "can't be given together with dataset",
        ),
        (
            "job: src, output: 0",
            "dataset: price",
            10,
            "jobs[1].inputs[0].from.dataset",
            "did you mean prices?",
        ),
        (
            "job: src, output: 0",
            "dataset: mine",
            10,
            "jobs[1].inputs[0].from.dataset",
            "there is no published",
        ),
        ("{from: {job: src, output: 0}}", "{}", 10, "jobs[1].inputs[0].from", "is required"),
        ("{from: {job: src, output: 0}}", "src", 10, "jobs[1].inputs[0]", "must be a map"),
        ("output: 0}}", "output: 0}, trigger: false}", 10, "jobs[1].inputs", "no input triggers"),
        ("output: 0}}", "output: 0}, trigger: no}", 10, "jobs[1].inputs[0].trigger", "true or false"),
        ("output: 0}}", "output: 0}, where: f(x) = 1}", 10, "jobs[1].inputs[0].where", "not allowed"),
        ("output: 0}}", "output: 0}, whre: 1}", 10, "jobs[1].inputs[0].whre", "did you mean where?"),
        ("[{from: {job: src, output: 0}}]", "[]", 10, "jobs[1].inputs", "needs at least one input"),
    ],
)
def test_one_mistake_is_one_problem(old: str, new: str, line: int, field: str, message: str) -> None:
    only(edited(old, new), line, field, message)


@pytest.mark.parametrize(
    ("extra", "field", "message"),
    [
        ("runtime: ecs_rust", "runtime", "known: dispatcher, ecs_python, ecs_spark"),
        ("update_strategy: append", "unique_key", "required for update_strategy: append"),
        ("update_strategy: upsert", "update_strategy", "append, replace"),
        ("execution_strategy: per_partition", "execution_strategy", "PerUpdate, PerPartition"),
        ("source: {kind: manual}", "source", "activation: source"),
        ("max_attempts: 0", "max_attempts", "between 1 and"),
        ("max_attempts: true", "max_attempts", "must be a whole number, not a boolean"),
        ("max_attempts: 1.5", "max_attempts", "must be a whole number"),
        ("timeout_seconds: 0", "timeout_seconds", "between 1 and"),
        ("timeout_seconds: -5", "timeout_seconds", "between 1 and"),
        ("heartbeat_timeout_seconds: 0", "heartbeat_timeout_seconds", "between 1 and"),
        ("max_queue_depth: 0", "max_queue_depth", "between 1 and"),
        ("max_queue_age: 10 minutes", "max_queue_age", "30s, 10m, 2h, 1d"),
        ("max_queue_age: 999999999d", "max_queue_age", "seconds"),
        ("idle_timeout: -1s", "idle_timeout", "30s, 10m, 2h, 1d"),
        ("scaling: {max_concurrency: 0}", "scaling.max_concurrency", "between 1 and"),
        ("retry: {base: 1h, max: 1m}", "retry", "below base"),
        ("priority: high", "priority", "normal, bulk"),
        ("backpressure: drop", "backpressure", "pause"),
        ("secrets: [A, A]", "secrets[1]", "listed twice"),
        ("secrets: [1]", "secrets[0]", "must be a string"),
        ("config: [1]", "config", "must be a map"),
        ("max_atempts: 1", "max_atempts", "did you mean max_attempts?"),
        ("timeout: 5m", "timeout", "did you mean timeout_seconds?"),
        ("heartbeat: 5m", "heartbeat", "did you mean heartbeat_timeout_seconds?"),
        ("udf: {bundle: b, entrypoint: ''}", "udf.entrypoint", "must be a string of 1"),
        ("udf: {bundle: b}", "udf.entrypoint", "is required"),
    ],
)
def test_a_wrong_job_field_is_named(extra: str, field: str, message: str) -> None:
    found = problems(with_job(*REACTIVE, extra))
    line = 12 if field in ("unique_key",) else 16
    assert [(problem.line, problem.field) for problem in found] == [(line, f"jobs[2].{field}")], found
    assert message in found[0].message


UDF = (*REACTIVE[:2], REACTIVE[3], "udf: {bundle: b, entrypoint: e}")
"""Lines 12 to 15, the UDF on 15."""


@pytest.mark.parametrize(
    ("lines", "line", "field", "message"),
    [
        ((*UDF, "secrets: [KEY]"), 16, "jobs[2].secrets", "no secrets"),
        ((*UDF, "outputs: [{storage: parquet}]"), 16, "jobs[2].outputs[0].storage", "buffered dataset"),
        (
            (*UDF, "outputs: [{}, {storage: postgres}]"),
            16,
            "jobs[2].outputs[1].storage",
            "can't write postgres",
        ),
        ((*UDF, "runtime: ecs_spark"), 16, "jobs[2].runtime", "trusted operators only"),
        ((*UDF, "runtime: dispatcher"), 16, "jobs[2].runtime", "trusted operators only"),
        (
            (
                *UDF,
                "operator: evm_ingest",
                "config: {rpc_pool: main}",
                "execution_strategy: PerPartition",
                "outputs: 0",
            ),
            16,
            "jobs[2].operator",
            "built in",
        ),
        ((*REACTIVE[:2], "operator: udf", REACTIVE[3]), 12, "jobs[2].udf", "is required"),
        ((*REACTIVE[:3],), 12, "jobs[2].inputs", "needs at least one input"),
        (
            (*REACTIVE, "runtime: dispatcher"),
            14,
            "jobs[2].operator",
            "noop, range_aggregator, range_splitter",
        ),
        (
            ("name: s", "activation: source", "operator: own", "outputs: 1"),
            12,
            "jobs[2].source",
            "is required",
        ),
        (
            ("name: s", "activation: source", "source: {kind: manual}", "outputs: 0"),
            15,
            "jobs[2].outputs",
            "at least one output",
        ),
        (
            ("name: s", "activation: source", "source: {kind: manual}", REACTIVE[3]),
            15,
            "jobs[2].inputs",
            "a source has no inputs",
        ),
        (
            ("name: s", "activation: source", "source: {kind: manual}", "outputs: [{storage: parquet}]"),
            15,
            "jobs[2].outputs[0].storage",
            "its storage is none",
        ),
        (
            ("name: s", "activation: source", "source: {kind: manual}", "execution_strategy: PerUpdate"),
            15,
            "jobs[2].execution_strategy",
            "for reactive jobs",
        ),
    ],
)
def test_fields_that_do_not_go_together(lines: tuple[str, ...], line: int, field: str, message: str) -> None:
    only(with_job(*lines), line, field, message)


@pytest.mark.parametrize(
    ("operator", "config", "field", "message"),
    [
        ("range_splitter", "{}", "chunk_size", "is required"),
        ("range_splitter", "{chunk_size: 0}", "chunk_size", "from 1 to 1000000000"),
        ("range_splitter", "{chunk_size: 1000000001}", "chunk_size", "from 1 to 1000000000"),
        ("range_aggregator", "{range_size: 5, start_block: 9223372036854775807}", "start_block", "from 0 to"),
        ("range_splitter", "{chunk_size: true}", "chunk_size", "whole number"),
        ("range_splitter", "{chunk_size: 5, chunksize: 1}", "chunksize", "did you mean chunk_size?"),
        ("range_aggregator", "{range_size: 1.5}", "range_size", "whole number"),
        ("range_aggregator", "{range_size: 5, finality: safe}", "finality", "finalized, latest or a number"),
        ("range_aggregator", "{range_size: 5, finality: -1}", "finality", "0 to 1000000000"),
        ("range_aggregator", "{range_size: 5, finality: true}", "finality", "0 to 1000000000"),
        ("sql_transform", "{sql: SELECT 1, sortby: [a]}", "sortby", "did you mean sort_by?"),
        ("sql_transform", "{sql: SELECT 1, sort_by: a}", "sort_by", "must be a list of column names"),
        ("sql_transform", "{sql: SELECT 1, blocks_per_file: 0}", "blocks_per_file", "from 1 to 1000000000"),
        ("sql_transform", "{sql: SELECT 1, indexes: [[1]]}", "indexes", "or of lists of them"),
        (
            "sql_transform",
            "{sql: SELECT 1, partition_blocks: no}",
            "partition_blocks",
            "from 1 to 1000000000",
        ),
        ("sql_transform", "{sql: DROP TABLE t}", "sql", "must"),
        ("sql_transform", "{}", "sql", "is missing"),
        ("decode_events", "{events: erc20_transfers, event: []}", "event", "did you mean events?"),
        ("decode_events", "{events: erc20_transfers, blocks_per_file: 0}", "blocks_per_file", "from 1 to"),
    ],
)
def test_config_of_platform_operators_is_checked(
    operator: str, config: str, field: str, message: str
) -> None:
    lines = ("name: r", "activation: reactive", f"operator: {operator}", REACTIVE[3], f"config: {config}")
    runtime = CATALOG[operator].runtimes[0]
    only(with_job(*lines, f"runtime: {runtime}"), 16, f"jobs[2].config.{field}", message)


@pytest.mark.parametrize(
    ("lines", "field", "message"),
    [
        (
            ("operator: range_splitter", "config: {chunk_size: 1}", "outputs: 2", "runtime: dispatcher"),
            "outputs",
            "has 1 outputs (chunks)",
        ),
        (
            ("operator: decode_events", "config: {events: erc20_transfers}", "outputs: [{storage: none}]"),
            "outputs[0].storage",
            "only",
        ),
        (
            (
                "operator: evm_ingest",
                "config: {rpc_pool: main}",
                "execution_strategy: PerUpdate",
                "runtime: ecs_spark",
            ),
            "execution_strategy",
            "PerPartition",
        ),
    ],
)
def test_built_in_operators_have_fixed_outputs(lines: tuple[str, ...], field: str, message: str) -> None:
    only(with_job("name: x", "activation: reactive", REACTIVE[3], *lines), 17, f"jobs[2].{field}", message)


INGEST = ("operator: evm_ingest", "config: {rpc_pool: main}", "execution_strategy: PerPartition")
SPLIT = ("operator: range_splitter", "config: {chunk_size: 1}", "execution_strategy: PerPartition")
"""Lines 15 to 17, below the first three of a job."""


@pytest.mark.parametrize(
    ("operator", "runtime", "message"),
    [
        (INGEST, "ecs_python", "evm_ingest doesn't run on ecs_python; it runs on ecs_spark"),
        (SPLIT, "ecs_spark", "range_splitter doesn't run on ecs_spark; it runs on dispatcher"),
    ],
)
def test_a_built_in_operator_on_a_runtime_that_it_cannot_run_on_is_refused(
    operator: tuple[str, ...], runtime: str, message: str
) -> None:
    lines = ("name: x", "activation: reactive", REACTIVE[3], *operator)
    only(with_job(*lines, f"runtime: {runtime}"), 18, "jobs[2].runtime", message)


def test_the_default_runtime_is_refused_at_the_job_that_it_does_not_fit() -> None:
    text = with_job("name: x", "activation: reactive", REACTIVE[3], *INGEST)
    only(text, 12, "jobs[2].runtime", "evm_ingest doesn't run on ecs_python")


def test_a_registered_runtime_may_run_every_operator_and_every_runtime_noop_and_ones_own() -> None:
    rust = Installation({**INSTALLATION.runtimes, "ecs_rust": RuntimeTraits()})
    lines = ("name: x", "activation: reactive", REACTIVE[3])
    assert len(parse_dag(with_job(*lines, *INGEST, "runtime: ecs_rust"), rust).jobs) == 3
    for runtime in ("dispatcher", "ecs_python", "ecs_spark", "ecs_rust"):
        assert parse_dag(with_job(*lines, "operator: noop", f"runtime: {runtime}"), rust)
    for runtime in ("ecs_python", "ecs_spark", "ecs_rust"):
        assert parse_dag(with_job(*lines, "operator: own", f"runtime: {runtime}"), rust)


@pytest.mark.parametrize(
    ("lines", "line", "field", "message"),
    [
        (
            ("activation: reactive", REACTIVE[3], "operator: block_follower"),
            13,
            "activation",
            "block_follower reads no input; use activation: source",
        ),
        (
            ("activation: reactive", "operator: block_follower"),
            13,
            "activation",
            "block_follower reads no input; use activation: source",
        ),
        (
            ("activation: source", "source: {kind: manual}", "operator: block_follower"),
            14,
            "source.kind",
            "block_follower has to run; use kind: always_on",
        ),
        (
            ("activation: source", "source: {kind: always_on}", "operator: decode_events"),
            13,
            "activation",
            "decode_events runs when its inputs change; use activation: reactive",
        ),
        (
            ("activation: source", "source: {kind: manual}", "operator: decode_events"),
            13,
            "activation",
            "decode_events runs when its inputs change; use activation: reactive",
        ),
    ],
)
def test_an_operator_with_the_other_activation_is_refused(
    lines: tuple[str, ...], line: int, field: str, message: str
) -> None:
    follows = "operator: block_follower" in lines
    config = "config: {chain_id: 1, rpc_pool: main}" if follows else "config: {events: erc20_transfers}"
    only(with_job("name: x", *lines, config), line, f"jobs[2].{field}", message)


def test_a_source_and_a_reactive_job_may_both_be_noop() -> None:
    always_on = ("name: x", "activation: source", "source: {kind: always_on}", "operator: noop")
    assert parse_dag(with_job(*always_on), INSTALLATION)
    assert parse_dag(with_job("name: x", "activation: reactive", REACTIVE[3], "operator: noop"), INSTALLATION)


HOT = """\
name: hot
jobs:
  - name: follower
    activation: source
    runtime: ecs_spark
    operator: block_follower
    source: {kind: always_on}
    config: {chain_id: 1, rpc_pool: main}
  - name: each
    activation: reactive
    runtime: ecs_spark
    operator: own
    execution_strategy: PerPartition
    inputs: [{from: {job: follower, output: 0}}]
"""


@pytest.mark.parametrize(
    ("setting", "field", "message"),
    [
        ("finality: soon", "finality", "must be finalized or a number of blocks"),
        ("start_block: first", "start_block", "must be a block number or latest"),
        ("confirmations: 5", "confirmations", "block_follower has no such setting"),
    ],
)
def test_settings_that_a_follower_would_refuse_are_refused_by_the_deploy(
    setting: str, field: str, message: str
) -> None:
    text = HOT.replace("rpc_pool: main}", f"rpc_pool: main, {setting}}}").replace("PerPartition", "PerUpdate")
    only(text, 8, f"jobs[0].config.{field}", message)


def test_a_follower_has_the_tables_of_a_chain_by_their_names() -> None:
    text = HOT.replace("PerPartition", "PerUpdate")
    assert parse_dag(
        text.replace("operator: block_follower", "operator: block_follower\n    outputs: 4"), INSTALLATION
    )
    named = text.replace("operator: block_follower", "operator: block_follower\n    outputs: [{name: rows}]")
    only(
        named,
        7,
        "jobs[0].outputs[0].name",
        "block_follower has no output 'rows'; it has blocks, transactions",
    )


def test_per_partition_on_cursors_alone_is_refused() -> None:
    only(HOT, 13, "jobs[1].execution_strategy", "no partition to run per")
    by_name = HOT.replace("{job: follower, output: 0}", "{dataset: hot_blocks}")
    published = by_name + "publish: {hot_blocks: {from: {job: follower, output: 0}}}\n"
    only(published, 13, "jobs[1].execution_strategy", "no partition to run per")


CYCLE = """\
name: ring
defaults: {runtime: ecs_python}
jobs:
  - {name: src, activation: source, source: {kind: manual}}
  - name: a
    activation: reactive
    operator: own
    outputs: 1
    inputs:
      - from: {job: src}
      - from: {job: c}
  - {name: b, activation: reactive, operator: own, outputs: 1, inputs: [{from: {job: a}}]}
  - {name: c, activation: reactive, operator: own, outputs: 1, inputs: [{from: {dataset: bs}}]}
  - {name: d, activation: reactive, operator: own, outputs: 1, inputs: [{from: {job: c}}]}
publish: {bs: {from: {job: b}}}
"""


def test_a_cycle_is_named_in_the_direction_of_the_data() -> None:
    only(CYCLE, 11, "jobs[1].inputs[1].from", "cycle: a -> b -> c -> a")


def test_two_cycles_are_two_problems() -> None:
    text = edited("job: src", "job: new") + (
        "  - {name: new, activation: reactive, operator: own, outputs: 1, inputs: [{from: {job: mid}}]}\n"
        "  - {name: x, activation: reactive, operator: own, outputs: 1, inputs: [{from: {job: y}}]}\n"
        "  - {name: y, activation: reactive, operator: own, outputs: 1, inputs: [{from: {job: x}}]}\n"
    )
    assert [(p.line, p.message) for p in problems(text)] == [
        (10, "cycle: mid -> new -> mid"),
        (13, "cycle: x -> y -> x"),
    ]


def test_a_job_that_reads_what_it_publishes_is_refused() -> None:
    text = edited("{job: src, output: 0}", "{dataset: own}") + "publish: {own: {from: {job: mid}}}\n"
    only(text, 10, "jobs[1].inputs[0].from.dataset", "its own input")


@pytest.mark.parametrize(
    ("entry", "field", "message"),
    [
        ("Bad: {from: {job: mid}}", "Bad", "^[a-z][a-z0-9_]{0,127}$"),
        ("with-hyphen: {from: {job: mid}}", "with-hyphen", "^[a-z][a-z0-9_]{0,127}$"),
        ("pg_stat: {from: {job: mid}}", "pg_stat", "don't begin with"),
        ("prices: {from: {job: mid}}", "prices", "already published by DAG market"),
        ("x: {from: {job: md}}", "x.from.job", "did you mean mid?"),
        ("x: {from: {job: mid, output: 2}}", "x.from.output", "mid has outputs 0 to 1"),
        ("x: {from: {dataset: prices, job: mid}}", "x.from.dataset", "unknown field"),
        ("x: {from: {job: mid}, storage: postgres}", "x.storage", "can't be given together with from"),
        ("x: mid", "x", "must be a map"),
        ("x:", "x", "needs {from: {job, output}}"),
        ("x: {frm: 1, from: {job: mid}}", "x.frm", "did you mean from?"),
    ],
)
def test_a_wrong_published_name_is_found(entry: str, field: str, message: str) -> None:
    only(BASE + f"publish:\n  {entry}\n", 13, f"publish.{field}", message)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ("write_mode: buffered, schema: {columns: {a: text}, unique: [a]}", "storage", "is required"),
        (
            "storage: parquet, write_mode: buffered, schema: {columns: {a: text}, unique: [a]}",
            "storage",
            "postgres",
        ),
        ("storage: postgres, schema: {columns: {a: text}, unique: [a]}", "write_mode", "is required"),
        (
            "storage: postgres, write_mode: direct, schema: {columns: {a: text}, unique: [a]}",
            "write_mode",
            "one of",
        ),
        ("storage: postgres, write_mode: buffered", "schema", "is required"),
        (
            "storage: postgres, write_mode: buffered, schema: {columns: {a: text}}",
            "schema.unique",
            "is required",
        ),
        (
            "storage: postgres, write_mode: buffered, schema: {columns: {a: text}, unique: [b]}",
            "schema.unique",
            "'b'",
        ),
        (
            "storage: postgres, write_mode: buffered, schema: {columns: {a: int}, unique: [a]}",
            "schema.columns.a",
            "one of",
        ),
        (
            "storage: postgres, write_mode: buffered, schema: {columns: {a: }, unique: [a]}",
            "schema.columns.a",
            "a type",
        ),
        (
            "storage: postgres, write_mode: buffered, schema: {columns: {A: text}, unique: [A]}",
            "schema.columns.A",
            "names",
        ),
        (
            "storage: postgres, write_mode: buffered, schema: {columns: {a: text, position: bigint}, unique: [a]}",
            "schema.columns.position",
            "platform's own",
        ),
        (
            "storage: postgres, write_mode: buffered, schema: {columns: {a: text, revision: text}, unique: [a]}",
            "schema.columns.revision",
            "is bigint",
        ),
        (
            "storage: postgres, write_mode: buffered, schema: {columns: {a: text, org_id: bigint}, unique: [a]}",
            "schema.columns.org_id",
            "text or uuid",
        ),
        (
            "storage: postgres, write_mode: buffered, schema: {columns: {a: text,block_number: text}, unique: [a]}",
            "schema.columns.block_number",
            "is bigint",
        ),
        (
            "storage: postgres, write_mode: buffered, schema: {columns: {a: jsonb}, unique: [a]}",
            "schema.columns.a",
            "can't be in unique",
        ),
    ],
)
def test_a_wrong_buffered_dataset_is_found(fields: str, field: str, message: str) -> None:
    only(BASE + f"publish:\n  events: {{{fields}}}\n", 13, f"publish.events.{field}", message)


def test_one_output_has_one_published_name() -> None:
    text = BASE + "publish:\n  one: {from: {job: mid}}\n  two: {from: {job: mid, output: 0}}\n"
    only(text, 14, "publish.two.from", "already published as one")


def test_all_problems_come_at_once_in_the_order_of_the_file() -> None:
    text = (
        BASE.replace("name: dag", "name: Dag")
        .replace("job: src", "job: nobody")
        .replace("outputs: 2", "outputs: x\n    max_attempts: 0")
    ) + "publish:\n  prices: {from: {job: mid}}\n"
    assert [(p.line, p.field) for p in problems(text)] == [
        (1, "name"),
        (10, "jobs[1].inputs[0].from.job"),
        (11, "jobs[1].outputs"),
        (12, "jobs[1].max_attempts"),
        (14, "publish.prices"),
    ]


def test_too_many_jobs_are_refused() -> None:
    jobs = "".join(f"  - {{name: j{i}, activation: source, source: {{kind: manual}}}}\n" for i in range(1001))
    only("name: many\ndefaults: {runtime: ecs_python}\njobs:\n" + jobs, 3, "jobs", "more than 1000 jobs")


@pytest.mark.parametrize("jobs", ["", "jobs:", "jobs: []", "jobs: {}", "jobs: 1"])
def test_a_dag_without_jobs_is_refused(jobs: str) -> None:
    assert [problem.field for problem in problems(f"name: empty\n{jobs}\n")] == ["jobs"]


@pytest.mark.parametrize(
    "field",
    [
        "config: {size: 5}",
        "secrets: KEY",
        "idle_timeout: 5m",
        "unique_key: id",
    ],
)
def test_a_field_that_does_nothing_without_code_is_refused(field: str) -> None:
    webhook = edited("{kind: manual}", f"{{kind: webhook}}\n    {field}")
    name = field.partition(":")[0]
    only(
        webhook,
        7,
        f"jobs[0].{name}",
        "has no effect on a webhook source without code: name an operator or udf",
    )
    parse_dag(
        webhook.replace("{kind: webhook}", "{kind: webhook}\n    operator: own\n    outputs: 1"), INSTALLATION
    )
