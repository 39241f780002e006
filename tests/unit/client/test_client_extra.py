"""What the client needs beyond itself: missing, it is told with the extra that brings it."""

from __future__ import annotations

import sys
from uuid import uuid4

import pyarrow as pa
import pytest

from tracelake.client import Client
from tracelake.client.results import QueryResult

HINT = r"isn't installed, which this needs: pip install 'tracelake\[client\]'"


@pytest.mark.parametrize("module", ["pandas", "polars"])
def test_a_frame_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    result = QueryResult(pa.table({"n": [1]}), truncated=False, query_id=uuid4())
    assert len(getattr(result, f"to_{module}")()) == 1
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=f"{module} {HINT}"):
        getattr(result, f"to_{module}")()


def test_a_query_without_pyarrow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with (
        Client("http://127.0.0.1:9", "tlu_nobody") as client,
        pytest.raises(ModuleNotFoundError, match=f"pyarrow {HINT}"),
    ):
        client.query("SELECT 1")
