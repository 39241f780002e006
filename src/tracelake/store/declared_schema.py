"""A buffered dataset's schema as people see it: what jobs publish, then what the platform adds."""

from __future__ import annotations

from typing import Any

import msgspec

from tracelake.contracts.user_api import DatasetColumn, DatasetSchema
from tracelake.domain.buffer_schema import PLATFORM_COLUMNS, BufferSchema


def declared_schema(stored: Any) -> DatasetSchema | None:
    if stored is None:
        return None
    schema = msgspec.convert(stored, BufferSchema)
    declared = [DatasetColumn(column.name, column.type.value) for column in schema.columns]
    added = [
        DatasetColumn(name, kind, "platform")
        for name, kind in PLATFORM_COLUMNS.items()
        if schema.column(name) is None
    ]
    return DatasetSchema(declared + added, list(schema.unique))
