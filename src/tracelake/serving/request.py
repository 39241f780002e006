"""Requests as routes read them: strictly, within limits, and with every refusal naming its field.

Bodies are JSON whatever the content type says. Postgres text can't hold NUL, so a string with one is refused
here and not by the database.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, TypeVar
from urllib.parse import parse_qsl
from uuid import UUID

import msgspec
from litestar import Request
from litestar.types import HTTPReceiveMessage, WebSocketReceiveMessage

from tracelake.domain.errors import BadRequest, TooLarge
from tracelake.serving.problems import FieldProblem, InvalidRequest
from tracelake.serving.services import Services

MIB = 1024 * 1024
DEFAULT_BODY = MIB

T = TypeVar("T")


class _Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a call that has none."""


_NOTHING = msgspec.json.Decoder(_Nothing)

_AT = re.compile(r"^(?P<message>.*?)(?: - at `\$?\.?(?P<field>[^`]*)`)?$", re.DOTALL)
_NAMED = re.compile(r"(?:missing required|unknown) field `(?P<name>[^`]*)`")


class ApiRequest(Request[Any, Any, Any]):
    @property
    def services(self) -> Services:
        services: Services = self.scope["state"]["services"]
        return services

    @property
    def caller(self) -> Any:
        """Who was found by the route's authenticator."""
        return self.scope["state"]["caller"]

    async def read(self, limit: int = DEFAULT_BODY) -> bytes:
        """The whole body, or ``TooLarge`` as soon as it is known to be."""
        announced = self._announced_length()
        if announced > limit:
            raise TooLarge("TooLarge", f"the body has more than {limit} bytes")
        message = await self.receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            return _checked(message["body"], limit)
        return b"".join([chunk async for chunk in self._pieces(message, limit)])

    async def pieces(self, limit: int) -> AsyncIterator[bytes]:
        """The body as it comes, up to ``TooLarge``: for what isn't kept in memory."""
        if self._announced_length() > limit:
            raise TooLarge("TooLarge", f"the body has more than {limit} bytes")
        async for chunk in self._pieces(await self.receive(), limit):
            yield chunk

    async def _pieces(
        self, first: HTTPReceiveMessage | WebSocketReceiveMessage, limit: int
    ) -> AsyncIterator[bytes]:
        message, size = first, 0
        while message["type"] == "http.request":
            size += len(message["body"])
            if size > limit:
                raise TooLarge("TooLarge", f"the body has more than {limit} bytes")
            yield message["body"]
            if not message.get("more_body"):
                return
            message = await self.receive()
        raise BadRequest("Disconnected", "the client went away before the end of the body")

    async def refuse_body(self) -> None:
        """For calls that say everything in their path: a body must be empty, or an empty object."""
        body = await self.read()
        if body.strip():
            decode_body(_NOTHING, body)

    async def decode(self, decoder: msgspec.json.Decoder[T], limit: int = DEFAULT_BODY) -> T:
        return decode_body(decoder, await self.read(limit))

    def query_as(self, kind: type[T]) -> T:
        """The query string as a struct: text is taken for numbers where a number is meant."""
        raw = self.scope["query_string"]
        try:
            pairs = parse_qsl(raw, keep_blank_values=True, max_num_fields=50)
        except ValueError as error:
            raise BadRequest("MalformedQuery", f"the query string can't be read: {error}") from None
        given: dict[str, str] = {}
        for name, value in pairs:
            field = name.decode("utf-8", "replace")
            if field in given:
                raise InvalidRequest([FieldProblem(field, "given more than once")])
            given[field] = _text(field, value.decode("utf-8", "replace"))
        try:
            return msgspec.convert(given, kind, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest([field_problem(error)]) from None

    def path_text(self, name: str) -> str:
        value: str = self.scope["path_params"][name]
        return _text(name, value)

    def path_uuid(self, name: str) -> UUID:
        try:
            return UUID(self.path_text(name))
        except ValueError:
            raise InvalidRequest([FieldProblem(name, "not a uuid")]) from None

    def _announced_length(self) -> int:
        for name, value in self.scope["headers"]:
            if name == b"content-length":
                return int(value) if value.isdigit() and len(value) < 20 else 0
        return 0


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        value = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise InvalidRequest([field_problem(error)]) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("MalformedJson", f"the body is not JSON: {error}") from None
    if b"\\u0000" in body:
        _refuse_nul(msgspec.to_builtins(value, enc_hook=_undecoded), "")
    return value


def _undecoded(value: Any) -> None:
    """What a route takes as it came (``msgspec.Raw``) is looked at by whoever decodes it."""
    if not isinstance(value, msgspec.Raw):
        raise TypeError(f"not a part of a request: {type(value)}")


def check_size(field: str, value: Any, limit: int) -> None:
    """Is a value within its limit, as compact JSON?"""
    size = len(msgspec.json.encode(value))
    if size > limit:
        raise InvalidRequest([FieldProblem(field, f"has {size} bytes, at most {limit} are kept")])


def field_problem(error: msgspec.ValidationError) -> FieldProblem:
    """Which field a validation error speaks of; for a missing or unknown one, its own name."""
    text = str(error)
    found = _AT.match(text)
    assert found is not None
    field = found["field"] or ""
    if named := _NAMED.search(found["message"]):
        field = f"{field}.{named['name']}" if field else named["name"]
    return FieldProblem(field, found["message"])


def _refuse_nul(value: Any, field: str) -> None:
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
