"""Alerts as jobs publish them: a key, a block, a severity, an amount, a text and a time."""

from __future__ import annotations

import random
from uuid import UUID

import orjson

COLUMNS = {
    "org_id": "uuid",
    "dedupe_key": "text",
    "block_number": "bigint",
    "severity": "text",
    "amount": "numeric",
    "message": "text",
    "seen_at": "timestamptz",
}
UNIQUE = ["org_id", "dedupe_key"]
WRITTEN = (
    *COLUMNS,
    *("position", "producer", "scope_start", "scope_end", "revision", "made_at_revision", "written_at"),
)
_SEEN_AT = "2026-01-02T03:04:05.123456Z"

Record = dict[str, str | int]


class Records:
    """The same for the same seed; no key comes twice."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._next = 0

    def batch(self, size: int) -> list[Record]:
        return [self._one() for _ in range(size)]

    def _one(self) -> Record:
        self._next += 1
        dice = self._random
        return {
            "dedupe_key": f"{dice.getrandbits(64):016x}-{self._next}",
            "block_number": 20_000_000 + self._next // 50,
            "severity": "critical" if dice.random() < 0.1 else "info",
            "amount": str(dice.getrandbits(80)),
            "message": f"transfer {self._next} of {dice.getrandbits(40)} tokens",
            "seen_at": _SEEN_AT,
        }


def as_json(batch: list[Record]) -> bytes:
    return orjson.dumps(batch)


def as_csv(batch: list[Record], org_id: UUID, first: int) -> bytes:
    """The rows that the sink makes of a batch, as COPY takes them."""
    ends = ("bench/publisher", "0", "9", "0", "0", _SEEN_AT)
    lines = (
        ",".join((str(org_id), *map(str, record.values()), str(first + place), *ends))
        for place, record in enumerate(batch)
    )
    return ("\n".join(lines) + "\n").encode()
