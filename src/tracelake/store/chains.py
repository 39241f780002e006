"""Followers of chains as they are now: read in one query, judged by ``domain.chain_status``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from tracelake.contracts.user_api import ChainPage, ChainStatus
from tracelake.domain.chain_status import FollowerFacts, PauseFact, follower_status
from tracelake.domain.operators.catalog import CATALOG
from tracelake.postgres import sqlfiles
from tracelake.store.db import Transaction

SQL = sqlfiles.load("tracelake.store.sql", "chains.sql")
_FOLLOWERS = [spec.name for spec in CATALOG.values() if spec.reports_chain_progress]
_NUMBERS = ("head", "tip", "lag", "finalized", "reorgs", "deepest_reorg", "blocks_per_second", "eta_seconds")
_TEXTS = ("endpoints", "endpoint_states", "endpoint_problems", "dissent")


async def chains(tx: Transaction) -> ChainPage:
    return ChainPage([_status(dict(row)) for row in await tx.fetch(SQL.followers, _FOLLOWERS)])


def _status(row: Mapping[str, Any]) -> ChainStatus:
    pauses = msgspec.convert(row["pauses"], list[PauseFact], strict=False)
    reported = row["progress"] or {}
    found = follower_status(
        FollowerFacts(
            now=row["now"],
            status=row["status"],
            runtime=row["runtime"],
            pauses=pauses,
            reported=reported,
            claimed_at=row["claimed_at"],
            lease_expires_at=row["lease_expires_at"],
            ready_at=row["ready_at"],
            ended_at=row["ended_at"],
            error_message=row["error_message"],
            failed_at=row["failed_at"],
        )
    )
    return msgspec.convert(
        {
            **row,
            **asdict(found),
            "running": row["status"] == "Running",
            # What an operator reports may be anything.
            **{name: _number(reported.get(name)) for name in _NUMBERS},
            **{name: _text(reported.get(name)) for name in _TEXTS},
        },
        ChainStatus,
    )


def _number(value: object) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
