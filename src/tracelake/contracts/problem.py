"""Problem details (RFC 9457): every server refuses requests with them, and clients read them.

The status comes from the error's class, and ``reason`` is the word that clients switch on. A message is shown only
when the platform wrote it on purpose: of an unexpected exception the caller learns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from tracelake.domain.buffers import BadRecords, RecordProblem
from tracelake.domain.errors import Invalid, InvalidDag, TracelakeError, Unavailable, error_of

PROBLEM_JSON = "application/problem+json"


class FieldProblem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A mistake in one field; ``line`` and ``column`` are there when the request was a file."""

    field: str
    message: str
    line: int | None = None
    column: int | None = None


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A refused request. ``reason`` is stable, ``detail`` is for people and may change."""

    type: str
    title: str
    status: int
    detail: str
    reason: str
    errors: list[FieldProblem] | None = None


class InvalidRequest(Invalid):
    """A request whose shape is wrong, field by field."""

    def __init__(self, errors: Sequence[FieldProblem]) -> None:
        first = errors[0]
        super().__init__("InvalidRequest", f"{first.field or 'the request'}: {first.message}")
        self.errors = list(errors)


encode_problem = msgspec.json.Encoder().encode


def problem(status: int, reason: str, detail: str, errors: list[FieldProblem] | None = None) -> Problem:
    title = HTTPStatus(status).phrase
    return Problem(f"urn:tracelake:problem:{reason}", title, status, detail, reason, errors)


def problem_of(error: Exception) -> Problem:
    match error:
        case InvalidDag():
            places = [FieldProblem(p.field, p.message, p.line, p.column) for p in error.problems]
            return problem(error.status, error.reason, error.message, places)
        case InvalidRequest():
            return problem(error.status, error.reason, error.message, error.errors)
        case BadRecords():
            found = [FieldProblem(_record_field(each), each.message) for each in error.problems]
            return problem(error.status, error.reason, error.message, found)
        case RecursionError():
            # Only the request decides how deep its parser recurses, so it is the caller's mistake.
            return problem(Invalid.status, "TooDeep", "the request is nested too deeply")
        # Messages of other 5xx were not written for callers and may contain internal details.
        case TracelakeError() if error.status < TracelakeError.status or error.status == Unavailable.status:
            return problem(error.status, error.reason, error.message)
        case _:
            return problem(TracelakeError.status, "Internal", "internal error; see the server log")


def _record_field(found: RecordProblem) -> str:
    place = "records" if found.record is None else f"records[{found.record}]"
    return place if found.field is None else f"{place}.{found.field}"


class ReceivedProblem(msgspec.Struct, frozen=True):
    """A problem as a client reads it: the fields that it uses, of which only ``reason`` has to be there."""

    reason: str
    detail: str = ""
    errors: list[FieldProblem] | None = None

    def error(self, status: int) -> TracelakeError:
        """The error that a server's answer with this status and this problem stands for."""
        return error_of(status, self.reason, self.detail)


_decoder = msgspec.json.Decoder(ReceivedProblem)


def read_problem(body: bytes) -> ReceivedProblem | None:
    """None if the body is none: a proxy, another program or a server that crashed answers without a problem."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
