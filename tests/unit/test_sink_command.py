"""``tracelake sink``: where it learns how to reach the stack, and what it says when it can't."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracelake.cli.sink_command import _facts
from tracelake.domain.errors import Unavailable

GIVEN = {
    "TRACELAKE_INTERNAL_URL": "http://127.0.0.1:1",
    "TRACELAKE_WORKER_TOKEN": "a-worker-token",
    "TRACELAKE_QUEUE_DSN": "postgresql://queue",
    "TRACELAKE_DATA_DSN": "postgresql://data",
}


def test_what_the_environment_says_is_taken_out_of_it(tmp_path: Path) -> None:
    environment = {**GIVEN, "TRACELAKE_OBJECT_ROOT": str(tmp_path), "PATH": "/bin"}
    facts = _facts(tmp_path, environment)
    assert environment == {"PATH": "/bin"}
    assert (facts.internal_url, facts.object_root) == ("http://127.0.0.1:1", tmp_path)
    assert facts.data_dsn.reveal() == "postgresql://data"
    assert "a-worker-token" not in repr(facts)
    assert "postgresql" not in repr(facts)


def test_without_a_stack_it_says_what_is_missing(tmp_path: Path) -> None:
    environment = {name: value for name, value in GIVEN.items() if name != "TRACELAKE_DATA_DSN"}
    with pytest.raises(Unavailable) as refused:
        _facts(tmp_path, environment)
    assert "tracelake dev" in refused.value.message
    assert refused.value.message.endswith("by TRACELAKE_DATA_DSN")
