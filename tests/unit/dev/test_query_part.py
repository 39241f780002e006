"""A stack whose machine can't confine queries comes up without them; any other failure of theirs is one."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from tracelake.dev.child_process import ChildSpec
from tracelake.dev.parts import QueryPart
from tracelake.domain.errors import Unavailable
from tracelake.query.engine.confinement import _not_confined


def part(folder: Path, said: str) -> QueryPart:
    program = f"import sys; print({said!r}); sys.exit(1)"
    return QueryPart(
        ChildSpec(
            name="query",
            argv=lambda: [sys.executable, "-c", program],
            ready=lambda pid: False,
            folder=folder,
            log=folder / "query.log",
            env=dict,
        )
    )


def test_a_service_that_refuses_to_run_unconfined_queries_is_done_without(tmp_path: Path) -> None:
    query = part(tmp_path, f"error: {_not_confined('no bwrap').message}")
    query.start(threading.Event())
    assert query.refused is not None
    assert "Install bubblewrap" in query.refused
    assert (query.alive, query.pid) == (True, None)
    query.stop()


def test_a_service_that_fails_otherwise_stops_the_start(tmp_path: Path) -> None:
    query = part(tmp_path, "error: the port is taken")
    with pytest.raises(Unavailable, match="the port is taken"):
        query.start(threading.Event())
    assert not query.alive
