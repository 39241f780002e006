"""What attempts leave for the next attempt of the same task.

One value per task: whoever saves takes the place of what was saved before. The caller holds the task's row and
has checked the fence, so a superseded attempt never overwrites what its successor saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from tracelake import sqlfiles
from tracelake.store.db import Transaction
from tracelake.store.tasks import TaskRow

SQL = sqlfiles.load("tracelake.store.sql", "operator_state.sql")


async def save(tx: Transaction, task: TaskRow, state: Any) -> None:
    """Null forgets: there is no difference between nothing saved and nothing to say."""
    if state is None:
        await tx.execute(SQL.forget, task.job_id, task.task_id)
    else:
        await tx.execute(SQL.save, task.task_id, state)


async def saved(tx: Transaction, task_ids: Sequence[UUID]) -> dict[UUID, Any]:
    """By task; those with nothing to resume from aren't there."""
    if not task_ids:
        return {}
    return {row["task_id"]: row["value"] for row in await tx.fetch(SQL.saved, list(task_ids))}
