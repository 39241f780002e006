"""DAG files that are right, and what they become."""

from __future__ import annotations

import msgspec
import pytest

from tracelake.domain.dag.checks import Installation
from tracelake.domain.dag.model import (
    Activation,
    BufferedDataset,
    CatchUp,
    Column,
    ColumnType,
    CronSettings,
    DagSpec,
    DatasetName,
    ExecutionStrategy,
    JobOutput,
    JobSettings,
    Priority,
    PublishedOutput,
    Signature,
    SourceKind,
    Storage,
    UdfSpec,
    UpdateStrategy,
    WebhookSettings,
)
from tracelake.domain.dag.parse import locator, parse_dag
from tracelake.domain.runtimes import RuntimeTraits

INSTALLATION = Installation(
    runtimes={
        "dispatcher": RuntimeTraits(untrusted_ok=False, in_process=True),
        "ecs_spark": RuntimeTraits(untrusted_ok=False),
        "ecs_python": RuntimeTraits(untrusted_ok=True),
    },
    published_elsewhere={"prices": "market"},
)

SAMPLE = """\
name: monad
defaults: { max_attempts: 3, timeout_seconds: 600, heartbeat_timeout_seconds: 120, priority: normal }
jobs:
  - name: follower
    activation: source
    runtime: ecs_spark
    operator: block_follower
    source: { kind: always_on }
    outputs: 3                       # blocks, transactions, logs
    update_strategy: replace
    config: { chain_id: 143, rpc_pool: main, start_block: 0 }
  - name: ranges
    activation: reactive
    runtime: dispatcher
    operator: range_aggregator
    inputs: [{ from: { job: follower, output: 0 } }]
    outputs: 1
    execution_strategy: PerUpdate
    update_strategy: replace
    config: { range_size: 1000, finality: finalized }
  - name: compact
    activation: reactive
    runtime: ecs_spark
    operator: parquet_compact
    inputs:
      - { from: { job: ranges, output: 0 } }
      - { from: { job: follower, output: 0 }, trigger: false }
    outputs: 3
    execution_strategy: PerPartition
    update_strategy: replace
    max_queue_depth: 1000
    max_queue_age: 10m
    scaling: { max_concurrency: 4 }
publish:
  blocks: { from: { job: compact, output: 0 } }
  alert_events:
    storage: postgres
    write_mode: buffered
    schema: { columns: { org_id: uuid, dedupe_key: text }, unique: [org_id, dedupe_key] }
"""


def test_the_contracts_sample_parses() -> None:
    dag = parse_dag(SAMPLE, INSTALLATION)
    follower, ranges, compact = dag.jobs
    assert (dag.name, follower.activation, follower.source_kind) == (
        "monad",
        Activation.SOURCE,
        SourceKind.ALWAYS_ON,
    )
    assert [(out.name, out.storage) for out in follower.outputs] == [
        ("blocks", Storage.POSTGRES),
        ("transactions", Storage.POSTGRES),
        ("logs", Storage.POSTGRES),
    ]
    assert follower.execution_strategy is None
    assert [(out.name, out.storage) for out in ranges.outputs] == [("ranges", Storage.NONE)]
    assert [edge.source for edge in compact.inputs][:2] == [JobOutput("ranges", 0), JobOutput("follower", 0)]
    assert [edge.trigger for edge in compact.inputs] == [True, False, False, False]
    assert compact.settings == JobSettings(max_concurrency=4, max_queue_depth=1000, max_queue_age_seconds=600)
    assert dag.publish == (
        PublishedOutput("blocks", "compact", 0),
        BufferedDataset(
            "alert_events",
            (Column("org_id", ColumnType.UUID), Column("dedupe_key", ColumnType.TEXT)),
            ("org_id", "dedupe_key"),
        ),
    )


def test_compacted_outputs_are_named_after_what_is_compacted() -> None:
    compact = parse_dag(SAMPLE, INSTALLATION).jobs[2]
    assert [(out.name, out.storage) for out in compact.outputs] == [
        ("blocks", Storage.PARQUET),
        ("transactions", Storage.PARQUET),
        ("logs", Storage.PARQUET),
    ]


def test_one_hot_input_stands_for_the_producers_further_outputs() -> None:
    compact = parse_dag(SAMPLE, INSTALLATION).jobs[2]
    assert [edge.source for edge in compact.inputs[1:]] == [JobOutput("follower", n) for n in range(3)]
    spelt_out = SAMPLE.replace(
        "      - { from: { job: follower, output: 0 }, trigger: false }\n",
        "".join(f"      - {{ from: {{ job: follower, output: {n} }}, trigger: false }}\n" for n in range(3)),
    )
    assert parse_dag(spelt_out, INSTALLATION) == parse_dag(SAMPLE, INSTALLATION)
    single = parse_dag(SAMPLE.replace("outputs: 3\n    execution", "outputs: 1\n    execution"), INSTALLATION)
    assert [edge.source for edge in single.jobs[2].inputs[1:]] == [JobOutput("follower", 0)]


