"""A deploy plan: what changes, why, how far it reaches, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from tracelake.domain.buffers import BufferSchema
from tracelake.domain.dag.checks import Installation
from tracelake.domain.dag.model import Column, ColumnType, DagSpec
from tracelake.domain.dag.parse import locator, parse_dag
from tracelake.domain.dag.plan import DeployPlan, JobChange, plan_deploy, render
from tracelake.domain.errors import DagProblem, InvalidDag
from tracelake.domain.runtimes import RuntimeTraits

INSTALLATION = Installation(
    runtimes={
        "dispatcher": RuntimeTraits(untrusted_ok=False, in_process=True),
        "ecs_python": RuntimeTraits(untrusted_ok=True),
        "ecs_rust": RuntimeTraits(),
    },
    published_elsewhere={"chunks": "base", "events": "base", "loop": "reader", "hot": "base"},
)

BASE = """\
name: base
defaults: {runtime: ecs_python}
jobs:
  - {name: src, activation: source, source: {kind: manual}}
  - name: split
    activation: reactive
    operator: range_splitter
    runtime: dispatcher
    inputs: [{from: {job: src, output: 0}}]
    config: {chunk_size: 1000}
  - {name: use, activation: reactive, operator: own, outputs: 2, inputs: [{from: {job: split}}]}
  - {name: apart, activation: reactive, operator: own, outputs: 1, inputs: [{from: {job: src}}]}
publish:
  chunks: {from: {job: split, output: 0}}
  events: {storage: postgres, write_mode: buffered, schema: {columns: {id: text}, unique: id}}
"""
READER = """\
name: reader
defaults: {runtime: ecs_python}
jobs:
  - {name: far, activation: reactive, operator: own, outputs: 1, inputs: [{from: {dataset: chunks}}]}
  - {name: farther, activation: reactive, operator: own, outputs: 1, inputs: [{from: {job: far}}]}
  - {name: sunk, activation: reactive, operator: own, inputs: [{from: {dataset: events}}]}
publish:
  loop: {from: {job: farther}}
"""
LONER = """\
name: loner
jobs:
  - {name: src, activation: source, runtime: ecs_python, source: {kind: manual}}
