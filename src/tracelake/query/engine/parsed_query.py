"""What the gate found out about a query: the relations it reads, how it uses each, and its parameters.

Made in the confined process from the engine's own tree and sent to the service as JSON; so it holds plain data
alone and is decoded strictly. Names are in lower case, as the engine compares them without regard to case.
A use says what may be left out when the relation is read: columns that aren't named in it and rows that don't
fulfil its predicate change nothing in the answer. It speaks of names as they stand in the SQL, since the gate
knows no schema; ``fit_relation.fit`` turns it into columns and a predicate of one relation.
"""

from __future__ import annotations

from typing import Self

import msgspec

from tracelake.domain.where import Predicate


class RelationUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``columns``: names that may be columns of this relation, sorted; None is all columns. ``predicate``: in the
    literal forms of ``sql_literal``, to be read through ``fit_relation.fit`` only; None is all rows."""

    columns: tuple[str, ...] | None = None
    predicate: Predicate | None = None


class ParsedQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``parameters``: the identifiers in order of appearance, "1", "2" … for positional ones, otherwise names."""

    relations: dict[str, RelationUse]
    parameters: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        return msgspec.json.decode(data, type=cls)
