"""The generated pages: up to date, complete, and with examples that a deploy accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from scripts.reference import PAGES
from scripts.reference.operators_page import example_dag
from scripts.reference.yaml_page import example_of, example_text, fields
from tracelake.dispatcher.runtimes import RuntimeRegistry
from tracelake.domain.bundles import BundleListing
from tracelake.domain.dag.checks import Installation
from tracelake.domain.dag.entries import JOB_FIELDS, PUBLISH_FIELDS
from tracelake.domain.dag.parse import parse_dag
from tracelake.domain.dag.schema import json_schema
from tracelake.domain.operators import sql_transform
from tracelake.domain.operators.catalog import CATALOG, config_problems

DOCS = Path(__file__).parents[2] / "docs"
BUNDLE = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
INSTALLATION = Installation(
    runtimes=RuntimeRegistry().traits(),
    published_elsewhere={"logs": "chain"},
    bundles={BUNDLE: BundleListing(("main.py",), frozenset(), 100)},
)


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run: python -m scripts.reference"


def test_every_endpoint_is_described_by_a_whole_sentence() -> None:
    rows = [line.split(" | ") for line in (DOCS / "http.md").read_text(encoding="utf-8").splitlines()]
    described = {row[0]: row[1] for row in rows if row[0].startswith(("| `GET ", "| `POST "))}
    assert len(described) > 50
    assert {name for name, sentence in described.items() if not sentence.endswith(".")} == set()


def test_the_example_has_every_field_and_a_deploy_accepts_it() -> None:
    example: Any = yaml.safe_load(example_text())
    parse_dag(example_text(), INSTALLATION)
    jsonschema_rs.validator_for(json_schema()).validate(example)
    shown = [field for field in fields(json_schema()) if not field.path.startswith("defaults.")]
    assert [field.path for field in shown if example_of(field, example) is None] == []


def test_the_page_of_the_file_names_every_field_that_the_parser_knows() -> None:
    found = {field.path for field in fields(json_schema())}
    assert {f"jobs[].{name}" for name in JOB_FIELDS} <= found
    assert {f"publish.NAME.{name}" for name in PUBLISH_FIELDS} <= found


def test_every_operator_and_every_setting_has_words() -> None:
    for name, spec in CATALOG.items():
        assert all((spec.about, spec.reads, spec.writes, spec.runtimes)), name
        assert [field.name for field in spec.settings if not field.setting.about] == [], name
    assert CATALOG["sql_transform"].keys == {
        "sql",
        *sql_transform.FILE_SETTINGS,
        *sql_transform.TABLE_SETTINGS,
    }


def test_a_deploy_accepts_the_example_of_every_operator_on_its_runtimes() -> None:
    runtimes = RuntimeRegistry()
    dag = parse_dag(example_dag(), INSTALLATION)
    assert {job.operator for job in dag.jobs} == set(CATALOG) - {"buffer_sink", "delivery"}
    for job in dag.jobs:
        assert job.runtime in CATALOG[job.operator].runtimes
        assert list(config_problems(job.operator, job.config)) == []
    for spec in CATALOG.values():
        assert all(runtimes.get(runtime) is not None for runtime in spec.runtimes)
