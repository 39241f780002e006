"""Every number that people type has a lowest and a highest value: what is beyond them is refused by name."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Union, get_args, get_origin

import pytest
import typer

from tracelake.cli.main import app
from tracelake.dispatcher import settings as dispatcher_settings
from tracelake.domain.dag.schema import json_schema
from tracelake.query import settings as query_settings

UNBOUNDED = {
    "state_connections": "no setting from outside: the Dispatcher's own pool",
    "user_port": "an option with bounds",
    "internal_port": "an option with bounds",
}


def _parameters() -> Iterator[tuple[str, Any]]:
    def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
        for parameter in command.params:
            yield f"{path} {parameter.opts[0]}", parameter
        for name, child in getattr(command, "commands", {}).items():
            yield from walk(child, f"{path} {name}")

    return walk(typer.main.get_command(app), "tracelake")


def _kinds(annotation: Any) -> set[Any]:
    if get_origin(annotation) in (Union, types.UnionType, list, tuple):
        return set().union(*map(_kinds, get_args(annotation)))
    return {annotation}


def _numeric() -> list[tuple[str, Any]]:
    return [
        (name, parameter)
        for name, parameter in _parameters()
        if _kinds(parameter.type_descriptor.annotation) & {int, float}
    ]


def test_the_walk_finds_the_options() -> None:
    names = {name for name, _ in _numeric()}
    assert {"tracelake devchain --blocks", "tracelake tasks --limit", "tracelake backfill --from"} <= names


@pytest.mark.parametrize(("name", "parameter"), _numeric(), ids=[name for name, _ in _numeric()])
def test_every_numeric_option_has_bounds(name: str, parameter: Any) -> None:
    assert parameter.min is not None, f"{name} has no lowest value"
    assert parameter.max is not None, f"{name} has no highest value"


def _numbers(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        kinds = node.get("type", ())
        kinds = {kinds} if isinstance(kinds, str) else set(kinds)
        if kinds & {"integer", "number"}:
            yield path, node
        for key, child in node.items():
            yield from _numbers(child, f"{path}/{key}")
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _numbers(child, f"{path}/{index}")


def test_every_number_of_a_dag_file_has_bounds() -> None:
    found = list(_numbers(json_schema()))
    assert len(found) > 10
    assert [path for path, node in found if "minimum" not in node or "maximum" not in node] == []


@pytest.mark.parametrize(
    ("settings", "bounded"),
    [
        (dispatcher_settings.DispatcherSettings, set(dispatcher_settings._BOUNDS)),
        (query_settings.QueryLimits, set(query_settings._BOUNDS)),
    ],
)
def test_every_numeric_setting_of_the_environment_has_bounds(settings: type[Any], bounded: set[str]) -> None:
    numbers = {each.name for each in fields(settings) if each.type in ("int", "float")}
    assert numbers - bounded - UNBOUNDED.keys() == set()