def test_a_spec_survives_json() -> None:
    dag = parse_dag(SAMPLE, INSTALLATION)
    assert msgspec.json.decode(msgspec.json.encode(dag), type=DagSpec) == dag


def test_bytes_and_a_byte_order_mark_are_read_alike() -> None:
    assert parse_dag(b"\xef\xbb\xbf" + SAMPLE.encode(), INSTALLATION) == parse_dag(SAMPLE, INSTALLATION)


def test_a_manual_source_needs_next_to_nothing() -> None:
    dag = parse_dag(
        """
        name: bench
        jobs:
          - { name: start, activation: source, runtime: ecs_python, source: { kind: manual } }
          - { name: next, activation: reactive, runtime: ecs_python, operator: noop,
              inputs: [{ from: { job: start } }] }
        """,
        INSTALLATION,
    )
    start, following = dag.jobs
    assert start.operator == "noop"
    assert [(out.name, out.storage) for out in start.outputs] == [("output_0", Storage.NONE)]
    assert following.execution_strategy is ExecutionStrategy.PER_UPDATE
    assert following.update_strategy is UpdateStrategy.REPLACE
    assert following.inputs[0].source == JobOutput("start", 0)


def test_defaults_merge_into_jobs_and_jobs_win() -> None:
    dag = parse_dag(
        """
        name: tuned
        defaults: { runtime: ecs_python, max_attempts: 5, retry: { base: 1m, max: 2h }, priority: bulk,
                    scaling: { max_concurrency: 2 }, idle_timeout: 30s }
        jobs:
          - { name: a, activation: source, source: { kind: manual } }
          - name: b
            activation: reactive
            runtime: ecs_spark
            operator: own_thing
            inputs: [{ from: { job: a, output: 0 } }]
            retry: { base: 10 }
            priority: normal
            timeout_seconds: 1d
            heartbeat_timeout_seconds: 30
        """,
        INSTALLATION,
    )
    a, b = dag.jobs
    assert (a.runtime, b.runtime) == ("ecs_python", "ecs_spark")
    assert a.settings.max_attempts == b.settings.max_attempts == 5
    assert (a.settings.retry_base_seconds, a.settings.retry_max_seconds) == (60, 7200)
    assert (b.settings.retry_base_seconds, b.settings.retry_max_seconds) == (10, 7200)
    assert (a.settings.priority, b.settings.priority) == (Priority.BULK, Priority.NORMAL)
    assert (b.settings.timeout_seconds, b.settings.heartbeat_timeout_seconds) == (86400, 30)
    assert (b.settings.max_concurrency, b.settings.idle_timeout_seconds) == (2, 30)
    assert b.outputs == ()


def test_datasets_of_this_and_of_other_dags_are_inputs_by_name() -> None:
    dag = parse_dag(
        """
        name: alerts
        jobs:
          - name: notify
            activation: reactive
            runtime: ecs_python
            udf: { bundle: "s3://bundles/notify.zip", entrypoint: main.handler }
            inputs:
              - { from: { dataset: alert_events }, where: "severity = 'critical'" }
              - { from: { dataset: prices }, trigger: false, where: { pair: [eth, btc] } }
        publish:
          alert_events:
            storage: postgres
            write_mode: buffered
            schema: { columns: { id: text, severity: text }, unique: id }
        """,
        INSTALLATION,
    )
    job = dag.jobs[0]
    assert job.operator == "udf"
    assert job.udf == UdfSpec("s3://bundles/notify.zip", "main.handler")
    assert [edge.source for edge in job.inputs] == [DatasetName("alert_events"), DatasetName("prices")]
    assert [edge.where.text if edge.where else None for edge in job.inputs] == [
        "severity = 'critical'",
        "pair IN ('btc', 'eth')",
    ]


def test_append_with_a_key_and_named_outputs() -> None:
    dag = parse_dag(
        """
        name: own
        jobs:
          - { name: a, activation: source, runtime: ecs_python, source: { kind: always_on }, operator: feed,
              outputs: [{ name: ticks, storage: postgres }, {}], update_strategy: append,
              unique_key: [id, at], secrets: [FEED_KEY] }
        """,
        INSTALLATION,
    )
    job = dag.jobs[0]
    assert [(out.index, out.name, out.storage) for out in job.outputs] == [
        (0, "ticks", Storage.POSTGRES),
        (1, "output_1", Storage.NONE),
    ]
    assert (job.unique_key, job.secrets) == (("id", "at"), ("FEED_KEY",))


