"""The JSON Schema for editors: up to date, complete, and of one mind with the parser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tracelake.domain.dag.checks import Installation
from tracelake.domain.dag.entries import BUFFERED_FIELDS, JOB_FIELDS
from tracelake.domain.dag.parse import DEFAULTS_FIELDS, TOP_FIELDS, parse_dag
from tracelake.domain.dag.problems import plain
from tracelake.domain.dag.schema import json_schema, schema_text
from tracelake.domain.dag.yaml_tree import read_tree
from tracelake.domain.errors import InvalidDag
from tracelake.domain.runtimes import RuntimeTraits

PUBLISHED_COPY = Path(__file__).parents[3] / "docs" / "dag.schema.json"
INSTALLATION = Installation(runtimes={"ecs_python": RuntimeTraits(untrusted_ok=True)})

FILE = """\
name: dag
defaults: {runtime: ecs_python, retry: {base: 30s, max: 10m}, max_attempts: 3}
jobs:
  - {name: src, activation: source, source: {kind: manual}, outputs: 1}
  - name: mid
    activation: reactive
    operator: own
    inputs:
      - {from: {job: src, output: 0}, where: "a = 1"}
      - {from: {dataset: events}, trigger: false, where: {a: [1, 2]}}
    outputs: [{name: rows, storage: parquet}, {}]
    update_strategy: append
    unique_key: [a, b]
    execution_strategy: PerUpdate
    scaling: {max_concurrency: 4}
    max_queue_age: 600
    secrets: KEY
    config: {anything: {goes: [here]}}
  - name: fn
    activation: reactive
    udf: {bundle: b, entrypoint: e}
    inputs: [{from: {dataset: rows}}]
publish:
  rows: {from: {job: mid, output: 0}}
  events:
    {storage: postgres, write_mode: buffered, schema: {columns: {id: text, at: timestamptz}, unique: [id]}}
"""


def data(text: str) -> Any:
    return plain(read_tree(text)[0])


def test_the_published_copy_is_up_to_date() -> None:
    assert PUBLISHED_COPY.read_text() == schema_text(), (
        "write tracelake.domain.dag.schema.schema_text() to docs/dag.schema.json"
    )


def test_the_schema_is_a_schema() -> None:
    jsonschema_rs.meta.validate(json_schema())


def test_the_schema_knows_every_field_that_the_parser_knows() -> None:
    schema = json_schema()
    properties = schema["properties"]
    assert set(properties) == TOP_FIELDS
    assert set(properties["defaults"]["properties"]) == DEFAULTS_FIELDS
    assert set(properties["jobs"]["items"]["properties"]) == JOB_FIELDS
    buffered = properties["publish"]["additionalProperties"]["oneOf"][1]
    assert set(buffered["properties"]) == BUFFERED_FIELDS


def test_every_field_is_described() -> None:
    jobs = json_schema()["properties"]["jobs"]["items"]["properties"]
    assert [name for name, field in jobs.items() if not field.get("description")] == []


def test_a_file_that_parses_is_valid() -> None:
    parse_dag(FILE, INSTALLATION)
    jsonschema_rs.validator_for(json_schema()).validate(data(FILE))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("name: dag", "name: Dag"),
        ("name: dag", "nmae: dag"),
        ("activation: source", "activation: sauce"),
        ("kind: manual", "kind: sometimes"),
        ("max: 10m", "max: ten"),
        ("max_attempts: 3", "max_attempts: 0"),
        ("outputs: 1", "outputs: -1"),
        ("storage: parquet", "storage: csv"),
        ("trigger: false", "trigger: maybe"),
        ("max_concurrency: 4", "max_concurrency: 0"),
        ("secrets: KEY", "secrets: [KEY, KEY]"),
        ("entrypoint: e", "entry: e"),
        ("rows: {from", "Rows: {from"),
        ("id: text", "id: varchar"),
        ("{from: {dataset: rows}}", "{from: {}}"),
        ("write_mode: buffered, ", ""),
    ],
)
def test_what_the_schema_refuses_the_parser_refuses(old: str, new: str) -> None:
    assert len(re.findall(re.escape(old), FILE)) == 1
    wrong = FILE.replace(old, new)
    assert not jsonschema_rs.validator_for(json_schema()).is_valid(data(wrong))
    with pytest.raises(InvalidDag):
        parse_dag(wrong, INSTALLATION)
