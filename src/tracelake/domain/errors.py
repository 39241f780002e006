"""The one error tree.

    TracelakeError
    ├── Unauthenticated     401  no credential, or one that proves nothing
    ├── Forbidden           403  a valid credential for something it may not touch
    ├── NotFound            404
    ├── Conflict            409  a lost race or a stale fence; the caller's view is out of date
    ├── TooLarge            413
    ├── OverQuota           429  the caller has as much as it may have
    ├── Invalid             422  a well-formed request that asks for something impossible
    │   └── InvalidDag      422  with one entry per problem, each with line and field
    ├── BadRequest          400  not even well-formed
    └── Unavailable         503  try again later

``reason`` is a stable machine word that clients may switch on; the message is for people and may
change. Each class names its HTTP status here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class TracelakeError(Exception):
    """Base of every error that the platform raises on purpose."""

    status: int = 500

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Unauthenticated(TracelakeError):
    status = 401


class Forbidden(TracelakeError):
    status = 403


class NotFound(TracelakeError):
    status = 404


class Conflict(TracelakeError):
    status = 409


class TooLarge(TracelakeError):
    status = 413


class OverQuota(TracelakeError):
    status = 429


class Invalid(TracelakeError):
    status = 422


class BadRequest(TracelakeError):
    status = 400


class Unavailable(TracelakeError):
    status = 503


@dataclass(frozen=True, slots=True)
class DagProblem:
    """One thing wrong with a DAG file, where it stands (counted from 1) and in which field."""

    line: int
    column: int
    field: str
    message: str


class InvalidDag(Invalid):
    """A DAG file that can't be deployed; carries every problem found, not just the first."""

    def __init__(self, problems: Sequence[DagProblem]) -> None:
        first = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        place = f"line {first.line}, column {first.column}, {first.field}"
        super().__init__("InvalidDag", f"{place}: {first.message}{more}")
        self.problems = tuple(problems)
