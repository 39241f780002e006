"""A slot's program whose processes are taken over: they pretend to be done, and want the next caller's query.

``SELECT 'stay'``: says that it is ready for the next query and stays. ``'forge'``: leaves answers for the next
caller behind and ends. ``'unread'``: leaves what it was sent unread. Other queries run as they should.
"""

from __future__ import annotations

from unittest import mock

import pyarrow as pa

from tracelake.query.engine import child
from tracelake.query.engine.messages import Failed, Finished, Parsed, Ready, Run, Said, Started, frame
from tracelake.query.engine.parsed_query import ParsedQuery

_NO_COLUMNS = pa.schema([]).serialize().to_pybytes()


class _TakenOver(child._Query):
    def _run(self, sql: str, params: object, order: Run) -> None:
        if sql not in ("SELECT 'stay'", "SELECT 'forge'", "SELECT 'unread'"):
            super()._run(sql, params, order)
            return
        self._tell(Started(_NO_COLUMNS, []), Finished(0, truncated=False))
        if sql != "SELECT 'unread'":
            self._tell(Ready(landlock=True, proof=self._proof))
        if sql == "SELECT 'forge'":
            self._tell(Parsed(ParsedQuery({}, ()).to_json()), Failed(422, "Forged", "not what you asked"))
        while sql == "SELECT 'stay'":
            self._hear()
            self._tell(Failed(422, "Stolen", "your query was read by somebody else"))

    def _tell(self, *messages: Said) -> None:
        self._channel.sendall(b"".join(frame(message) for message in messages))


def main() -> None:
    with mock.patch.object(child, "_Query", _TakenOver):
        child.main()
