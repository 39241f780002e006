"""Bundles in the state database: what is known of each zip file in the object store."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

import msgspec

from tracelake import sqlfiles
from tracelake.contracts.bundles import BundleDetail, BundlePage, BundleQuery, BundleSummary
from tracelake.domain.bundle_zip import BundleListing
from tracelake.domain.errors import NotFound
from tracelake.store.db import Row, Transaction

SQL = sqlfiles.load("tracelake.store.sql", "bundles.sql")
PREFIX = "sha256:"
_NEWEST = 2**63 - 1


async def add(
    tx: Transaction, org_id: UUID, sha256: str, size: int, listing: BundleListing, pushed_by: str
) -> bool:
    """Whether it is new."""
    added = await tx.fetch(
        SQL.add,
        sha256,
        org_id,
        size,
        listing.unpacked_bytes,
        list(listing.names),
        sorted(listing.executables),
        pushed_by,
    )
    return bool(added)


async def find(tx: Transaction, sha256: str) -> BundleDetail:
    row = await tx.fetchrow(SQL.find, sha256)
    if row is None:
        raise NotFound("UnknownBundle", f"there is no bundle {PREFIX}{sha256[:64]}")
    return msgspec.convert(_named(row), BundleDetail)


async def listings(tx: Transaction, references: Iterable[str]) -> dict[str, BundleListing]:
    """Of the given references, ``sha256:…``, those that are here."""
    hashes = [reference.removeprefix(PREFIX) for reference in references]
    rows = await tx.fetch(SQL.listings, hashes) if hashes else []
    return {
        PREFIX + row["sha256"]: BundleListing(
            tuple(row["names"]), frozenset(row["executables"]), row["unpacked_bytes"]
        )
        for row in rows
    }


async def page(tx: Transaction, query: BundleQuery) -> BundlePage:
    rows = await tx.fetch(SQL.page, query.after or _NEWEST, query.limit + 1)
    shown = rows[: query.limit]
    following = str(shown[-1]["seq"]) if len(rows) > query.limit else None
    return BundlePage([msgspec.convert(_named(row), BundleSummary) for row in shown], following)


def _named(row: Row) -> dict[str, object]:
    return {**row, "bundle": PREFIX + row["sha256"]}
