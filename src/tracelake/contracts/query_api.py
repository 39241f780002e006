"""The Query Service's wire models: ``POST /v1/task/query`` by capability token, ``POST /v1/query`` for people.

A request is JSON; the answer is JSON (``QueryResponse``), an Arrow IPC stream when ``Accept`` asks for
``ARROW_STREAM``, or, with ``export``, says where a Parquet file can be fetched (``QueryExported``): by ``GET`` of
``USER_EXPORTS_PATH`` or ``TASK_EXPORTS_PATH``, with the credential that asked. A query has ended and its
audit row is written before the first byte of an answer, so a 200 is never taken back halfway; an Arrow answer says
what JSON says beside its rows in three headers: ``QUERY_ID_HEADER``, ``ROW_COUNT_HEADER``, ``TRUNCATED_HEADER``.

Values in JSON, by DuckDB type:

- integers of any width are JSON numbers, HUGEINT and BIGNUM included: read them with a parser that keeps them;
- DECIMAL is text, exact: ``"12.50"``; FLOAT and DOUBLE are numbers, NaN and the infinities null;
- BLOB is ``"0x…"``, lower case: hashes and addresses as everybody writes them; BIT is ``"0101"``;
- TIMESTAMP WITH TIME ZONE is RFC 3339 in UTC, ``"2026-11-02T10:00:00.123456Z"``; TIMESTAMP the same without
  the Z; DATE ``"2026-11-02"``; TIME ``"10:00:00"``; INTERVAL, UUID and TIME WITH TIME ZONE are DuckDB's own
  text, and so are days and instants before the year 1, ``"0044-03-15 (BC)"``, ``"infinity"`` and ``"-infinity"``;
- LIST and ARRAY are arrays, STRUCT is an object, MAP an array of ``[key, value]`` pairs, all by the same rules;
- NULL is null.

In Arrow and Parquet a value is the same or the query is refused (``INVALID_QUERY``), never another: HUGEINT is
decimal(38, 0), and a value of 39 digits is refused, as is the time 24:00:00; INTERVAL, BIT, BIGNUM and TIME WITH
TIME ZONE are text, but Parquet takes no INTERVAL and no UNION (``ExportUnsupported``). Infinite days and instants
are DuckDB's: the largest number of either sign.

Parameters are JSON as well: numbers, text, booleans, null, lists of these, and ``{"blob": "0x…"}`` for bytes, so
that a hash that one query gave can be asked for by the next. ``to_wire`` and ``from_wire`` go back and forth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Annotated, Any
from uuid import UUID

from msgspec import Meta, Struct

from tracelake.domain.errors import Invalid

USER_QUERY_PATH = "/v1/query"
TASK_QUERY_PATH = "/v1/task/query"
USER_EXPORTS_PATH = "/v1/exports"
TASK_EXPORTS_PATH = "/v1/task/exports"
PARQUET = "application/vnd.apache.parquet"

ARROW_STREAM = "application/vnd.apache.arrow.stream"
QUERY_ID_HEADER = "X-Trace-Query-Id"
ROW_COUNT_HEADER = "X-Trace-Row-Count"
TRUNCATED_HEADER = "X-Trace-Truncated"
"""``true`` or ``false``."""

MAX_SQL_BYTES = 256 * 1024
MAX_PARAMS = 1000
MAX_PARAM_LEVELS = 32
"""How many lists a parameter may have within each other."""
MAX_REQUEST_BYTES = 2 * 1024 * 1024
MAX_LIMIT = 2**31 - 1

INVALID_QUERY = "InvalidQuery"
"""422: the SQL doesn't parse, names something that isn't there, doesn't fit its types or fails on a row. The
``detail`` is DuckDB's message, with the line and a caret where it gives them."""
QUERY_REFUSED = "QueryRefused"
"""422: the SQL may be good, but it isn't one SELECT over attached datasets."""
QUERY_TOO_LONG = "QueryTimedOut"
"""422: the query was killed at its time limit."""
QUERY_TOO_BIG = "QueryOutOfMemory"
"""422: the query needed more memory or spill space than one may have."""
BEYOND_LIMITS = frozenset({QUERY_TOO_LONG, QUERY_TOO_BIG})
"""The query was good, and too much."""
NO_QUERY_SERVICE = "NoQueryService"
"""503: this installation has none, or the user port wasn't told where."""

