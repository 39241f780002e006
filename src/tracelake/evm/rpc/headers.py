"""Blocks without their transactions: the newest one, those that have a name, and any one by its number or hash.

Endpoints differ about these more than about anything else, since none is as far as the next. So all of them are
asked at once, and what they say is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracelake.evm.rpc.errors import RpcRefused, RpcUnavailable
from tracelake.evm.rpc.exchange import Call, Outcome
from tracelake.evm.rpc.problem import Kind, Problem
from tracelake.evm.rpc.quantity import read_quantity
from tracelake.evm.rpc.survey import Survey

if TYPE_CHECKING:
    from tracelake.evm.rpc.pool import Pool

Header = dict[str, Any]

_BY_NUMBER = "eth_getBlockByNumber"
_BY_HASH = "eth_getBlockByHash"
_LATEST: Call = (_BY_NUMBER, ("latest", False))
_ROUNDS = 3
_ROUND_SECONDS = 0.2
_NO_HEAD = Problem(Kind.GARBLED, "its newest block is none")


@dataclass(frozen=True, slots=True)
class Head:
    """The newest block that an endpoint has; ``endpoint`` is the one that said so."""

    number: int
    hash: str
    endpoint: str


class Headers:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._survey = Survey(pool.roster)

    def newest(self, *, patient: bool) -> Head:
        best: Head | None = None
        for endpoint, outcome in self._survey.ask(_LATEST, patient=patient):
            if (found := _head(outcome, endpoint.name)) is None:
                continue
            endpoint.health.head = found.number
            if best is None or found.number > best.number:
                best = found
        return best or self._newest_of_anyone()

    def tagged(self, tag: str) -> int | None:
        """``safe`` or ``finalized``."""
        call: Call = (_BY_NUMBER, (tag, False))
        answers = self._survey.ask(call, patient=False)
        heads = [head.number for each, outcome in answers if (head := _head(outcome, each.name)) is not None]
        if heads:
            return max(heads)
        if any(_is_none(outcome) or _is_refusal(outcome) for _, outcome in answers):
            return None
        try:
            found = _head(self._pool.call(*call), "")
        except RpcRefused:
            return None
        return None if found is None else found.number

    def one(self, which: int | str) -> Header | None:
        call: Call = (
            (_BY_HASH, (which, False)) if isinstance(which, str) else (_BY_NUMBER, (hex(which), False))
        )
        try:
            if isinstance(first := self._pool.call(*call), dict):
                return first
        except RpcUnavailable:
            # Some say by an error that there is no such block: that isn't less of an answer.
            pass
        for left in range(_ROUNDS, 0, -1):
            answers = [outcome for _, outcome in self._survey.ask(call, patient=True)]
            if (found := next((each for each in answers if isinstance(each, dict)), None)) is not None:
                return found
            denied = sum(_is_none(each) for each in answers)
            if denied and (denied == len(answers) or left == 1):
                return None
            self._pool.roster.pause(_ROUND_SECONDS)
        raise self._pool.nobody_answers(f"block {which}")

    def by_endpoint(self, number: int) -> dict[str, Header | None]:
        answers = self._survey.ask((_BY_NUMBER, (hex(number), False)), patient=True)
        found = {
            each.name: outcome if isinstance(outcome, dict) else None
            for each, outcome in answers
            if isinstance(outcome, dict) or _is_none(outcome)
        }
        if not found:
            raise self._pool.nobody_answers(f"block {number}")
        return found

    def _newest_of_anyone(self) -> Head:
        """None of those at hand had an answer: ask on until the deadline."""
        roster, question = self._pool.roster, self._pool.question("the newest block")
        while True:
            with roster.ask(question, 1) as endpoint:
                try:
                    outcomes, _ = roster.exchange(endpoint, [_LATEST], question, "single")
                    if (found := _head(outcomes[0], endpoint.name)) is not None:
                        endpoint.health.head = found.number
                        return found
                    problem = outcomes[0] if isinstance(outcomes[0], Problem) else _NO_HEAD
                except Problem as raised:
                    problem = raised
            question.failed(endpoint, problem)


def _head(outcome: Outcome, endpoint: str) -> Head | None:
    if not isinstance(outcome, dict):
        return None
    number, own_hash = read_quantity(outcome.get("number")), outcome.get("hash")
    if number is None or not isinstance(own_hash, str):
        return None
    return Head(number, own_hash, endpoint)


def _is_none(outcome: Outcome) -> bool:
    """There is no such block, said by ``null`` or by an error."""
    return outcome is None or (isinstance(outcome, Problem) and outcome.kind is Kind.MISSING)


def _is_refusal(outcome: Outcome) -> bool:
    return isinstance(outcome, Problem) and outcome.kind is Kind.REFUSED
