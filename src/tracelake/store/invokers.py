"""Invokers in the state database, so that every replica knows where functions are run."""

from __future__ import annotations

from dataclasses import dataclass

from tracelake import sqlfiles
from tracelake.contracts.bundles import FORGET_SECONDS, InvokerRegistration
from tracelake.store.db import Transaction

SQL = sqlfiles.load("tracelake.store.sql", "invokers.sql")


@dataclass(frozen=True, slots=True)
class InvokerRow:
    url: str
    concurrency: int


async def register(tx: Transaction, said: InvokerRegistration) -> bool:
    """Whether it has just come, or come back."""
    if said.concurrency == 0:
        await tx.execute(SQL.unregister, said.url)
        return False
    row = await tx.fetchrow(SQL.register, said.url, said.concurrency, FORGET_SECONDS)
    assert row is not None
    if row["came"]:
        await tx.execute(SQL.forget_silent)
    return bool(row["came"])


async def present(tx: Transaction) -> list[InvokerRow]:
    rows = await tx.fetch(SQL.present, FORGET_SECONDS)
    return [InvokerRow(row["url"], row["concurrency"]) for row in rows]