def test_a_default_that_is_spelled_out_is_the_same_spec() -> None:
    left_out = SAMPLE.replace(", finality: finalized", "")
    assert left_out != SAMPLE
    assert parse_dag(left_out, INSTALLATION) == parse_dag(SAMPLE, INSTALLATION)


def test_scalars_follow_yaml_1_2() -> None:
    dag = parse_dag(
        """
        name: scalars
        jobs:
          - name: a
            activation: source
            runtime: ecs_python
            operator: own
            source: { kind: always_on }
            outputs: 1
            config:
              on: yes
              no: off
              octal: 010
              hex: 0x1F
              day: 2026-01-02
              sexagesimal: 12:30:45
              quoted: "1"
              float: 1.5e3
              empty:
              really: true
        """,
        INSTALLATION,
    )
    assert dag.jobs[0].config == {
        "on": "yes",
        "no": "off",
        "octal": 10,
        "hex": 31,
        "day": "2026-01-02",
        "sexagesimal": "12:30:45",
        "quoted": "1",
        "float": 1500.0,
        "empty": None,
        "really": True,
    }


def test_an_alias_stands_for_what_it_names() -> None:
    dag = parse_dag(
        """
        name: shared
        jobs:
          - { name: a, activation: source, runtime: ecs_python, operator: own, outputs: 1,
              source: &kept { kind: always_on }, config: &c { x: [1, 2] } }
          - { name: b, activation: source, runtime: ecs_python, operator: own, outputs: 1,
              source: *kept, config: *c }
        """,
        INSTALLATION,
    )
    assert dag.jobs[0].config == dag.jobs[1].config == {"x": [1, 2]}


@pytest.mark.parametrize("finality", ["finalized", "latest", 0, 12])
def test_finality_is_a_word_or_a_depth(finality: object) -> None:
    text = SAMPLE.replace("finality: finalized", f"finality: {finality}")
    assert parse_dag(text, INSTALLATION).jobs[1].config == {"range_size": 1000, "finality": finality}


def sources(text: str) -> list[tuple[object, ...]]:
    dag = parse_dag(text, INSTALLATION)
    return [(job.source_kind, job.source, job.runs_code, job.operator, job.runtime) for job in dag.jobs]


def test_sources_by_schedule_and_by_call_with_and_without_code() -> None:
    assert sources(
        """
        name: outside
        jobs:
          - { name: a, activation: source, outputs: 1,
              source: { kind: cron, schedule: "*/5  * * * *", timezone: Europe/Berlin, catch_up: all } }
          - { name: b, activation: source, outputs: 1, source: { kind: webhook } }
          - { name: c, activation: source, outputs: 1, source: { kind: webhook, signature: github },
              runtime: ecs_python, operator: own }
          - { name: d, activation: source, outputs: 1, source: { kind: cron, schedule: 0 3 * * * },
              runtime: dispatcher, operator: noop }
          - { name: e, activation: source, outputs: 1, source: { kind: manual }, runtime: ecs_python,
              operator: own }
          - { name: f, activation: source, outputs: 1, source: { kind: manual }, runtime: ecs_python,
              operator: noop }
        """
    ) == [
        (
            SourceKind.CRON,
            CronSettings("*/5 * * * *", "Europe/Berlin", CatchUp.ALL),
            False,
            "noop",
            "dispatcher",
        ),
        (SourceKind.WEBHOOK, WebhookSettings(Signature.STANDARD), False, "noop", "dispatcher"),
        (SourceKind.WEBHOOK, WebhookSettings(Signature.GITHUB), True, "own", "ecs_python"),
        (SourceKind.CRON, CronSettings("0 3 * * *", "UTC", CatchUp.LATEST), True, "noop", "dispatcher"),
        (SourceKind.MANUAL, None, True, "own", "ecs_python"),
        # A manual source could always name the no-op, and has its events at once.
        (SourceKind.MANUAL, None, False, "noop", "ecs_python"),
    ]


def test_a_place_can_be_found_after_parsing() -> None:
    locate = locator(SAMPLE)
    assert locate(("jobs", 2, "inputs", 1, "from")) == (27, 11)
    assert locate(("publish", "alert_events")) == (36, 3)
    assert locate(("jobs", 7)) == (3, 1)