QueryParams = (
    Annotated[list[Any], Meta(max_length=MAX_PARAMS)] | Annotated[dict[str, Any], Meta(max_length=MAX_PARAMS)]
)


class QueryRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One SELECT. ``params`` in order for ``?`` and ``$1``, by name for ``$name``: numbers, text, booleans, null,
    and lists of these. ``limit`` is the most rows to answer with, at most what the service allows; ``truncated``
    then says whether there would have been more. ``export`` puts all rows into a Parquet file instead, which the
    caller can fetch for a while."""

    sql: Annotated[str, Meta(min_length=1)]
    params: QueryParams | None = None
    limit: Annotated[int, Meta(ge=0, le=MAX_LIMIT)] | None = None
    export: bool = False


class ExportQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Which of the caller's queries; its answer said so."""

    query_id: UUID


class QueriedDataset(Struct, frozen=True):
    """What a name in the query stood for: one version, throughout."""

    name: str
    dataset_uuid: UUID
    dataset_version: UUID


class QueryResponse(Struct, frozen=True):
    """``types`` are DuckDB's names, one per column. ``row_count`` counts ``rows``."""

    columns: list[str]
    types: list[str]
    rows: list[list[Any]]
    row_count: int
    truncated: bool
    query_id: UUID
    datasets: list[QueriedDataset] = []


class QueryExported(Struct, frozen=True):
    """``download`` is the path to fetch the Parquet file by, with the same credential, until ``expires_at``; then
    it is removed. ``location`` is where it lies: the Query Service's user alone can open it there."""

    location: str
    row_count: int
    bytes: int
    query_id: UUID
    truncated: bool = False
    datasets: list[QueriedDataset] = []
    download: str = ""
    expires_at: datetime | None = None


def to_wire(params: Sequence[Any] | Mapping[str, Any] | None) -> list[Any] | dict[str, Any] | None:
    """Python's values as a request carries them; ``Invalid`` for one that has no place there."""
    if params is None:
        return None
    if isinstance(params, Mapping):
        return {str(name): _wire_value(value, f"${name}") for name, value in params.items()}
    if isinstance(params, (str, bytes)):
        raise Invalid("InvalidParams", "params is a list of values, or a mapping of names to them")
    return [_wire_value(value, f"${number}") for number, value in enumerate(params, 1)]


def _wire_value(value: Any, where: str, level: int = 0) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if value - value == 0 else str(value)
        case bytes() | bytearray() | memoryview():
            return {"blob": "0x" + bytes(value).hex()}
        case datetime() | date() | time():
            return value.isoformat()
        case Decimal() | UUID():
            return str(value)
        case list() | tuple():
            return [_wire_value(each, where, _deeper(level, where)) for each in value]
        case _:
            raise Invalid("InvalidParams", f"{where}: a {type(value).__name__} can't be a query's parameter")


def from_wire(params: list[Any] | dict[str, Any] | None) -> list[Any] | dict[str, Any] | None:
    """What to bind; ``Invalid`` for an object that isn't a blob, and for names that the engine takes for one."""
    if params is None:
        return None
    if isinstance(params, dict):
        if len({name.lower() for name in params}) < len(params):
            raise Invalid("InvalidParams", "params: two names differ by upper and lower case only")
        return {name: _bound(value, f"params.{name}") for name, value in params.items()}
    return [_bound(value, f"params[{index}]") for index, value in enumerate(params)]


def _deeper(level: int, where: str) -> int:
    if level >= MAX_PARAM_LEVELS:
        raise Invalid("InvalidParams", f"{where}: lists are nested more than {MAX_PARAM_LEVELS} levels deep")
    return level + 1


def _bound(value: Any, where: str, level: int = 0) -> Any:
    match value:
        case {"blob": str(text), **rest} if not rest and text.startswith("0x"):
            try:
                return bytes.fromhex(text[2:])
            except ValueError:
                raise Invalid(
                    "InvalidParams", f"{where}: {text[:80]!r} isn't 0x and hexadecimal digits"
                ) from None
        case dict():
            raise Invalid("InvalidParams", f'{where}: an object here must be {{"blob": "0x…"}}')
        case list():
            return [_bound(each, where, _deeper(level, where)) for each in value]
        case _:
            return value