"""


def spec(text: str) -> DagSpec:
    return parse_dag(text, INSTALLATION)


ACTIVE = {"base": spec(BASE), "reader": spec(READER), "loner": spec(LONER)}


def plan(text: str) -> DeployPlan:
    return plan_deploy(spec(text), ACTIVE)


def edited(*edits: tuple[str, str], text: str = BASE) -> str:
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def kinds(found: DeployPlan) -> dict[str, str]:
    return {f"{change.dag}/{change.job}": str(change.kind) for change in found.jobs}


def change(found: DeployPlan, name: str) -> JobChange:
    return next(job for job in found.jobs if f"{job.dag}/{job.job}" == name)


def refused(text: str) -> tuple[DagProblem, ...]:
    with pytest.raises(InvalidDag) as invalid:
        plan_deploy(spec(text), ACTIVE, locator(text))
    return invalid.value.problems


def test_the_first_deploy_adds_everything_upstream_first() -> None:
    found = plan_deploy(ACTIVE["base"], {})
    assert [(job.job, str(job.kind)) for job in found.jobs] == [
        ("src", "added"),
        ("split", "added"),
        ("apart", "added"),
        ("use", "added"),
    ]
    assert {str(output.version) for job in found.jobs for output in job.outputs} == {"new"}
    assert change(found, "base/split").outputs[0].dataset == "chunks"
    assert [(str(entry.kind), entry.name) for entry in found.publish] == [
        ("published", "chunks"),
        ("published", "events"),
    ]


OWN = "{name: use, activation: reactive, operator: own"


@pytest.mark.parametrize(("name", "meant"), [("nooop", "noop"), ("evm_ingst", "evm_ingest")])
def test_an_operator_whose_name_is_close_to_a_built_in_one_is_a_warning(name: str, meant: str) -> None:
    text = edited((OWN, OWN.replace("own", name)))
    [warning] = plan_deploy(spec(text), ACTIVE, locator(text)).warnings
    assert (warning.line, warning.field) == (11, "jobs[2].operator")
    assert f"{name} is no built-in operator; did you mean {meant}?" in warning.message
    assert "tracelake worker --runtime ecs_python --operators FILE" in warning.message


@pytest.mark.parametrize("name", ["own", "sql", "decode", "ingest", "my_company.noop"])
def test_an_operator_of_another_name_is_somebodys_own(name: str) -> None:
    text = edited((OWN, OWN.replace("own", name)))
    assert plan(text).warnings == ()


def test_the_same_yaml_changes_nothing() -> None:
    found = plan(BASE)
    assert found.changes_nothing
    assert set(kinds(found)) == {"base/src", "base/split", "base/use", "base/apart"}
    assert render(found) == "DAG base: nothing changes\n"


def test_a_changed_config_replaces_the_job_and_all_downstream_in_other_dags_too() -> None:
    found = plan(edited(("chunk_size: 1000", "chunk_size: 500")))
    assert kinds(found) == {
        "base/src": "unchanged",
        "base/split": "replaced",
        "base/use": "replaced",
        "base/apart": "unchanged",
        "reader/far": "replaced",
        "reader/farther": "replaced",
        "reader/sunk": "unchanged",
    }
    assert change(found, "base/split").because == ("config.chunk_size: 1000 -> 500",)
    assert change(found, "base/use").because == ("input 0: split is replaced",)
    assert change(found, "reader/far").because == ("input 0: base/split is replaced",)
    assert change(found, "reader/farther").because == ("input 0: far is replaced",)
    assert [str(output.version) for output in change(found, "base/use").outputs] == ["new", "new"]
    assert [str(output.version) for output in change(found, "base/apart").outputs] == ["kept"]
    assert change(found, "reader/farther").outputs[0].dataset == "loop"
    order = [f"{job.dag}/{job.job}" for job in found.jobs]
    assert order.index("base/split") < order.index("reader/far") < order.index("reader/farther")


def test_tuning_keeps_the_versions() -> None:
    found = plan(edited(("chunk_size: 1000}", "chunk_size: 1000}\n    max_attempts: 5\n    priority: bulk")))
    assert change(found, "base/split").kind == "retuned"
    assert change(found, "base/split").because == ("max_attempts: 3 -> 5", "priority: normal -> bulk")
    assert {kind for name, kind in kinds(found).items() if name != "base/split"} == {"unchanged"}
    assert not found.changes_nothing


def test_another_runtime_is_tuning() -> None:
    found = plan(edited(("runtime: dispatcher", "runtime: ecs_rust")))
    assert change(found, "base/split").because == ("runtime: dispatcher -> ecs_rust",)
    assert change(found, "base/split").kind == "retuned"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "name: use, activation: reactive, operator: own",
            "name: use, activation: reactive, operator: mine",
            "operator: own -> mine",
        ),
        ("{from: {job: split}}", "{from: {job: split}, where: a = 1}", "input 0: where: (none) -> a = 1"),
        ("{from: {job: split}}", "{from: {job: src}}", "input 0: split, output 0 -> src, output 0"),
        (
            "{from: {job: split}}",
            "{from: {job: split}}, {from: {job: src}, trigger: false}",
            "input 1: src, output 0 added",
        ),
        ("outputs: 2", "outputs: 1", "output 1: output_1 removed"),
        ("outputs: 2", "outputs: [{name: rows}, {}]", "output 0: name: output_0 -> rows"),
        ("outputs: 2", "outputs: 2, config: {deep: {x: [1]}}", 'config.deep: (none) -> {"x": [1]}'),
        (
            "outputs: 2",
            "outputs: 2, unique_key: id, update_strategy: append",
            "update_strategy: replace -> append",
        ),
        ("outputs: 2", "outputs: 2, secrets: [KEY]", 'secrets: [] -> ["KEY"]'),
    ],
)
def test_a_replacement_says_why(old: str, new: str, reason: str) -> None:
    found = plan(edited((old, new)))
    assert change(found, "base/use").kind == "replaced"
    assert reason in change(found, "base/use").because


def test_an_output_less_is_retired() -> None:
    outputs = change(plan(edited(("outputs: 2", "outputs: 1"))), "base/use").outputs
    assert [(output.index, str(output.version)) for output in outputs] == [(0, "new"), (1, "retired")]


def test_a_removed_job_comes_last_and_retires_its_outputs() -> None:
    apart = next(line for line in BASE.splitlines() if "apart" in line)
    found = plan(edited((apart + "\n", "")))
    assert (found.jobs[-1].job, str(found.jobs[-1].kind)) == ("apart", "removed")
    assert [str(output.version) for output in found.jobs[-1].outputs] == ["retired"]


def test_a_moved_name_replaces_its_readers() -> None:
    found = plan(edited(("chunks: {from: {job: split, output: 0}}", "chunks: {from: {job: use, output: 1}}")))
    moved = next(entry for entry in found.publish if entry.name == "chunks")
    assert (str(moved.kind), moved.before, moved.after) == ("moved", "split, output 0", "use, output 1")
    assert change(found, "base/split").kind == "unchanged"
    assert change(found, "reader/far").because == ("input 0: now comes from base/use, output 1",)


def test_a_new_column_extends_a_buffered_dataset_and_leaves_its_readers_alone() -> None:
    found = plan(edited(("columns: {id: text}", "columns: {id: text, at: timestamptz}")))
    extended = next(entry for entry in found.publish if entry.name == "events")
    assert (str(extended.kind), extended.because) == ("extended", ("column at timestamptz is added",))
    assert all(entry.kind == "unchanged" for entry in found.jobs)
    assert "  ~ events: extended\n      column at timestamptz is added\n" in render(found)


def test_a_schema_that_was_only_rearranged_changes_nothing() -> None:
    found = plan(edited(("columns: {id: text}", "columns: {'id': text}")))
    assert next(str(entry.kind) for entry in found.publish if entry.name == "events") == "unchanged"


def test_a_schema_that_does_more_than_grow_is_refused_with_every_reason() -> None:
    text = edited(("columns: {id: text}, unique: id", "columns: {key: text, id: uuid}, unique: key"))
    where = "publish.events.schema"
    assert refused(text) == (
        DagProblem(15, 83, f"{where}.columns.id", "the type of id can't change from text to uuid"),
        DagProblem(15, 94, f"{where}.unique", "the key can't change from (id) to (key)"),
    )


def test_what_was_stored_once_counts_when_a_buffered_dataset_is_declared_again() -> None:
    kept = {"events": BufferSchema((Column("id", ColumnType.TEXT), Column("old", ColumnType.TEXT)), ("id",))}
    with pytest.raises(InvalidDag, match="column old can't be removed"):
        plan_deploy(spec(BASE), {}, kept=kept)
    text = edited(("columns: {id: text}", "columns: {id: text, old: text, more: jsonb}"))
    found = plan_deploy(spec(text), {}, kept=kept)
    again = next(entry for entry in found.publish if entry.name == "events")
    assert again.because == (
        "it was published before: its existing rows are kept",
        "column more jsonb is added",
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("operator: own, execution_strategy: PerPartition", "events: a buffered dataset grows by position"),
        (
            "operator: range_aggregator, runtime: dispatcher, config: {range_size: 10}",
            "range_aggregator works on blocks",
        ),
        ("operator: own, outputs: [{name: a, storage: postgres}]", "the job replaces rows in postgres"),
    ],
)
def test_positions_of_a_buffered_dataset_are_not_taken_for_blocks(fields: str, message: str) -> None:
    text = edited(
        ("name: sunk, activation: reactive, operator: own", f"name: sunk, activation: reactive, {fields}"),
        text=READER,
    )
    assert any(
        problem.field == "jobs[2].inputs[0].from" and message in problem.message for problem in refused(text)
    )


def test_a_condition_on_a_buffered_dataset_that_no_row_fulfils_is_refused_at_its_place() -> None:
    def reading(where: str) -> str:
        old = "inputs: [{from: {dataset: events}}]"
        assert READER.count(old) == 1
        return READER.replace(old, f'inputs: [{{from: {{dataset: events}}, where: "{where}"}}]')

    [problem] = refused(reading("position > 'soon'"))
    assert (problem.field, problem.line > 1) == ("jobs[2].inputs[0].where", True)
    assert problem.message == "position is bigint, and 'soon' can't be read as a bigint: no row would match"
    for where in ("position > '7'", "id = '7'", "retracted_at < '2026-01-01'", "gone = 1"):
        plan(reading(where))


def test_a_number_beside_a_column_that_an_input_has_as_text_is_refused() -> None:
    base = edited(("columns: {id: text}", "columns: {id: text, amount: numeric}"))
    old = "inputs: [{from: {dataset: events}}]"
    for literal, right in (("5", False), ("'5'", True), ("'five'", False)):
        text = READER.replace(old, f'inputs: [{{from: {{dataset: events}}, where: "amount = {literal}"}}]')
        world = {**ACTIVE, "base": spec(base)}
        if right:
            plan_deploy(spec(text), world)
        else:
            with pytest.raises(InvalidDag, match="amount is numeric"):
                plan_deploy(spec(text), world)


def test_unpublishing_what_nobody_reads_is_fine() -> None:
    text = READER[: READER.index("publish:")]
    found = plan(text)
    assert [(entry.name, str(entry.kind)) for entry in found.publish] == [("loop", "unpublished")]


def test_unpublishing_what_another_dag_reads_is_refused() -> None:
    line = "  chunks: {from: {job: split, output: 0}}\n"
    assert refused(edited((line, ""))) == (
        DagProblem(13, 1, "publish.chunks", "chunks can't be unpublished: job far of DAG reader reads it"),
    )


def test_a_name_of_another_dag_is_refused() -> None:
    taken = msgspec.structs.replace(ACTIVE["loner"], publish=ACTIVE["reader"].publish)
    taken = msgspec.structs.replace(taken, publish=(msgspec.structs.replace(taken.publish[0], job="src"),))
    with pytest.raises(InvalidDag) as invalid:
        plan_deploy(taken, ACTIVE)
    assert [problem.message for problem in invalid.value.problems] == [
        "loop is already published by DAG reader"
    ]


def test_a_dataset_that_is_gone_since_parsing_is_refused() -> None:
    with pytest.raises(InvalidDag) as invalid:
        plan_deploy(spec(READER), {}, locator(READER))
    assert [(problem.line, problem.field) for problem in invalid.value.problems] == [
        (4, "jobs[0].inputs[0].from"),
        (6, "jobs[2].inputs[0].from"),
    ]


def test_a_cycle_through_two_dags_is_refused_where_the_new_dag_closes_it() -> None:
    text = edited(("inputs: [{from: {job: src, output: 0}}]", "inputs: [{from: {dataset: loop}}]"))
    assert refused(text) == (
        DagProblem(
            9,
            15,
            "jobs[1].inputs[0].from",
            "cycle: base/split -> reader/far -> reader/farther -> base/split",
        ),
    )


def test_partitions_that_become_cursors_under_a_reader_are_refused() -> None:
    reader = READER.replace(
        "name: far, activation: reactive", "name: far, activation: reactive, execution_strategy: PerPartition"
    )
    new = edited(
        ("outputs: 2", "outputs: [{storage: postgres}, {}]"),
        ("chunks: {from: {job: split, output: 0}}", "chunks: {from: {job: use, output: 0}}"),
    )
    with pytest.raises(InvalidDag) as invalid:
        plan_deploy(spec(new), {**ACTIVE, "reader": spec(reader)}, locator(new))
    assert [(problem.line, problem.field) for problem in invalid.value.problems] == [(14, "publish.chunks")]


def test_a_plan_survives_json() -> None:
    found = plan(edited(("chunk_size: 1000", "chunk_size: 500")))
    assert msgspec.json.decode(msgspec.json.encode(found), type=DeployPlan) == found


def test_a_plan_reads_well() -> None:
    text = edited(("chunk_size: 1000", "chunk_size: 500"), ("name: apart", "name: aside"))
    assert (
        render(plan(text))
        == """\
