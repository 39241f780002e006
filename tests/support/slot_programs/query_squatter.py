"""A slot's program whose processes are taken over: they pretend to be done, and try to read the next caller's
query.

``SELECT 'stay'``: reports that it is ready for the next query and stays. ``'forge'``: leaves answers for the
next caller behind and ends. ``'unread'``: leaves its input unread. Other queries run as usual.
"""

from __future__ import annotations

from unittest import mock

import pyarrow as pa

from tracelake.query.engine import child
from tracelake.query.engine.messages import (
    FromSlot,
    Parsed,
    ParsedQuery,
    QueryFailed,
    QueryFinished,
    RunQuery,
    SlotReady,
    Started,
    frame,
)
from tracelake.query.engine.pushdown import StatementParams

_NO_COLUMNS = pa.schema([]).serialize().to_pybytes()


class _TakenOver(child._Query):
    def _run(self, sql: str, params: StatementParams, order: RunQuery) -> None:
        if sql not in ("SELECT 'stay'", "SELECT 'forge'", "SELECT 'unread'"):
            super()._run(sql, params, order)
            return
        self._send(Started(_NO_COLUMNS, []), QueryFinished(0, truncated=False))
        if sql != "SELECT 'unread'":
            self._send(SlotReady(landlock=True, proof=self._proof))
        if sql == "SELECT 'forge'":
            self._send(
                Parsed(ParsedQuery({}, ()).to_json()), QueryFailed(422, "Forged", "not what you asked")
            )
        while sql == "SELECT 'stay'":
            self._receive()
            self._send(QueryFailed(422, "Stolen", "your query was read by another process"))

    def _send(self, *messages: FromSlot) -> None:
        self._channel.sendall(b"".join(frame(message) for message in messages))


def main() -> None:
    with mock.patch.object(child, "_Query", _TakenOver):
        child.main()
