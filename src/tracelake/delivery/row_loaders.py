"""How a delivery's connection reads values: none ends the reading of a table, whatever is in it.

A JSON document comes as its text: only what a template or a condition names is ever decoded, and numbers keep their
digits. A time that Python has no value for comes as ``Unreadable``, for the row's planner to refuse that row alone.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
import psycopg
from psycopg.adapt import Buffer, Loader
from psycopg.types.datetime import TimestamptzLoader

from tracelake.delivery.rows import Unreadable


class _JsonText(Loader):
    def load(self, data: Buffer) -> msgspec.Raw:
        return msgspec.Raw(bytes(data))


class _Time(Loader):
    def __init__(self, oid: int, context: Any = None) -> None:
        super().__init__(oid, context)
        self._known = TimestamptzLoader(oid, context)

    def load(self, data: Buffer) -> datetime | Unreadable:
        try:
            return self._known.load(data)
        except psycopg.DataError as error:
            return Unreadable(bytes(data).decode(), str(error))


def register(connection: psycopg.AsyncConnection[Any]) -> None:
    connection.adapters.register_loader("jsonb", _JsonText)
    connection.adapters.register_loader("timestamptz", _Time)
