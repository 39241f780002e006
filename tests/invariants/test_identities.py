"""What belongs to one job of one DAG is never another's, however their names look when they are joined."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from uuid import uuid4

import msgspec
import pytest

from tests.support.worker_tasks import payload
from tracelake.contracts.bundles import Invocation
from tracelake.contracts.dispatcher_api import JobRef, TaskPayload
from tracelake.worker.host.operator_pool import process_key
from tracelake.worker.lambda_.invoker import identity_of

ALIKE = [
    JobRef("col_team", "a_alerts"),
    JobRef("col_team_a", "alerts"),
    JobRef("col", "team_a_alerts"),
    JobRef("col_team-a", "alerts"),
    JobRef("col_team", "a-alerts"),
    JobRef("c" * 128, "a" * 128),
    JobRef("c" * 128, "a" * 127),
]


def test_jobs_whose_names_join_to_the_same_share_neither_function_nor_process() -> None:
    task = payload(runtime="lambda", udf={"bundle": "sha256:" + "0" * 64, "entrypoint": "app.handler"})
    tasks = [msgspec.structs.replace(task, job=job) for job in ALIKE]
    for one, other in itertools.combinations(tasks, 2):
        assert process_key(one) != process_key(other)
        assert identity_of(invocation(one)) != identity_of(invocation(other))


def invocation(task: TaskPayload) -> Invocation:
    return Invocation.of(task, task.task_id, datetime.now(UTC), "token")


@pytest.mark.parametrize("change", ["config", "operator", "outputs", "secrets", "udf"])
def test_a_job_that_is_defined_anew_shares_no_process_with_what_it_was(change: str) -> None:
    task = payload()
    changed = {
        "config": {"sql": "SELECT 1"},
        "operator": "other",
        "outputs": [msgspec.structs.replace(task.outputs[0], dataset_version=uuid4())],
        "secrets": ["KEY"],
        "udf": {"entrypoint": "x"},
    }[change]
    assert process_key(msgspec.structs.replace(task, **{change: changed})) != process_key(task)
    assert process_key(msgspec.structs.replace(task, task_id=uuid4(), attempt=2)) == process_key(task)
