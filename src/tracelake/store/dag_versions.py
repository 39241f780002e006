"""The files that a DAG was deployed by, as they were: for people who look back, and for rollbacks."""

from __future__ import annotations

from uuid import UUID

import msgspec

from tracelake import sqlfiles
from tracelake.contracts.user_api import (
    DagVersionDetail,
    DagVersionPage,
    DagVersionQuery,
    DagVersionSummary,
)
from tracelake.domain.errors import NotFound
from tracelake.store.db import Transaction

SQL = sqlfiles.load("tracelake.store.sql", "dag_versions.sql")

_NEWEST = 2**31 - 1


async def versions(tx: Transaction, org_id: UUID, dag: str, query: DagVersionQuery) -> DagVersionPage:
    active = await tx.fetchrow(SQL.active_version, org_id, dag)
    if active is None:
        raise _unknown_dag(dag)
    rows = await tx.fetch(SQL.list_versions, org_id, dag, query.after or _NEWEST, query.limit + 1)
    page = [msgspec.convert(dict(row), DagVersionSummary) for row in rows[: query.limit]]
    following = str(page[-1].version) if len(rows) > query.limit else None
    return DagVersionPage(dag, active["active_version"], page, following)


async def version(tx: Transaction, org_id: UUID, dag: str, number: int) -> DagVersionDetail:
    row = await tx.fetchrow(SQL.version, org_id, dag, number)
    if row is None:
        if await tx.fetchrow(SQL.active_version, org_id, dag) is None:
            raise _unknown_dag(dag)
        raise NotFound("UnknownVersion", f"DAG {dag} has no version {number}")
    return msgspec.convert(dict(row), DagVersionDetail)


def _unknown_dag(dag: str) -> NotFound:
    return NotFound("UnknownDag", f"there is no DAG {dag}")
