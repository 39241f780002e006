"""Claimed tasks and operators for tests of the worker's parts, without a Dispatcher and without processes.

``ScriptedOperator`` replaces an operator process: its messages are written down beforehand, or follow from the
messages it receives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID, uuid4

from tracelake.contracts.dispatcher_api import ClaimResponse, JobRef, PayloadInput, PayloadOutput, TaskPayload
from tracelake.contracts.operator_protocol import FromOperator, Run, ToOperator
from tracelake.leases.held_task import HeldTask
from tracelake.worker.host.operator_process import OperatorGone


def payload(task_id: UUID | None = None, **changes: Any) -> TaskPayload:
    read = PayloadInput(0, uuid4(), uuid4(), 0, None, "none", start=0, end=9, partition_key="0-9")
    fields: dict[str, Any] = {
        "task_id": task_id or uuid4(),
        "attempt": 1,
        "epoch": 1,
        "job": JobRef("dag", "job"),
        "operator": "noop",
        "config": {},
        "inputs": [read],
        "outputs": [PayloadOutput(0, "out", uuid4(), uuid4(), "none", 0)],
        "runtime": "ecs_python",
        "timeout_seconds": 600,
        "heartbeat_timeout_seconds": 120,
        "update_strategy": "replace",
        "unique_key": [],
        "secrets": [],
        **changes,
    }
    return TaskPayload(**fields)


def claimed(task: TaskPayload) -> ClaimResponse:
    return ClaimResponse(
        "Claimed",
        task.task_id,
        attempt=task.attempt,
        lease_token=uuid4(),
        capability_token="capability-of-the-attempt",
        task=task,
    )


def held_task(**changes: Any) -> HeldTask:
    task = payload(**changes)
    answer = claimed(task)
    assert answer.lease_token is not None
    return HeldTask(answer, task, answer.lease_token, ["receipt"])


Script = Callable[[ToOperator], Sequence[FromOperator | Exception]]


class ScriptedOperator:
    """``script`` gives the answers to a message; an exception is the end of the process."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._messages: asyncio.Queue[FromOperator | Exception] = asyncio.Queue()
        self.received: list[ToOperator] = []
        self.was_killed = False

    @property
    def owner(self) -> int | None:
        return None

    async def grant(self, reads: Sequence[str], writes: Sequence[str]) -> None:
        """It sees nothing anyway."""

    async def withdraw(self, places: Sequence[str], *, force: bool = False) -> list[str]:
        return []

    async def run(self, run: Run, log_fd: int) -> None:
        await self.send(run)

    async def send(self, message: ToOperator) -> None:
        if self.was_killed:
            raise OperatorGone("killed")
        self.received.append(message)
        for answer in self._script(message):
            self._messages.put_nowait(answer)

    async def receive(self) -> FromOperator:
        message = await self._messages.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def kill(self) -> None:
        self.was_killed = True
        self._messages.put_nowait(OperatorGone("killed by SIGKILL"))
