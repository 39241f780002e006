"""Who asks: an attempt of a task by its capability token, or a user by a bearer token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias
from uuid import UUID

from tracelake.contracts.token_claims import TokenClaims, TokenDataset


@dataclass(frozen=True, slots=True)
class UserCaller:
    """Sees what is published, in its current version."""

    user_id: UUID
    org_id: UUID
    name: str


@dataclass(frozen=True, slots=True)
class TaskCaller:
    """Sees exactly the datasets of its token, in the versions that stand there."""

    task_id: UUID
    attempt: int
    org_id: UUID
    datasets: tuple[TokenDataset, ...]

    @classmethod
    def of(cls, claims: TokenClaims) -> TaskCaller:
        return cls(claims.task_id, claims.attempt, claims.org_id, claims.datasets)


Caller: TypeAlias = UserCaller | TaskCaller
