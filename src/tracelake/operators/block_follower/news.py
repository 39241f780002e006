"""What is said about a commit: what was taken back first, then how far the outputs reach now.

Every event says which revision of its dataset it comes of. One that others have invalidated meanwhile doesn't count
then: the platform hands the task back, and the next attempt is told what to write again. The id of an invalidation
is its own for ever: the event is kept with the commit that it belongs to and sent again as it is, while the same
reorg, should it come again, is another one.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracelake.contracts.dispatcher_api import EventIn
from tracelake.operators.outputs import Output


class News:
    def __init__(self, outputs: Sequence[Output], epoch: int) -> None:
        self._outputs = outputs
        self._epoch = epoch
        self._revisions = {output.index: output.revision for output in outputs}
        self._taken_back = 0

    def taken_back(self, start: int, end: int, reason: str) -> list[EventIn]:
        """To be sent before anything else that is asked for afterwards."""
        self._taken_back += 1
        event_id = f"blocks-{start}-{end}-{self._epoch}.{self._taken_back}"
        for output in self._outputs:
            self._revisions[output.index] += 1
        return [
            output.event(invalidate=(start, end), event_id=event_id, reason=reason)
            for output in self._outputs
        ]

    def reaches(self, cursor: int, finalized: int | None) -> list[EventIn]:
        return [
            output.event(cursor=cursor, finalized=finalized, revision=self._revisions[output.index])
            for output in self._outputs
        ]
