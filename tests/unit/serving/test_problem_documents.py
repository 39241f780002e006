"""A refusal reads the same on both sides: the class that a server raised is the class that a client raises."""

from __future__ import annotations

import pytest

from tracelake.contracts.problem import encode_problem, problem_of, read_problem
from tracelake.domain.errors import BY_STATUS, DagProblem, InvalidDag, TracelakeError


@pytest.mark.parametrize("kind", BY_STATUS.values(), ids=lambda kind: kind.__name__)
def test_an_error_survives_the_way_from_a_server_to_a_client(kind: type[TracelakeError]) -> None:
    sent = problem_of(kind("SomeReason", "because “it” is so"))
    received = read_problem(encode_problem(sent))
    assert received is not None
    error = received.error(sent.status)
    assert (type(error), error.reason, error.message) == (kind, "SomeReason", "because “it” is so")


def test_the_places_of_a_dag_file_are_sent_along() -> None:
    sent = problem_of(InvalidDag([DagProblem(3, 5, "jobs.a", "is no job"), DagProblem(4, 1, "x", "unknown")]))
    received = read_problem(encode_problem(sent))
    assert received is not None
    assert received.errors == sent.errors
    assert [(each.line, each.column, each.field) for each in received.errors or ()] == [
        (3, 5, "jobs.a"),
        (4, 1, "x"),
    ]


@pytest.mark.parametrize("error", [RuntimeError("the password is hunter2"), TracelakeError("Odd", "hunter2")])
def test_an_unexpected_error_shows_nothing_of_itself(error: Exception) -> None:
    sent = problem_of(error)
    assert (sent.status, sent.reason) == (500, "Internal")
    assert b"hunter2" not in encode_problem(sent)


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>502</html>", b"[]", b'{"detail": "no reason"}', b'{"reason": "\xff"}', b"[" * 100_000],
)
def test_an_answer_of_another_program_is_no_problem_document(body: bytes) -> None:
    assert read_problem(body) is None
