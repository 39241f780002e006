"""Values within values: what is nested too deeply is the sender's fault, and never ends a request with 500."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tracelake.contracts.problem import InvalidRequest, problem_of
from tracelake.domain.errors import Invalid
from tracelake.operators.context import _plain
from tracelake.serving.request import decode_body

LEVELS = (100, 480, 700)


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("levels", LEVELS)
def test_a_nul_is_found_however_deep_it_lies(levels: int) -> None:
    body = b'{"a": ' + b"[" * levels + rb'"\u0000"' + b"]" * levels + b"}"
    with pytest.raises(InvalidRequest, match="contains a NUL character"):
        decode_body(msgspec.json.Decoder(dict[str, Any]), body)


def test_a_request_that_goes_too_deep_is_refused_and_not_a_failure_inside() -> None:
    problem = problem_of(RecursionError())
    assert (problem.status, problem.reason) == (422, "TooDeep")


def test_a_record_that_goes_too_deep_is_refused_by_its_number() -> None:
    with pytest.raises(Invalid, match="record 3 can't be sent as JSON"):
        _plain({"a": nested(5000)}, 3)
