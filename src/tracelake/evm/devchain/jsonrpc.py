"""JSON-RPC 2.0 from bytes to bytes: single calls, batches, notifications and the errors of the standard.

Results come as JSON that is encoded already, so that a server of blocks never encodes the same block twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import orjson
import structlog

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
SERVER_ERROR = -32000

MOST_CALLS = 1_000
MOST_ANSWER_BYTES = 64 * 1024 * 1024
"""Of a batch."""
NULL = b"null"
_log = structlog.get_logger()
_HEAD = b'{"jsonrpc":"2.0","id":'
_RESULT = b',"result":'

Json: TypeAlias = bytes | memoryview


class RpcError(Exception):
    """An answer that is an error, with one of the standard's codes."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as far as the connection tells."""

    loopback: bool


class Methods(Protocol):
    """What a server can be asked for."""

    def call(self, method: str, params: list[Any], caller: Caller) -> Json:
        """The result as JSON; RpcError is the answer otherwise."""


def respond(body: bytes, methods: Methods, caller: Caller) -> list[Json]:
    """The response to a request's body, in parts; none when there is nothing to say, as to a notification."""
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError:
        return _error(NULL, RpcError(PARSE_ERROR, "parse error"))
    if not isinstance(request, list):
        return _one(request, methods, caller)
    if not request:
        return _error(NULL, RpcError(INVALID_REQUEST, "empty batch"))
    if len(request) > MOST_CALLS:
        return _error(NULL, RpcError(SERVER_ERROR, f"a batch has at most {MOST_CALLS} calls"))
    parts: list[Json] = []
    size = 0
    for each in request:
        if answer := _one(each, methods, caller):
            parts.append(b"," if parts else b"[")
            parts += answer
            size += sum(map(len, answer))
            if size > MOST_ANSWER_BYTES:
                return _error(
                    NULL, RpcError(SERVER_ERROR, f"the answer is larger than {MOST_ANSWER_BYTES} bytes")
                )
    if parts:
        parts.append(b"]")
    return parts


def _one(request: Any, methods: Methods, caller: Caller) -> list[Json]:
    if not isinstance(request, dict) or not isinstance(request.get("method"), str):
        return _error(NULL, RpcError(INVALID_REQUEST, "invalid request"))
    params = request.get("params")
    number = _id(request)
    answer: list[Json]
    try:
        if params is None:
            params = []
        elif not isinstance(params, list):
            raise RpcError(INVALID_PARAMS, "params must be an array")
        answer = [_HEAD, number, _RESULT, methods.call(request["method"], params, caller), b"}"]
    except RpcError as error:
        answer = _error(number, error)
    except Exception:
        _log.exception("a call failed", method=request["method"])
        answer = _error(number, RpcError(INTERNAL_ERROR, "internal error"))
    return answer if "id" in request else []


def _id(request: dict[str, Any]) -> bytes:
    given = request.get("id")
    return b"%d" % given if type(given) is int else orjson.dumps(given)


def _error(number: bytes, error: RpcError) -> list[Json]:
    said = orjson.dumps({"code": error.code, "message": error.message})
    return [_HEAD, number, b',"error":', said, b"}"]
