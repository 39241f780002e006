"""The invoke endpoint, in the shape of AWS Lambda's; for the Dispatcher alone, which shows a worker token.

202: the attempt is ours. 429: no slot. 503: not now. Other 4xx: it can't be run as it was sent, and it wasn't
taken. An attempt that was taken before is answered 202 again and nothing more happens.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Protocol
from urllib.parse import unquote

import msgspec

from tracelake.contracts.bundles import INVOKE_PATH, Invocation, function_of
from tracelake.domain import errors
from tracelake.domain.bundle_entrypoint import REFERENCE
from tracelake.domain.operator_catalog import NOOP
from tracelake.secret import Secret
from tracelake.worker.lambda_.http_server import HttpRequest
from tracelake.worker.sandbox.gateway import GatewayResponse

MAX_EVENT_BYTES = 6 * 1024 * 1024

_BEFORE, _AFTER = INVOKE_PATH.split("{function}")
_decoder = msgspec.json.Decoder(Invocation)


class Taker(Protocol):
    """What an invoker is to its endpoint."""

    def take(self, task: Invocation, event: bytes) -> None: ...


class InvokeEndpoint:
    def __init__(self, invoker: Taker, worker_token: Secret) -> None:
        self._invoker = invoker
        self._token = _digest(worker_token.reveal())

    def admit(self, request: HttpRequest) -> GatewayResponse | None:
        """By the head alone, before a byte of the body is read: None if it may go on."""
        try:
            self._check(request)
        except errors.TracelakeError as error:
            return _problem(error)
        return None

    async def handle(self, request: HttpRequest) -> GatewayResponse:
        try:
            function = self._check(request)
            self._invoker.take(_parse(request.body, function), request.body)
        except errors.TracelakeError as error:
            return _problem(error)
        return GatewayResponse(202)

    def _check(self, request: HttpRequest) -> str:
        presented = request.headers.get("x-trace-worker-token", "")
        if not hmac.compare_digest(_digest(presented), self._token):
            raise errors.Unauthenticated("WorkerTokenInvalid", "the worker token is missing or not ours")
        function = request.path.removeprefix(_BEFORE).removesuffix(_AFTER)
        if request.path != f"{_BEFORE}{function}{_AFTER}" or request.method != "POST":
            raise errors.NotFound("NotFound", "there is nothing here but POST " + INVOKE_PATH)
        if request.headers.get("x-amz-invocation-type") != "Event":
            raise errors.BadRequest("InvalidInvocationType", "X-Amz-Invocation-Type must be Event")
        return unquote(function)


def _parse(body: bytes, function: str) -> Invocation:
    try:
        task = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.BadRequest("InvalidInvocation", f"not an invocation: {error}") from None
    if task.udf is None:
        if task.operator != NOOP:
            raise errors.Invalid(
                "UnknownOperator", f"{task.operator[:200]} is no function, and no udf is given"
            )
    elif not _is_udf(task.udf):
        raise errors.Invalid("InvalidUdf", "udf must be {bundle: 'sha256:…', entrypoint}")
    if function_of(task) != function:
        raise errors.Invalid("WrongFunction", "the path names another function than the payload")
    if task.timeout_seconds < 1 or task.attempt < 1:
        raise errors.Invalid("InvalidInvocation", "timeout_seconds and attempt are at least 1")
    return task


def _is_udf(udf: object) -> bool:
    return (
        isinstance(udf, dict)
        and isinstance(bundle := udf.get("bundle"), str)
        and REFERENCE.match(bundle) is not None
        and isinstance(entrypoint := udf.get("entrypoint"), str)
        and 0 < len(entrypoint) <= 500
        and entrypoint.isprintable()
    )


def _problem(error: errors.TracelakeError) -> GatewayResponse:
    body = {"status": error.status, "reason": error.reason, "detail": error.message}
    return GatewayResponse(
        error.status, {"Content-Type": "application/problem+json"}, json.dumps(body).encode("ascii")
    )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
