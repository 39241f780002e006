"""Declarations of operators: what they check, complete and refuse, for built-in operators and for others."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Annotated, Any

import jsonschema_rs
import msgspec
import pytest

from tracelake.domain.dag.schema import json_schema
from tracelake.domain.errors import Invalid
from tracelake.domain.operators.catalog import CATALOG
from tracelake.domain.operators.spec import Need, NoSettings, OperatorSpec, Setting
from tracelake.domain.runtimes import ECS_SPARK
from tracelake.operators.registry import declared_name, declared_spec, operator


class DepthSettings(msgspec.Struct, frozen=True, kw_only=True):
    chain: Annotated[str, Setting("The chain.")]
    depth: Annotated[int, msgspec.Meta(ge=1), Setting("Blocks.", must="a number of blocks")] = 10
    label: str | None = None


MINE = OperatorSpec("mine", DepthSettings)


def job(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": "job", "activation": "reactive", "operator": name, "config": dict(config)}


def test_a_config_is_read_with_its_defaults() -> None:
    assert MINE.complete({"chain": "x"}) == {"chain": "x", "depth": 10}
    assert MINE.read({"chain": "x", "label": None}) == DepthSettings(chain="x", depth=10)


def test_a_config_is_refused_with_everything_that_is_wrong_with_it() -> None:
    with pytest.raises(Invalid) as refused:
        MINE.read({"depht": 3, "depth": 0, "label": 1})
    assert refused.value.reason == "InvalidConfig"
    assert refused.value.message == (
        "config: depht: mine has no such setting; config: chain: is required; "
        "config: depth: must be a number of blocks; config: label: Expected `str | null`, got `int`"
    )


def test_a_function_carries_the_declaration_that_it_was_marked_with() -> None:
    @operator("mine", spec=MINE)
    def mine(ctx: Any) -> None: ...

    @operator("plain")
    def plain(ctx: Any) -> None: ...

    assert (declared_spec(mine), declared_spec(plain)) == (MINE, None)


class WrongDefault(msgspec.Struct):
    depth: Annotated[int, msgspec.Meta(ge=1), Setting("Blocks.", must="a number of blocks")] = 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (OperatorSpec("other", NoSettings), "operator 'mine' has the spec of 'other'"),
        (OperatorSpec("mine", dict), "the config of operator 'mine' is no msgspec.Struct"),  # type: ignore[type-var]
        (OperatorSpec("mine", WrongDefault), "the default of depth: must be a number of blocks"),
        ("mine", "the spec of operator 'mine' is no OperatorSpec"),
    ],
)
def test_a_declaration_that_cannot_be_right_is_refused_where_it_stands(spec: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        operator("mine", spec=spec)


@pytest.mark.parametrize("spec", [spec for spec in CATALOG.values() if spec.function is not None])
def test_a_worker_finds_the_function_of_every_declaration(spec: OperatorSpec[Any]) -> None:
    assert spec.function is not None
    module, _, name = spec.function.partition(":")
    assert declared_name(getattr(importlib.import_module(module), name)) == spec.name


@pytest.mark.parametrize("spec", CATALOG.values(), ids=CATALOG)
def test_every_default_is_one_that_its_own_check_accepts(spec: OperatorSpec[Any]) -> None:
    assert [
        field.name for field in spec.settings if field.written_default and field.problem(field.default)
    ] == []


@pytest.mark.parametrize("spec", CATALOG.values(), ids=CATALOG)
def test_needs_go_with_settings_and_runtimes(spec: OperatorSpec[Any]) -> None:
    """A worker opens the pool that the config names, so a deploy refuses a job that needs one and names none."""
    refused = {key for key, message in spec.problems({}) if message.startswith("is required")}
    assert (Need.RPC_POOL in spec.needs) == ("rpc_pool" in spec.keys) == ("rpc_pool" in refused)
    assert (Need.SPARK in spec.needs) == (spec.runtimes == (ECS_SPARK,))


@pytest.mark.parametrize(
    ("name", "config", "valid"),
    [
        ("evm_ingest", {"rpc_pool": "main", "finality": 12, "chain_id": None}, True),
        ("evm_ingest", {"rpc_pool": "main", "finality": "soon"}, False),
        ("evm_ingest", {"rpc_pol": "main"}, False),
        ("block_follower", {"rpc_pool": "main", "chain_id": 1, "poll_seconds": 61}, False),
        ("range_splitter", {}, False),
        ("sql_transform", {"sql": "SELECT 1", "sort_by": ["a"]}, True),
        ("sql_transform", {"sql": "SELECT 1", "sortby": ["a"]}, False),
        ("noop", {"anything": 1}, True),
        ("own", {"anything": 1}, True),
    ],
)
def test_an_editor_knows_the_settings_of_built_in_operators(
    name: str, config: Mapping[str, Any], valid: bool
) -> None:
    schema = jsonschema_rs.validator_for(json_schema())
    assert schema.is_valid({"name": "dag", "jobs": [job(name, config)]}) is valid
    if name in CATALOG and (spec := CATALOG[name]).refuses_unknown:
        refused = [*spec.problems(config), *(set(config) - spec.keys)]
        assert (not refused) is valid
