"""Completions travel in batches: what is ready while others are under way goes with the next call.

The first goes out at once, so a lone task waits for nobody; under load a batch grows to what became ready during
a round trip and a moment more. Each completion is answered on its own, by a future. A batch that is refused as a
whole, which one malformed member can bring about, is sent again one by one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from tracelake.contracts.dispatcher_api import MAX_BATCH, CompleteRequest, CompleteResponse
from tracelake.domain.errors import TracelakeError, Unavailable

Sent = CompleteResponse | TracelakeError
Answer = asyncio.Future[CompleteResponse]

_LANES = 2
_WORTH_A_LANE = 32
"""So many that wait justify a second call while the first is under way."""
_GATHER_SECONDS = 0.003
_MAX_BYTES = 8 * 1024 * 1024
_CLOSED = "the worker ends before the Dispatcher answered"


class Completions:
    def __init__(self, send: Callable[[Sequence[bytes]], Awaitable[list[Sent]]]) -> None:
        self._send = send
        self._waiting: deque[tuple[bytes, Answer]] = deque()
        self._lanes: set[asyncio.Task[None]] = set()
        self._closed = False

    def submit(self, completion: CompleteRequest) -> Answer:
        answer: Answer = asyncio.get_running_loop().create_future()
        if self._closed:
            answer.set_exception(Unavailable("Closed", _CLOSED))
            return answer
        self._waiting.append((msgspec.json.encode(completion), answer))
        if not self._lanes or (len(self._lanes) < _LANES and len(self._waiting) >= _WORTH_A_LANE):
            self._lanes.add(asyncio.create_task(self._run_lane()))
        return answer

    async def close(self) -> None:
        """Whatever isn't answered by now is given up."""
        self._closed = True
        for lane in tuple(self._lanes):
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        for _, answer in self._waiting:
            _give_up(answer)
        self._waiting.clear()

    async def _run_lane(self) -> None:
        lane = asyncio.current_task()
        assert lane is not None
        try:
            while self._waiting:
                await self._deliver_next()
                if 0 < len(self._waiting) < _WORTH_A_LANE:
                    await asyncio.sleep(_GATHER_SECONDS)
        finally:
            # Here and not by a callback, which comes later: whoever hears an answer may submit the next completion
            # at once, and must not find a lane that has stopped looking.
            self._lanes.discard(lane)

    async def _deliver_next(self) -> None:
        batch = self._next_batch()
        try:
            await self._deliver(batch)
        finally:
            for _, answer in batch:
                _give_up(answer)

    def _next_batch(self) -> list[tuple[bytes, Answer]]:
        batch: list[tuple[bytes, Answer]] = []
        size = 0
        while self._waiting and len(batch) < MAX_BATCH:
            size += len(self._waiting[0][0])
            if batch and size > _MAX_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _deliver(self, batch: Sequence[tuple[bytes, Answer]]) -> None:
        try:
            sent = await self._send([body for body, _ in batch])
        except TracelakeError as error:
            if len(batch) == 1:
                sent = [error]
            else:
                for each in batch:
                    await self._deliver([each])
                return
        for (_, answer), outcome in zip(batch, sent, strict=True):
            if answer.done():
                continue
            if isinstance(outcome, CompleteResponse):
                answer.set_result(outcome)
            else:
                answer.set_exception(outcome)


def _give_up(answer: Answer) -> None:
    if not answer.done():
        answer.set_exception(Unavailable("Closed", _CLOSED))
