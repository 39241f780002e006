"""What takes one of a few values lists them when it gets another one; that is wrong use, with exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, get_args

import pytest
import typer
from typer.testing import CliRunner

from tracelake.cli.main import app


def _choices() -> Iterator[tuple[tuple[str, ...], str, type[Enum]]]:
    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str, type[Enum]]]:
        for parameter in command.params:
            annotation = parameter.type_descriptor.annotation
            for kind in (annotation, *get_args(annotation)):
                if isinstance(kind, type) and issubclass(kind, Enum):
                    is_option = parameter.param_type_name == "option"
                    yield path, parameter.opts[0] if is_option else "", kind
        for name, child in getattr(command, "commands", {}).items():
            yield from walk(child, (*path, name))

    return walk(typer.main.get_command(app), ())


CHOICES = list(_choices())


def test_the_walk_finds_the_options() -> None:
    found = {(" ".join(path), option) for path, option, _ in CHOICES}
    assert {("tasks", "--status"), ("deliveries show", "--state"), ("database rotate", "")} <= found


@pytest.mark.parametrize(
    ("path", "option", "kind"), CHOICES, ids=[f"{' '.join(path)} {option}" for path, option, _ in CHOICES]
)
def test_another_value_is_refused_with_those_that_there_are(
    path: tuple[str, ...], option: str, kind: type[Enum]
) -> None:
    given = [option, "nonsense"] if option else ["nonsense"]
    done = CliRunner().invoke(app, [*path, *given], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "Invalid value for " in done.stderr
    assert (
        f"{option}': 'nonsense' is not one of" in done.stderr if option else "Value error" not in done.stderr
    )
    for each in kind:
        assert repr(str(each.value).lower()) in done.stderr


def test_the_logins_are_those_that_have_a_password() -> None:
    from tracelake.cli.database import Login
    from tracelake.store.installation import PASSWORDS

    assert {f"{each.value}_password" for each in Login} == set(PASSWORDS)


def test_the_states_of_messages_are_those_of_the_api() -> None:
    from tracelake.cli.deliveries import State
    from tracelake.contracts.deliveries import MessageState

    assert {each.value for each in State} == set(get_args(MessageState))
