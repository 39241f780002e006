"""What can be wrong with a block that an endpoint gave: it doesn't add up, or it isn't even well-formed.

Either is that endpoint's fault and says nothing against the chain, so both are errors to be retried, on
another one.
"""

from __future__ import annotations

from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.foreign_text import printable

_LONGEST = 2000
"""Of what is quoted, all endpoints of a pool together."""


class BlockMismatch(Unavailable):
    """The parts of a block contradict each other."""

    def __init__(self, number: int, endpoint: str, what: str) -> None:
        what = printable(what, _LONGEST)
        super().__init__("BlockMismatch", f"block {number} from {endpoint}: {what}")
        self.number, self.endpoint, self.what = number, endpoint, what

    def __reduce__(self) -> tuple[type[BlockMismatch], tuple[int, str, str]]:
        return type(self), (self.number, self.endpoint, self.what)


class BlockMalformed(Unavailable):
    """A field is missing, or isn't what a field of its kind can be."""

    def __init__(self, number: int, endpoint: str, field: str, problem: str) -> None:
        field, problem = printable(field), printable(problem)
        super().__init__("BlockMalformed", f"block {number} from {endpoint}: {field} {problem}")
        self.number, self.endpoint, self.field, self.problem = number, endpoint, field, problem

    def __reduce__(self) -> tuple[type[BlockMalformed], tuple[int, str, str, str]]:
        return type(self), (self.number, self.endpoint, self.field, self.problem)


class UnknownTransactionType(Invalid):
    """A transaction whose encoding isn't known here, so that nothing about it can be proven, whoever is asked."""

    def __init__(self, kind: str) -> None:
        kind = printable(kind)
        super().__init__(
            "UnknownTransactionType",
            f"transaction type {kind} isn't known, so its hashes can't be checked: use verify: bloom here",
        )
        self.kind = kind

    def __reduce__(self) -> tuple[type[UnknownTransactionType], tuple[str]]:
        return type(self), (self.kind,)
