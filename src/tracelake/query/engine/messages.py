"""What service and slot say to each other over one stream socket, and how it is framed.

A frame is four bytes of length, one byte of kind and a body: ``TOLD`` (a message below, as MessagePack) or ``ROWS``
(one Arrow IPC stream with some rows of the result). A ``Run`` is followed by its descriptors, in the order of its
relations, files before tables: one byte for each ``DESCRIPTORS_AT_ONCE`` of them, since the kernel passes no more
than 253 with a message.

    service                        slot
    (a pipe, as descriptor)  →
                                   Ready
    Parse(sql, params)       →
                             ←     Parsed | Failed
    Run(relations …), fds    →     (or Leave: the next thing said is Ready)
                             ←     Started(schema, types) | Failed
                             ←     ROWS …  then  Finished | Failed, and Ready for the next query

The service believes nothing that a slot says beyond its form: lengths are bounded, messages decoded strictly, rows
validated and weighed. Each query has a process of its own, and all of them have this socket; so a ``Ready`` has to
say what the template, which sees no query, has written to its pipe for the new process. It makes that up when the
process before has ended: one that was taken over can't stay and take the next caller's query.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from tracelake.contracts.query_api import from_wire
from tracelake.query.engine.column_types import ColumnType, ResultForm

Parameter: TypeAlias = bool | int | float | str | bytes | None
Parameters: TypeAlias = Sequence[Parameter] | Mapping[str, Parameter]

HEADER = struct.Struct("!IB")
TOLD, ROWS = 0, 1
DESCRIPTORS_AT_ONCE = 250
LONGEST_MESSAGE = 16 * 1024 * 1024
#: Rows are cut into frames of about this weight, unless a single row is heavier.
ROWS_FRAME_BYTES = 1024 * 1024
LONGEST_SCHEMA = 4 * 1024 * 1024
#: Of one process for one query, made by the template when the one before it is gone.
PROOF_BYTES = 16


class Ready(msgspec.Struct, frozen=True, tag="ready", forbid_unknown_fields=True):
    """The process waits for its query. ``landlock``: whether the kernel keeps it from other files as well;
    ``proof``: what the template has told the service of this process alone."""

    landlock: bool
    proof: bytes


class Parse(msgspec.Struct, frozen=True, tag="parse", forbid_unknown_fields=True):
    """``params``: as JSON, whose numbers have no bounds."""

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


class Run(msgspec.Struct, frozen=True, tag="run", forbid_unknown_fields=True):
    """``row_bytes``: of a single row, and of a frame; ``form``: what the rows are for."""

    relations: list[Attachment]
    max_rows: int
    max_bytes: int
    row_bytes: int
    form: ResultForm = ResultForm.ARROW


class Leave(msgspec.Struct, frozen=True, tag="leave", forbid_unknown_fields=True):
    """What was parsed isn't run."""


class Started(msgspec.Struct, frozen=True, tag="started", forbid_unknown_fields=True):
    schema: bytes
    types: list[ColumnType]


class Finished(msgspec.Struct, frozen=True, tag="finished", forbid_unknown_fields=True):
    row_count: int
    truncated: bool


class Failed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    status: int
    reason: str
    message: str


Asked: TypeAlias = Parse | Run | Leave
Said: TypeAlias = Ready | Parsed | Started | Finished | Failed

_encoder = msgspec.msgpack.Encoder()
_asked: msgspec.msgpack.Decoder[Asked] = msgspec.msgpack.Decoder(Asked)
_said: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)


def frame(message: Asked | Said) -> bytes:
    body = _encoder.encode(message)
    return HEADER.pack(len(body), TOLD) + body


def decode_asked(body: bytes) -> Asked:
    return _asked.decode(body)


def decode_said(body: bytes | bytearray) -> Said:
    return _said.decode(body)


def encode_params(params: Parameters) -> bytes:
    return json.dumps(dict(params) if isinstance(params, Mapping) else list(params)).encode()


def decode_params(text: bytes) -> list[Parameter] | dict[str, Parameter]:
    return from_wire(json.loads(text)) or []
