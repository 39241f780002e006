"""A relation as it is handed to a slot: open descriptors, never paths.

Its rows are those of all ``files`` (Parquet, open for reading) and all ``tables`` (memory files with one Arrow IPC
stream or file each), columns matched by name and cast to the types of ``columns``. Neither means no rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType

import pyarrow as pa


class AttachedRelation:
    """Owns its descriptors: ``close`` it (or use ``with``) once ``Slot.run`` has returned; closing twice is fine.

    ``columns`` are the relation's columns in their order, of which ``files`` and ``tables`` need to hold only
    those that the query uses: one that a file or table lacks is NULL there."""

    def __init__(
        self,
        name: str,
        columns: pa.Schema,
        *,
        files: Sequence[int] = (),
        tables: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.columns = columns
        self.files = list(files)
        self.tables = list(tables)

    def bytes(self) -> int:
        return sum(os.fstat(descriptor).st_size for descriptor in (*self.files, *self.tables))

    def close(self) -> None:
        files, self.files = self.files, []
        tables, self.tables = self.tables, []
        for descriptor in (*files, *tables):
            os.close(descriptor)

    def __enter__(self) -> AttachedRelation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"AttachedRelation({self.name}, {len(self.files)} files, {len(self.tables)} tables)"
