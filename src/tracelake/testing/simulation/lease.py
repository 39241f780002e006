"""A lease as its holder knows it, and what a holder does with it besides its work."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from uuid import UUID

from tracelake.contracts.dispatcher_api import (
    ClaimResponse,
    CompleteRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    TaskPayload,
)
from tracelake.testing.simulation import calls
from tracelake.testing.simulation.world import World


class Word(Enum):
    """What a heartbeat told the holder."""

    GO_ON = "go on"
    CANCEL = "cancel"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Lease:
    payload: TaskPayload
    attempt: int
    token: UUID

    @classmethod
    def of(cls, answer: ClaimResponse) -> Lease | None:
        if answer.task is None or answer.attempt is None or answer.lease_token is None:
            return None
        return cls(answer.task, answer.attempt, answer.lease_token)

    @property
    def task_id(self) -> UUID:
        return self.payload.task_id

    def ended(self, status: str, *, retryable: bool = True) -> CompleteRequest:
        match status:
            case "Failed":
                return CompleteRequest(
                    self.task_id, "Failed", self.attempt, self.token, error_message="no", retryable=retryable
                )
            case "Released":
                return CompleteRequest(self.task_id, "Released", self.attempt, self.token)
            case "Canceled":
                return CompleteRequest(self.task_id, "Canceled", self.attempt, self.token)
            case _:
                return CompleteRequest(self.task_id, "Completed", self.attempt, self.token)

    async def beat(self, world: World) -> Word:
        answer = await calls.beat(world, HeartbeatRequest(self.task_id, self.attempt, self.token))
        if isinstance(answer, HeartbeatResponse):
            return Word.CANCEL if answer.cancel else Word.GO_ON
        return Word.LOST
