"""What a pool says when it can't answer.

Unavailable
├── RpcUnavailable      every endpoint failed, or the deadline passed; names each one's last problem
└── BlockNotFound       the block is past what the endpoints have
Invalid
└── RpcRefused          the question itself is refused: asking again won't help
"""

from __future__ import annotations

from collections.abc import Mapping

from tracelake.domain.errors import Invalid, Unavailable


class RpcUnavailable(Unavailable):
    def __init__(self, what: str, problems: Mapping[str, str]) -> None:
        said = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        super().__init__("RpcUnavailable", f"no endpoint answered {what}: {said or 'none was asked'}")
        self.what, self.problems = what, dict(problems)

    def __reduce__(self) -> tuple[type[RpcUnavailable], tuple[str, dict[str, str]]]:
        return type(self), (self.what, self.problems)


class BlockNotFound(Unavailable):
    def __init__(self, number: int, said: str) -> None:
        super().__init__("BlockNotFound", f"block {number} isn't there: {said}")
        self.number, self.said = number, said

    def __reduce__(self) -> tuple[type[BlockNotFound], tuple[int, str]]:
        return type(self), (self.number, self.said)


class RpcRefused(Invalid):
    """``code`` is the node's own, as in JSON-RPC."""

    def __init__(self, method: str, endpoint: str, code: int, message: str) -> None:
        super().__init__("RpcRefused", f"{method}: refused by {endpoint}: {message}")
        self.method, self.endpoint, self.code, self.said = method, endpoint, code, message

    def __reduce__(self) -> tuple[type[RpcRefused], tuple[str, str, int, str]]:
        return type(self), (self.method, self.endpoint, self.code, self.said)
