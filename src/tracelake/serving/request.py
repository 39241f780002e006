"""Requests as routes read them: decoded strictly, within limits, and refused by the name of the wrong field.

Bodies are JSON whatever the content type is. Postgres text can't hold NUL, so a string with one is refused here and
not by the database. ``Services`` travel with each request, so that routes are plain functions. ``while_connected``
is for work that is only worth doing while its client waits: ASGI reports a disconnect only to those who ask for it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import parse_qsl
from uuid import UUID

import msgspec
from prometheus_client import CollectorRegistry

from tracelake.contracts.problem import FieldProblem, InvalidRequest
from tracelake.domain.errors import BadRequest, TooLarge
from tracelake.serving.response import AsgiMessage, AsgiReceive, AsgiScope

MIB = 1024 * 1024
DEFAULT_BODY = MIB
T = TypeVar("T")
_AT = re.compile(r"^(?P<message>.*?)(?: - at `\$?\.?(?P<field>[^`]*)`)?$", re.DOTALL)
_NAMED = re.compile(r"(?:missing required|unknown) field `(?P<name>[^`]*)`")
Check = Callable[[], Awaitable[str | None]]
"""Raises when a dependency can't be used; otherwise it may return a word on its state."""


class _Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a call that has none."""


_NOTHING = msgspec.json.Decoder(_Nothing)


class SurfaceRequest:
    __slots__ = ("path_params", "receive", "scope")

    def __init__(self, scope: AsgiScope, receive: AsgiReceive, path_params: Mapping[str, str]) -> None:
        self.scope = scope
        self.receive = receive
        self.path_params = path_params

    @property
    def services(self) -> Services:
        services: Services = self.scope["state"]["services"]
        return services

    @property
    def caller(self) -> Any:
        """The caller that the route's authenticator found."""
        return self.scope["state"]["caller"]

    @property
    def peer(self) -> str:
        """The client, as the listener counts it: one that has many addresses is one peer."""
        client = self.scope.get("client")
        peer: str = self.scope["state"].get("peer") or (client[0] if client else "")
        return peer

    def is_here(self, limit: int) -> bool:
        """Whether the whole body, of at most ``limit`` bytes, has come together with the head. To be asked before
        it is read."""
        came: int | None = self.scope["state"].get("came")
        return came is not None and came <= limit

    async def read(self, limit: int = DEFAULT_BODY) -> bytes:
        """The whole body; raises ``TooLarge`` as soon as that is certain."""
        announced = self._announced_length()
        if announced > limit:
            raise TooLarge("TooLarge", f"the body has more than {limit} bytes")
        message = await self.receive()
        # Nearly all bodies come in one piece, and needn't be joined.
        if message["type"] == "http.request" and not message.get("more_body"):
            return _checked(message["body"], limit)
        return b"".join([chunk async for chunk in self._pieces(message, limit)])

    async def pieces(self, limit: int) -> AsyncIterator[bytes]:
        """The body in the pieces in which it arrives, for routes that don't keep it in memory."""
        if self._announced_length() > limit:
            raise TooLarge("TooLarge", f"the body has more than {limit} bytes")
        async for chunk in self._pieces(await self.receive(), limit):
            yield chunk

    async def _pieces(self, first: AsgiMessage, limit: int) -> AsyncIterator[bytes]:
        message, size = first, 0
        while message["type"] == "http.request":
            size += len(message["body"])
            if size > limit:
                raise TooLarge("TooLarge", f"the body has more than {limit} bytes")
            yield message["body"]
            if not message.get("more_body"):
                return
            message = await self.receive()
        raise BadRequest("Disconnected", "the client disconnected before the end of the body")

    async def refuse_body(self) -> None:
        """For calls without parameters beyond their path: a body must be empty, or an empty object."""
        body = await self.read()
        if body.strip():
            decode_body(_NOTHING, body)

    async def decode(self, decoder: msgspec.json.Decoder[T], limit: int = DEFAULT_BODY) -> T:
        return decode_body(decoder, await self.read(limit))

    def query_as(self, kind: type[T]) -> T:
        """The query string as a struct; text is converted where a field is a number."""
        raw = self.scope["query_string"]
        try:
            # The number of fields is bounded before any of them is parsed.
            pairs = parse_qsl(raw, keep_blank_values=True, max_num_fields=50)
        except ValueError as error:
            raise BadRequest("MalformedQuery", f"the query string can't be read: {error}") from None
        given: dict[str, str] = {}
        for name, value in pairs:
            field = name.decode("utf-8", "replace")
            # Whichever of the two was used, some proxy or client would have meant the other.
            if field in given:
                raise InvalidRequest([FieldProblem(field, "given more than once")])
            given[field] = _text(field, value.decode("utf-8", "replace"))
        try:
            # Everything in a query string is text, so numbers must be read from it.
            return msgspec.convert(given, kind, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest([field_problem(error)]) from None

    def path_text(self, name: str) -> str:
        return _text(name, self.path_params[name])

    def path_uuid(self, name: str) -> UUID:
        try:
            return UUID(self.path_text(name))
        except ValueError:
            raise InvalidRequest([FieldProblem(name, "not a uuid")]) from None

    def _announced_length(self) -> int:
        for name, value in self.scope["headers"]:
            if name == b"content-length":
                # int raises for thousands of digits. The body is counted as it arrives in any case.
                return int(value) if value.isdigit() and len(value) < 20 else 0
        return 0


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        value = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise InvalidRequest([field_problem(error)]) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("MalformedJson", f"the body is not JSON: {error}") from None
    # JSON can't hold a plain NUL, so one can only have come as this escape; the usual body is not walked.
    if b"\\u0000" in body:
        _refuse_nul(msgspec.to_builtins(value, enc_hook=_undecoded), "")
    return value


def _undecoded(value: Any) -> None:
    """Skips undecoded parts (``msgspec.Raw``): the code that decodes them checks them."""
    if not isinstance(value, msgspec.Raw):
        raise TypeError(f"not a part of a request: {type(value)}")


def check_size(field: str, value: Any, limit: int) -> None:
    """Raises when a value, as compact JSON, has more than ``limit`` bytes."""
    size = len(msgspec.json.encode(value))
    if size > limit:
        raise InvalidRequest([FieldProblem(field, f"has {size} bytes, at most {limit} are kept")])


def field_problem(error: msgspec.ValidationError) -> FieldProblem:
    """The field that a validation error is about; a missing or unknown field is named itself."""
    # msgspec gives the place only in the text: "Expected `int`, got `str` - at `$.limit`".
    found = _AT.match(str(error))
    assert found is not None
    field = found["field"] or ""
    if named := _NAMED.search(found["message"]):
        field = f"{field}.{named['name']}" if field else named["name"]
    return FieldProblem(field, found["message"])


def _refuse_nul(value: Any, field: str) -> None:
    # A list and no recursion: the caller decides how deep its value is nested.
    waiting: list[tuple[Any, str]] = [(value, field)]
    while waiting:
        value, field = waiting.pop()
        match value:
            case str() if "\0" in value:
                raise InvalidRequest([FieldProblem(field, "contains a NUL character")])
            case list():
                waiting += [(item, f"{field}[{index}]") for index, item in enumerate(value)]
            case dict():
                waiting += [(name, field) for name in value]
                waiting += [(item, f"{field}.{name}" if field else name) for name, item in value.items()]
            case _:
                continue


def _checked(body: bytes, limit: int) -> bytes:
    if len(body) > limit:
        raise TooLarge("TooLarge", f"the body has more than {limit} bytes")
    return body


def _text(field: str, value: str) -> str:
    if "\0" in value:
        raise InvalidRequest([FieldProblem(field, "contains a NUL character")])
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The objects that routes of every surface use; ``/readyz`` runs the ``checks``."""

    registry: CollectorRegistry
    checks: Mapping[str, Check]
    now: Callable[[], Awaitable[datetime]]
    openapi: bytes


async def while_connected(receive: AsgiReceive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client of ``receive`` disconnects or the request itself
    is cancelled, and has ended on return. Call it after the body has been read."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise BadRequest("Disconnected", "the client disconnected before the response")
    finally:
        # Also when this request was cancelled itself: neither task may outlive it.
        await _end(gone)
        await _end(working)


async def _gone(receive: AsgiReceive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _end(task: asyncio.Task[Any]) -> None:
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
