"""A route's declaration: what the framework needs to serve it and the OpenAPI document to describe it.

Both are made from the same declaration, so the document can't describe another API than the one served.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from litestar.handlers import HTTPRouteHandler

from tracelake.serving.answer import Answer
from tracelake.serving.identity import IDENTITY, Identity

OPERATION = "operation"
Handler = Callable[..., Awaitable[Answer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """``answers`` by status; a type is JSON of that type, a text its media type, a tuple one of these. ``body``
    likewise.

    ``refusals`` are the statuses that follow from what the route does; those that follow from its shape
    (no credential, a malformed body) are known without saying. ``seconds`` is for calls that move a whole file:
    how long they may take instead of what the surface allows.
    """

    identity: Identity
    answers: dict[int, Any]
    body: Any = None
    body_required: bool = True
    query: type | None = None
    refusals: tuple[int, ...] = ()
    seconds: float | None = None


def endpoint(
    method: Literal["GET", "POST"], path: str, operation: Operation
) -> Callable[[Handler], HTTPRouteHandler]:
    def register(handler: Handler) -> HTTPRouteHandler:
        return HTTPRouteHandler(
            path,
            http_method=method,
            status_code=min(operation.answers),
            opt={IDENTITY: operation.identity, OPERATION: operation},
        )(handler)

    return register
