"""The Query Service's wire models: ``POST /v1/task/query`` by capability token, ``POST /v1/query`` for people.

A request is JSON; the answer is JSON (``QueryResponse``), an Arrow IPC stream when ``Accept`` asks for
``ARROW_STREAM``, or, with ``export``, the address of a Parquet file (``QueryExported``) to download by ``GET`` of
``USER_EXPORTS_PATH`` or ``TASK_EXPORTS_PATH`` with the same credential. A query has ended and its audit row is
written before the first byte of an answer, so a 200 never fails halfway; an Arrow answer carries the fields that
JSON has beside its rows in three headers: ``QUERY_ID_HEADER``, ``ROW_COUNT_HEADER``, ``TRUNCATED_HEADER``.

Values in JSON, by DuckDB type:

- integers of any width are JSON numbers, HUGEINT and BIGNUM included: read them with a parser that keeps them;
- DECIMAL is text, exact: ``"12.50"``; FLOAT and DOUBLE are numbers, NaN and the infinities null;
- BLOB is ``"0x…"``, lower case, as hashes and addresses are usually written; BIT is ``"0101"``;
- TIMESTAMP WITH TIME ZONE is RFC 3339 in UTC, ``"2026-11-02T10:00:00.123456Z"``; TIMESTAMP the same without
  the Z; DATE ``"2026-11-02"``; TIME ``"10:00:00"``; INTERVAL, UUID and TIME WITH TIME ZONE are DuckDB's own
  text, and so are days and instants before the year 1, ``"0044-03-15 (BC)"``, ``"infinity"`` and ``"-infinity"``;
- LIST and ARRAY are arrays, STRUCT is an object, MAP an array of ``[key, value]`` pairs, all by the same rules;
- NULL is null.

In Arrow and Parquet a value is the same or the query is refused (``INVALID_QUERY``), never another: HUGEINT is
decimal(38, 0), or text in a result where one has 39 digits; UHUGEINT and BIGNUM are text; the time 24:00:00 is
refused; INTERVAL, BIT and TIME WITH TIME ZONE are text, but Parquet takes no INTERVAL and no UNION
(``ExportUnsupported``). Infinite days and instants are DuckDB's: the largest number of either sign. A column's
DuckDB type is in its field's metadata, under ``TYPE_FIELD``.

Parameters are JSON as well: numbers (integers of any width), text, booleans, null, lists of these, and
``{"blob": "0x…"}`` for bytes. Text ``"0x…"`` is bytes too where it is compared with bytes, so that a hash from one
result can be a parameter of the next query. ``to_wire`` and ``from_wire`` convert them.
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
#: Metadata of an Arrow field, also in an exported file: the column's DuckDB type.
TYPE_FIELD = "duckdb.type"

MAX_SQL_BYTES = 256 * 1024
MAX_PARAMS = 1000
#: Maximum depth of nested lists in a parameter.
MAX_PARAM_LEVELS = 32
MAX_REQUEST_BYTES = 2 * 1024 * 1024
MAX_LIMIT = 2**31 - 1

#: 422: the SQL doesn't parse, names an unknown relation or column, doesn't fit its types or fails on a row. The
#: ``detail`` is DuckDB's message, with the line and a caret where it gives them.
INVALID_QUERY = "InvalidQuery"
#: 422: the SQL may be valid, but it isn't one SELECT over attached datasets.
QUERY_REFUSED = "QueryRefused"
#: 422: the query was killed at its time limit.
QUERY_TOO_LONG = "QueryTimedOut"
#: 422: the query needed more memory or spill space than one query may use.
QUERY_TOO_BIG = "QueryOutOfMemory"
#: Reasons of a valid query that exceeded a limit.
BEYOND_LIMITS = frozenset({QUERY_TOO_LONG, QUERY_TOO_BIG})
#: 503: this installation has no Query Service, or the user port doesn't know its address.
NO_QUERY_SERVICE = "NoQueryService"

QueryParams = (
    Annotated[list[Any], Meta(max_length=MAX_PARAMS)] | Annotated[dict[str, Any], Meta(max_length=MAX_PARAMS)]
)


class QueryRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One SELECT. ``params`` are given in order for ``?`` and ``$1``, or by name for ``$name``: numbers, text,
    booleans, null, and lists of these. ``limit`` is the maximum number of rows in the answer; the service has a
    limit of its own. ``truncated`` in the answer says whether there would have been more rows. ``export`` writes
    all rows to a Parquet file instead, which the caller can download for some hours."""

    sql: Annotated[str, Meta(min_length=1)]
    params: QueryParams | None = None
    limit: Annotated[int, Meta(ge=0, le=MAX_LIMIT)] | None = None
    export: bool = False


class ExportQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """``query_id`` is one of the caller's queries, from its answer."""

    query_id: UUID


class QueriedDataset(Struct, frozen=True):
    """The dataset version that a name in the query resolved to, for the whole query."""

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
    """``download`` is the path for downloading the Parquet file, with the same credential, until ``expires_at``;
    then the file is removed. ``location`` is its place on disk, which only the Query Service's user can open."""

    location: str
    row_count: int
    bytes: int
    query_id: UUID
    truncated: bool = False
    datasets: list[QueriedDataset] = []
    download: str = ""
    expires_at: datetime | None = None


def to_wire(params: Sequence[Any] | Mapping[str, Any] | None) -> list[Any] | dict[str, Any] | None:
    """Python's values as JSON for a request. Raises ``Invalid`` for a type that a parameter can't have."""
    if params is None:
        return None
    if isinstance(params, Mapping):
        return {str(name): _wire_value(value, f"${name}") for name, value in params.items()}
    # A string is a sequence too: its characters would become the parameters.
    if isinstance(params, (str, bytes)):
        raise Invalid("InvalidParams", "params is a list of values, or a mapping of names to them")
    return [_wire_value(value, f"${number}") for number, value in enumerate(params, 1)]


def _wire_value(value: Any, where: str, level: int = 0) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            # JSON has neither NaN nor infinity; minus itself, neither is zero.
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
    """The values to bind. Raises ``Invalid`` for an object that isn't a blob, and for names that differ only by
    case, which the engine takes for one."""
    if params is None:
        return None
    if isinstance(params, dict):
        if len({name.lower() for name in params}) < len(params):
            raise Invalid("InvalidParams", "params: two names differ only by upper and lower case")
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
