"""The one error tree.

    TracelakeError
    ├── Unauthenticated     401  no valid credential
    ├── Forbidden           403  a valid credential without permission for this
    ├── NotFound            404
    ├── MethodNotAllowed    405  the path is served, but not for this method
    ├── RequestTimeout      408  the request didn't arrive in time
    ├── Conflict            409  a lost race or a stale fence; the caller's view is out of date
    ├── TooLarge            413
    ├── OverQuota           429  the caller has reached its quota, or there is no free slot
    │   └── RateLimited     429  with Retry-After
    ├── HeadTooLarge        431
    ├── Invalid             422  a well-formed request that can't be fulfilled
    │   └── InvalidDag      422  with one entry per problem, each with line and field
    ├── BadRequest          400  not even well-formed
    └── Unavailable         503  try again later

``reason`` is a stable machine word that clients may switch on; the message is for people and may
change. Each class names its HTTP status here and nowhere else: servers answer with it, and clients
turn it back into the class by ``error_of``. Problem documents are in ``contracts.problem``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


class TracelakeError(Exception):
    """Base of every error that the platform raises on purpose."""

    status: int = 500

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Unauthenticated(TracelakeError):
    """No valid credential."""

    status = 401


class Forbidden(TracelakeError):
    """A valid credential without permission for this."""

    status = 403


class NotFound(TracelakeError):
    """The requested thing doesn't exist."""

    status = 404


class MethodNotAllowed(TracelakeError):
    """The path is served, but not for this method."""

    status = 405

    def __init__(self, reason: str, message: str, allowed: Iterable[str] = ()) -> None:
        super().__init__(reason, message)
        self.allowed = ", ".join(sorted(allowed))


class RequestTimeout(TracelakeError):
    """The request didn't arrive in time."""

    status = 408


class Conflict(TracelakeError):
    """A lost race or a stale fence."""

    status = 409


class TooLarge(TracelakeError):
    """The body is too large."""

    status = 413


class OverQuota(TracelakeError):
    """The caller has reached its quota."""

    status = 429


class RateLimited(OverQuota):
    """Too many calls for now; ``retry_after`` is in seconds."""

    def __init__(self, reason: str, message: str, retry_after: float = 1.0) -> None:
        super().__init__(reason, message)
        self.retry_after = retry_after


class HeadTooLarge(TracelakeError):
    """The head of the request is too large."""

    status = 431


class Invalid(TracelakeError):
    """Well-formed, but can't be fulfilled."""

    status = 422


class BadRequest(TracelakeError):
    """Not well-formed."""

    status = 400


class Unavailable(TracelakeError):
    """Try again later."""

    status = 503


BY_STATUS: Mapping[int, type[TracelakeError]] = {
    kind.status: kind
    for kind in (
        BadRequest,
        Unauthenticated,
        Forbidden,
        NotFound,
        MethodNotAllowed,
        RequestTimeout,
        Conflict,
        TooLarge,
        Invalid,
        OverQuota,
        HeadTooLarge,
        Unavailable,
    )
}


def error_of(status: int, reason: str, message: str) -> TracelakeError:
    """The error for a server's answer; the base class for a status that no class has."""
    return BY_STATUS.get(status, TracelakeError)(reason, message)


@dataclass(frozen=True, slots=True)
class DagProblem:
    """One problem of a DAG file, with its line and column (counted from 1) and its field."""

    line: int
    column: int
    field: str
    message: str


class InvalidDag(Invalid):
    """A DAG file can't be deployed; the error carries all problems, not just the first."""

    def __init__(self, problems: Sequence[DagProblem]) -> None:
        first = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        place = f"line {first.line}, column {first.column}, {first.field}"
        super().__init__("InvalidDag", f"{place}: {first.message}{more}")
        self.problems = tuple(problems)
