"""What attempts leave for the next attempt of the same task.

One value per task: whoever saves takes the place of what was saved before. The caller holds the task's row and
has checked the fence, so a superseded attempt never overwrites what its successor saved.
"""

from __future__ import annotations

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


async def saved(tx: Transaction, task_id: UUID) -> Any:
    """None when there is nothing to resume from."""
    row = await tx.fetchrow(SQL.saved, task_id)
    return row["value"] if row else None
