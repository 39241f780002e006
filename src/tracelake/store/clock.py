"""The one clock: lease and retry times are compared with nothing else."""

from __future__ import annotations

from datetime import datetime

from tracelake.store.db import Transaction


async def now(tx: Transaction) -> datetime:
    row = await tx.fetchrow("SELECT tl_now() AS now")
    assert row is not None
    moment: datetime = row["now"]
    return moment