DAG base
    src: unchanged
  ! split: replaced
      because config.chunk_size: 1000 -> 500
      output 0 chunks (chunks): new version
  + aside: added
      output 0 output_0: new version
  ! use: replaced
      because input 0: split is replaced
      output 0 output_0: new version
      output 1 output_1: new version
  - apart: removed
      output 0 output_0: retired version
DAG reader (downstream)
    sunk: unchanged
  ! far: replaced
      because input 0: base/split is replaced
      output 0 output_0: new version
  ! farther: replaced
      because input 0: far is replaced
      output 0 output_0 (loop): new version
Published names
    chunks: unchanged
    events: unchanged
"""
    )


def test_per_partition_on_another_dags_cursors_is_refused() -> None:
    hot = edited(
        ("outputs: 2", "outputs: [{storage: postgres}, {}]"),
        ("publish:\n", "publish:\n  hot: {from: {job: use, output: 0}}\n"),
    )
    text = """\
name: each
jobs:
  - name: cold
    activation: reactive
    runtime: ecs_python
    operator: own
    execution_strategy: PerPartition
    inputs: [{from: {dataset: hot}}]
"""
    with pytest.raises(InvalidDag) as invalid:
        plan_deploy(spec(text), {"base": spec(hot)}, locator(text))
    assert [(problem.line, problem.field) for problem in invalid.value.problems] == [
        (7, "jobs[0].execution_strategy")
    ]
