"""All of it at once: a node that reorganises and shrinks, an endpoint that lies, processes that die."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chain_soak.run import run

# Not beside the demo: each takes the whole machine.
pytestmark = pytest.mark.xdist_group("whole_stack")

MISHAPS = (
    "reorg",
    "shrink",
    "wrong_answers",
    "follower_killed",
    "spark_worker_killed",
    "spark_server_killed",
    "data_database_killed",
    "dispatcher_killed",
    "killed_between_commit_and_event",
    "killed_before_its_event_was_answered",
    "stopped_past_its_lease",
)


# A run goes on until everything has happened once, however short it is to be.
@pytest.mark.parametrize("seconds", [1, pytest.param(300, marks=pytest.mark.long)])
def test_every_table_equals_what_the_node_says_after_reorgs_and_crashes(tmp_path: Path, seconds: int) -> None:
    lines: list[str] = []
    report = run(tmp_path, seconds=seconds, seed=4, say=lines.append)
    assert report.wrong == [], "\n".join(lines)
    assert [name for name in MISHAPS if not report.happened.get(name)] == [], "\n".join(lines)
    assert report.happened["looks"]
    assert report.happened["reorgs_followed"]
