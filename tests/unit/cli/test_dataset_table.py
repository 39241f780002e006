"""Where the rows of a hot dataset are, for people with a SQL client."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import pytest

from tracelake.cli.datasets import hot_table, lag
from tracelake.contracts.user_api import DatasetDetail, DatasetLag, DatasetSummary

SEVEN = "data.d_00000000000000000000000000000007"
EIGHT = "data.d_00000000000000000000000000000008"


@pytest.mark.parametrize(
    ("storage", "hot", "table"),
    [("postgres", None, SEVEN), ("parquet", None, None), ("none", None, None), ("parquet", 8, EIGHT)],
)
def test_only_hot_datasets_have_a_table(storage: str, hot: int | None, table: str | None) -> None:
    fields: dict[str, Any] = dict.fromkeys(DatasetSummary.__struct_fields__)
    fields |= {"dataset_uuid": UUID(int=1), "dataset_version": UUID(int=7), "revision": 0, "storage": storage}
    fields |= {"write_mode": "task", "dag_name": "chain", "output_index": 0, "output_name": "logs"}
    fields |= {"created_at": datetime(2026, 1, 1, tzinfo=UTC), "partitions": 0}
    fields |= {"hot_version": None if hot is None else UUID(int=hot)}
    assert hot_table(msgspec.convert(fields, DatasetDetail)) == table


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (DatasetLag(3, 1.6), "3 behind, 2 s since the last commit"),
        (DatasetLag(None, 0.1), "0 s since the last commit"),
        (DatasetLag(None, None), None),
        (None, None),
    ],
)
def test_a_lag_says_what_is_known_of_it(known: DatasetLag | None, said: str | None) -> None:
    assert lag(known) == said
