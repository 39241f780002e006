"""A fingerprint changes with what a job produces, and with nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tracelake.domain.dag.model import (
    Activation,
    BackpressureMode,
    BufferedDataset,
    Column,
    ColumnType,
    DagSpec,
    DatasetName,
    ExecutionStrategy,
    InputSpec,
    JobOutput,
    JobSettings,
    JobSpec,
    OutputSpec,
    Priority,
    PublishedOutput,
    SourceKind,
    Storage,
    UdfSpec,
    UpdateStrategy,
)
from tracelake.domain.dag.plan import fingerprints
from tracelake.domain.where_parse import parse_where

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The machine may be busy; how long an example takes proves nothing."""


def job(name: str, *inputs: InputSpec, **fields: Any) -> JobSpec:
    spec = JobSpec(
        name=name,
        activation=Activation.REACTIVE if inputs else Activation.SOURCE,
        runtime="ecs_python",
        operator="own",
        source_kind=None if inputs else SourceKind.ALWAYS_ON,
        inputs=inputs,
        outputs=(OutputSpec(0, "rows", Storage.PARQUET),),
        execution_strategy=ExecutionStrategy.PER_UPDATE if inputs else None,
        config={"size": 1000},
    )
    return msgspec.structs.replace(spec, **fields)


def reads(name: str, output: int = 0) -> InputSpec:
    return InputSpec(JobOutput(name, output))


CHAIN = DagSpec(
    "chain",
    (job("top"), job("mid", reads("top")), job("low", reads("mid")), job("side", reads("top"))),
    (PublishedOutput("mids", "mid", 0), BufferedDataset("buffer", (Column("a", ColumnType.TEXT),), ("a",))),
)
OTHER = DagSpec(
    "other",
    (job("far", InputSpec(DatasetName("mids"))), job("sunk", InputSpec(DatasetName("buffer")))),
)
WORLD = {"chain": CHAIN, "other": OTHER}


def changed(edit: Callable[[JobSpec], JobSpec], name: str = "mid") -> set[str]:
    """The jobs whose fingerprint differs after an edit of one job."""
    jobs = tuple(edit(spec) if spec.name == name else spec for spec in CHAIN.jobs)
    before = fingerprints(WORLD)
    after = fingerprints({**WORLD, "chain": msgspec.structs.replace(CHAIN, jobs=jobs)})
    return {key[1] for key in before if before[key] != after[key]}


def set_to(**fields: Any) -> Callable[[JobSpec], JobSpec]:
    return lambda spec: msgspec.structs.replace(spec, **fields)


@pytest.mark.parametrize(
    "edit",
    [
        set_to(operator="another"),
        set_to(config={"size": 500}),
        set_to(config={"size": "1000"}),
        set_to(inputs=(InputSpec(JobOutput("top", 0), trigger=False),)),
        set_to(inputs=(InputSpec(JobOutput("top", 0), where=parse_where("a = 1")),)),
        set_to(inputs=(reads("top"), reads("top"))),
        set_to(outputs=(OutputSpec(0, "other_name", Storage.PARQUET),)),
        set_to(outputs=(OutputSpec(0, "rows", Storage.POSTGRES),)),
        set_to(execution_strategy=ExecutionStrategy.PER_PARTITION),
        set_to(update_strategy=UpdateStrategy.APPEND),
        set_to(unique_key=("id",)),
        set_to(udf=UdfSpec("bundle", "entry")),
        set_to(secrets=("KEY",)),
        set_to(activation=Activation.SOURCE),
        set_to(source_kind=SourceKind.MANUAL),
    ],
)
def test_a_change_of_the_product_reaches_everything_downstream(edit: Callable[[JobSpec], JobSpec]) -> None:
    assert changed(edit) == {"mid", "low", "far"}


@pytest.mark.parametrize(
    "settings",
    [
        JobSettings(max_attempts=9),
        JobSettings(timeout_seconds=1),
        JobSettings(heartbeat_timeout_seconds=1),
        JobSettings(priority=Priority.BULK),
        JobSettings(max_concurrency=1),
        JobSettings(max_queue_depth=1, max_queue_age_seconds=1, backpressure=BackpressureMode.PAUSE),
        JobSettings(retry_base_seconds=1, retry_max_seconds=2),
        JobSettings(idle_timeout_seconds=1),
    ],
)
def test_a_change_of_how_a_job_runs_reaches_nothing(settings: JobSettings) -> None:
    assert changed(set_to(settings=settings, runtime="ecs_spark")) == set()


def test_every_setting_is_left_out() -> None:
    assert changed(set_to(settings=JobSettings(*range(1, len(JobSettings.__struct_fields__) + 1)))) == set()


def test_spelling_reaches_nothing() -> None:
    spelled = InputSpec(JobOutput("top", 0), where=parse_where("b = 2 AND NOT a <> 1"))
    same = InputSpec(JobOutput("top", 0), where=parse_where({"a": 1, "b": 2}))
    with_where = {
        "chain": msgspec.structs.replace(CHAIN, jobs=(job("top"), job("mid", spelled))),
        "other": OTHER,
    }
    again = {"chain": msgspec.structs.replace(CHAIN, jobs=(job("top"), job("mid", same))), "other": OTHER}
    assert fingerprints(with_where) == fingerprints(again)


def test_an_output_by_its_job_and_by_its_name_is_the_same_input() -> None:
    assert changed(set_to(inputs=(InputSpec(DatasetName("mids")),)), "low") == set()


def test_another_producer_is_another_input_even_when_it_makes_the_same() -> None:
    assert changed(set_to(inputs=(reads("side"),)), "low") == {"low"}


def test_a_buffered_datasets_new_column_makes_nobody_read_it_again() -> None:
    wider = BufferedDataset("buffer", (Column("a", ColumnType.TEXT), Column("b", ColumnType.TEXT)), ("a",))
    chain = msgspec.structs.replace(CHAIN, publish=(CHAIN.publish[0], wider))
    before, after = fingerprints(WORLD), fingerprints({**WORLD, "chain": chain})
    assert before == after


def test_dags_that_feed_each_other_have_no_fingerprints() -> None:
    ring = DagSpec("ring", (job("a", reads("b")), job("b", reads("a"))))
    with pytest.raises(ValueError, match="cycle"):
        fingerprints({"ring": ring})


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def _as_jsonb_returns_it(value: Any) -> Any:
    """jsonb keeps numbers as decimals: a float without a fraction may come back as an integer."""
    if isinstance(value, dict):
        return {key: _as_jsonb_returns_it(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [_as_jsonb_returns_it(item) for item in value]
    if isinstance(value, float) and "e+" in repr(value):
        return int(repr(value).partition("e")[0].replace(".", "")) * 10 ** (
            int(repr(value).partition("e+")[2]) - len(repr(value).partition("e")[0].partition(".")[2])
        )
    return value


@unhurried
@given(st.dictionaries(st.text(max_size=4), _json, max_size=4))
def test_the_store_does_not_change_a_fingerprint(config: dict[str, Any]) -> None:
    fresh = DagSpec("one", (job("a", config=config),))
    stored = DagSpec("one", (job("a", config=_as_jsonb_returns_it(config)),))
    decoded = msgspec.json.decode(msgspec.json.encode(stored), type=DagSpec)
    assert fingerprints({"one": decoded}) == fingerprints({"one": fresh})
