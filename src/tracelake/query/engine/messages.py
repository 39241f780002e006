"""The messages between the service and a slot over one stream socket, and how they are framed.

A frame is four bytes of length, one byte of kind and a body: ``MESSAGE`` (one of the structs below, as MessagePack)
or ``ROWS`` (one Arrow IPC stream with some rows of the result). A ``RunQuery`` is followed by its descriptors, in
the order of its relations, files before tables: one byte for each ``DESCRIPTORS_AT_ONCE`` of them, since the kernel
passes no more than 253 with a message.

    service                        slot
    (a pipe, as descriptor)  →
                             ←     SlotReady
    Parse(sql, params)       →
                             ←     Parsed | QueryFailed
    RunQuery(relations), fds →     (or Leave, answered by SlotReady)
                             ←     Started(schema, types) | QueryFailed
                             ←     ROWS …  then  QueryFinished | QueryFailed, and SlotReady for the next query

The service trusts only the form of a slot's messages: lengths are bounded, messages decoded strictly, rows
validated and weighed. Each query has its own process, and all of them share this socket; so a ``SlotReady`` carries
a proof that the template, which sees no query, has also written to its pipe. The template draws a new proof after
the previous process has ended, so a process that was taken over can't stay and receive the next caller's query.
It starts the next process at the service's turn, which comes through a pipe of its own, after everything was sent
to the previous one: input that a process left unread can't reach the next one either.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Self, TypeAlias

import msgspec

from tracelake.contracts.query_api import from_wire
from tracelake.domain.where import Predicate
from tracelake.query.engine.column_types import ResultColumnType, ResultFormat

Parameter: TypeAlias = bool | int | float | str | bytes | None
Parameters: TypeAlias = Sequence[Parameter] | Mapping[str, Parameter]
HEADER = struct.Struct("!IB")
# The kernel passes at most 253 descriptors in one message.
DESCRIPTORS_AT_ONCE = 250
LONGEST_MESSAGE = 16 * 1024 * 1024
#: Rows are cut into frames of about this weight, unless a single row is heavier.
ROWS_FRAME_BYTES = 1024 * 1024
LONGEST_SCHEMA = 4 * 1024 * 1024
#: Random bytes that identify the process of one query.
PROOF_BYTES = 16
#: Kinds of frames.
MESSAGE, ROWS = 0, 1


class SlotReady(msgspec.Struct, frozen=True, tag="ready", forbid_unknown_fields=True):
    """The process waits for its query. ``landlock``: whether the kernel also keeps it from other files;
    ``proof``: the bytes that the template wrote to the service's pipe for this process alone."""

    landlock: bool
    proof: bytes


class Parse(msgspec.Struct, frozen=True, tag="parse", forbid_unknown_fields=True):
    """``params`` are JSON: MessagePack has no integers beyond 64 bits."""

    sql: str
    params: bytes


class Parsed(msgspec.Struct, frozen=True, tag="parsed", forbid_unknown_fields=True):
    query: bytes


class Attachment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``columns``: an Arrow schema as IPC; ``files`` and ``tables``: how many descriptors of each follow."""

    name: str
    columns: bytes
    files: int
    tables: int


class RunQuery(msgspec.Struct, frozen=True, tag="run", forbid_unknown_fields=True):
    """``row_bytes``: maximum size of a row, and of a frame; ``form``: the format that the rows are for, and
    ``hugeint_as_text`` how it holds a HUGEINT (``column_types``)."""

    relations: list[Attachment]
    max_rows: int
    max_bytes: int
    row_bytes: int
    form: ResultFormat = ResultFormat.ARROW
    hugeint_as_text: bool = False


class Leave(msgspec.Struct, frozen=True, tag="leave", forbid_unknown_fields=True):
    """The parsed query isn't run."""


class Started(msgspec.Struct, frozen=True, tag="started", forbid_unknown_fields=True):
    schema: bytes
    types: list[ResultColumnType]


class QueryFinished(msgspec.Struct, frozen=True, tag="finished", forbid_unknown_fields=True):
    row_count: int
    truncated: bool


class QueryFailed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    status: int
    reason: str
    message: str


ToSlot: TypeAlias = Parse | RunQuery | Leave
FromSlot: TypeAlias = SlotReady | Parsed | Started | QueryFinished | QueryFailed

_encoder = msgspec.msgpack.Encoder()
_to_slot: msgspec.msgpack.Decoder[ToSlot] = msgspec.msgpack.Decoder(ToSlot)
_from_slot: msgspec.msgpack.Decoder[FromSlot] = msgspec.msgpack.Decoder(FromSlot)


def frame(message: ToSlot | FromSlot) -> bytes:
    body = _encoder.encode(message)
    return HEADER.pack(len(body), MESSAGE) + body


def decode_to_slot(body: bytes) -> ToSlot:
    return _to_slot.decode(body)


def decode_from_slot(body: bytes | bytearray) -> FromSlot:
    return _from_slot.decode(body)


def encode_params(params: Parameters) -> bytes:
    return json.dumps(dict(params) if isinstance(params, Mapping) else list(params)).encode()


def decode_params(text: bytes) -> list[Parameter] | dict[str, Parameter]:
    return from_wire(json.loads(text)) or []


class RelationUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The columns and rows of a relation that can affect the answer; the others need not be read.

    ``columns``: names that may be columns of this relation, sorted; None is all columns. ``predicate``: a condition
    that every needed row fulfils, with literals as ``pushdown`` writes them; None is all rows. Names are those of
    the SQL, since the gate knows no schema; ``fit_relation.fit`` turns both into columns of a relation."""

    columns: tuple[str, ...] | None = None
    predicate: Predicate | None = None


class ParsedQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gate's result: the relations that a query reads, how it uses each, and its parameters.

    It is made in the confined process and sent as JSON, so it holds plain data only and is decoded strictly. Names
    are in lower case, as the engine ignores case. ``parameters``: the identifiers in order of appearance, "1", "2"
    … for positional ones, otherwise names."""

    relations: dict[str, RelationUse]
    parameters: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        return msgspec.json.decode(data, type=cls)
