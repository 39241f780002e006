"""Where the rows of a hot dataset are, for people with a SQL client."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import pytest

from tracelake.cli.dataset_commands import hot_table
from tracelake.contracts.user_api import DatasetSummary


@pytest.mark.parametrize(
    ("storage", "table"),
    [("postgres", "data.d_00000000000000000000000000000007"), ("parquet", None), ("none", None)],
)
def test_only_hot_datasets_have_a_table(storage: str, table: str | None) -> None:
    fields: dict[str, Any] = dict.fromkeys(DatasetSummary.__struct_fields__)
    fields |= {"dataset_uuid": UUID(int=1), "dataset_version": UUID(int=7), "revision": 0, "storage": storage}
    fields |= {"write_mode": "task", "dag_name": "chain", "output_index": 0, "output_name": "logs"}
    fields |= {"created_at": datetime(2026, 1, 1, tzinfo=UTC), "partitions": 0}
    assert hot_table(msgspec.convert(fields, DatasetSummary)) == table
