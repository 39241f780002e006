"""Functions in the state database: the contents of bundles, whose files are in the object store, and the invokers.

Invokers are rows, so that every replica knows where functions are run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

import msgspec

from tracelake.contracts.bundles import (
    FORGET_SECONDS,
    BundleDetail,
    BundlePage,
    BundleQuery,
    BundleSummary,
    InvokerRegistration,
)
from tracelake.domain.bundles import BundleListing
from tracelake.domain.errors import NotFound
from tracelake.postgres import sqlfiles
from tracelake.store.db import Row, Transaction

SQL = sqlfiles.load("tracelake.store.sql", "functions.sql")
PREFIX = "sha256:"
# The largest bigint: the first page begins above every row.
_NEWEST = 2**63 - 1


async def add_bundle(
    tx: Transaction, org_id: UUID, sha256: str, size: int, listing: BundleListing, pushed_by: str
) -> bool:
    """Returns whether it is new."""
    added = await tx.fetch(
        SQL.add_bundle,
        sha256,
        org_id,
        size,
        listing.unpacked_bytes,
        list(listing.names),
        sorted(listing.executables),
        pushed_by,
    )
    return bool(added)


async def find_bundle(tx: Transaction, sha256: str) -> BundleDetail:
    row = await tx.fetchrow(SQL.find_bundle, sha256)
    if row is None:
        # Cut, since the text is the caller's and may have any length.
        raise NotFound("UnknownBundle", f"there is no bundle {PREFIX}{sha256[:64]}")
    return msgspec.convert(_named(row), BundleDetail)


async def bundle_listings(tx: Transaction, references: Iterable[str]) -> dict[str, BundleListing]:
    """The listings of those references (``sha256:…``) that are known."""
    hashes = [reference.removeprefix(PREFIX) for reference in references]
    rows = await tx.fetch(SQL.bundle_listings, hashes) if hashes else []
    return {
        PREFIX + row["sha256"]: BundleListing(
            tuple(row["names"]), frozenset(row["executables"]), row["unpacked_bytes"]
        )
        for row in rows
    }


async def list_bundles(tx: Transaction, query: BundleQuery) -> BundlePage:
    rows = await tx.fetch(SQL.page_of_bundles, query.after or _NEWEST, query.limit + 1)
    shown = rows[: query.limit]
    following = str(shown[-1]["seq"]) if len(rows) > query.limit else None
    return BundlePage([msgspec.convert(_named(row), BundleSummary) for row in shown], following)


def _named(row: Row) -> dict[str, object]:
    return {**row, "bundle": PREFIX + row["sha256"]}


@dataclass(frozen=True, slots=True)
class InvokerRow:
    url: str
    concurrency: int


async def register_invoker(tx: Transaction, registration: InvokerRegistration) -> bool:
    """Returns whether it has just come, or come back."""
    # An invoker that stops registers with no slots, so that no more leases are offered to it.
    if registration.concurrency == 0:
        await tx.execute(SQL.unregister_invoker, registration.url)
        return False
    row = await tx.fetchrow(SQL.register_invoker, registration.url, registration.concurrency, FORGET_SECONDS)
    assert row is not None
    # Rarely enough: registrations come every few seconds, and need not delete rows each time.
    if row["came"]:
        await tx.execute(SQL.forget_silent_invokers)
    return bool(row["came"])


async def present_invokers(tx: Transaction) -> list[InvokerRow]:
    rows = await tx.fetch(SQL.present_invokers, FORGET_SECONDS)
    return [InvokerRow(row["url"], row["concurrency"]) for row in rows]
