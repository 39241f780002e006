"""How people name a task: by its id, or by the beginning of it, as long as that means one task."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from tracelake.domain.errors import Invalid, NotFound

if TYPE_CHECKING:
    from tracelake.client import Client

MIN_PREFIX = 6
_NEWEST = 1000
_ID = re.compile(rf"[0-9a-fA-F-]{{{MIN_PREFIX},36}}")
_WHERE = "ids are in `tracelake tasks`"


def may_be_task(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def whole_id(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _checked(text: str) -> str:
    if whole_id(text) is None and not may_be_task(text):
        raise typer.BadParameter(
            f"{text!r} isn't a task's id, nor {MIN_PREFIX} or more characters of its beginning: {_WHERE}"
        )
    return text


TaskArgument = Annotated[
    str,
    typer.Argument(
        metavar="TASK",
        callback=_checked,
        help=f"The task's id, or its first characters, {MIN_PREFIX} at least.",
    ),
]


def find_task(client: Client, text: str) -> UUID:
    """The task that an id means, or the beginning of the id of a recent one."""
    if (whole := whole_id(text)) is not None:
        return whole
    found = recent_tasks(client, text)
    if not found:
        raise NotFound(
            "UnknownTask",
            f"none of the newest {_NEWEST:,} tasks has an id that begins with {text!r}: {_WHERE}",
        )
    return the_one(text, found)


def recent_tasks(client: Client, beginning: str) -> list[UUID]:
    given = beginning.lower()
    tasks = client.tasks(limit=_NEWEST).tasks
    return [each.task_id for each in tasks if str(each.task_id).startswith(given)]


def the_one(text: str, found: Sequence[UUID]) -> UUID:
    """Raises when the beginning of an id may mean several."""
    if len(found) > 1:
        some = ", ".join(sorted(map(str, found))[:5])
        raise Invalid("AmbiguousTask", f"{text!r} may be any of {len(found)} tasks: {some}")
    return found[0]
