"""An attempt that can't be prepared fails; the worker itself never does."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.support.worker_tasks import ScriptedOperator, held_task
from tracelake.contracts.dispatcher_api import CompleteRequest, PayloadOutput
from tracelake.contracts.operator_protocol import Finished, FromOperator, Run, SparkTarget, ToOperator
from tracelake.domain.errors import Unavailable
from tracelake.leases.dispatcher_client import DispatcherClient
from tracelake.leases.held_task import HeldTask, Stop
from tracelake.settings import Secret
from tracelake.tokens.named_secrets import SecretProvider
from tracelake.worker.attempt import AttemptRunner
from tracelake.worker.host.operator_pool import ProcessKey
from tracelake.worker.host.operator_process import OperatorGone
from tracelake.worker.operator_session import AttemptProcess
from tracelake.worker.settings import WorkerSettings


class OneOperator:
    """A supply of one process, or of none."""

    available = True

    def __init__(self, process: ScriptedOperator | Exception) -> None:
        self.process = process
        self.given_back: list[bool] = []

    async def take(self, use: ProcessKey | None = None) -> AttemptProcess:
        if isinstance(self.process, Exception):
            raise self.process
        return self.process

    async def give_back(self, process: AttemptProcess, *, reusable: bool) -> None:
        self.given_back.append(reusable)

    async def use_spark(self, target: SparkTarget | None) -> None:
        raise AssertionError("there is no Spark here")


def completes(heard: ToOperator) -> list[FromOperator | Exception]:
    return [Finished(status="Completed")] if isinstance(heard, Run) else []


async def run(
    folder: Path, operators: OneOperator, held: HeldTask, *, logs: Path | None = None, **environment: str
) -> CompleteRequest:
    settings = WorkerSettings(
        runtime="ecs_python",
        internal_url="http://127.0.0.1:1",
        worker_token=Secret("worker-token"),
        queue_dsn=Secret("dsn"),
        queue="ecs_python",
        objects=f"file://{folder / 'objects'}",
        log_folder=logs or folder / "logs",
        work_folder=folder / "work",
        worker_id="test",
    )
    client = DispatcherClient(settings.internal_url, settings.worker_token)
    runner = AttemptRunner(
        settings=settings,
        object_root=folder / "objects",
        operators=operators,
        client=client,
        secrets=SecretProvider(
            {f"TRACELAKE_SECRET_{name}": value for name, value in environment.items()}, None
        ),
        committer=None,
        engine=None,
        on_progress=lambda _: None,
    )
    try:
        report = await runner.run(held)
    finally:
        await client.close()
    assert report is not None
    return report


def parquet(staging: str) -> list[PayloadOutput]:
    return [PayloadOutput(0, "rows", uuid4(), uuid4(), "parquet", 0, staging=staging)]


async def test_a_process_that_is_as_before_is_used_again_one_that_held_secrets_is_not(tmp_path: Path) -> None:
    for names, reusable in (([], True), (["KEY"], False)):
        operators = OneOperator(ScriptedOperator(completes))
        report = await run(tmp_path, operators, held_task(secrets=names), KEY="of the operator")
        assert report.status == "Completed"
        assert operators.given_back == [reusable]


async def test_the_operator_gets_its_own_variables_and_its_secrets_cannot_replace_them(
    tmp_path: Path,
) -> None:
    process = ScriptedOperator(completes)
    held = held_task(secrets=["KEY", "TRACE_TASK_ID"])
    await run(tmp_path, OneOperator(process), held, KEY="of the operator", TRACE_TASK_ID="another")
    [told] = process.received
    assert isinstance(told, Run)
    assert told.environment == {
        "KEY": "of the operator",
        "TRACE_TASK_CAPABILITY_TOKEN": held.token.reveal(),
        "TRACE_TASK_ID": str(held.task_id),
        "TRACE_ATTEMPT": "1",
        "TRACE_LEASE_TOKEN": str(held.lease_token),
        "TRACE_DISPATCHER_URL": "http://127.0.0.1:1",
    }


@pytest.mark.parametrize(
    ("staging", "retryable"),
    [("objects/dataset/1-1/", True), ("elsewhere/1-1/", False)],
    ids=["a disk that takes nothing", "a place outside of the objects"],
)
async def test_staging_that_cannot_be_made_fails_the_attempt(
    tmp_path: Path, staging: str, retryable: bool
) -> None:
    (tmp_path / "objects").write_text("not a folder, as a full disk would have it")
    held = held_task(outputs=parquet(f"file://{tmp_path}/{staging}"))
    report = await run(tmp_path, OneOperator(ScriptedOperator(completes)), held)
    assert (report.status, report.retryable) == ("Failed", retryable)
    assert "could not be started" in (report.error_message or "")


async def test_work_goes_on_without_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "full").touch()

    def fails(heard: ToOperator) -> list[FromOperator | Exception]:
        return [Finished(status="Failed", error_message="said")] if isinstance(heard, Run) else []

    for script, status in ((completes, "Completed"), (fails, "Failed")):
        operators = OneOperator(ScriptedOperator(script))
        report = await run(tmp_path, operators, held_task(), logs=tmp_path / "full" / "logs")
        assert report.status == status


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("NoOperatorHost", "none to be had"),
        OperatorGone("none to be had"),
        KeyError("none to be had"),
    ],
)
async def test_whatever_keeps_an_operator_from_starting_is_told(tmp_path: Path, error: Exception) -> None:
    report = await run(tmp_path, OneOperator(error), held_task())
    assert (report.status, report.retryable) == ("Failed", True)
    assert "none to be had" in (report.error_message or "")


async def test_a_task_that_was_canceled_before_its_turn_is_not_run(tmp_path: Path) -> None:
    process = ScriptedOperator(completes)
    held = held_task()
    held.stop(Stop.CANCELED)
    assert (await run(tmp_path, OneOperator(process), held)).status == "Canceled"
    assert process.received == []


async def test_an_attempt_that_takes_too_long_is_killed_and_a_source_never_does(tmp_path: Path) -> None:
    def sleeps(heard: ToOperator) -> list[FromOperator | Exception]:
        return []

    process = ScriptedOperator(sleeps)
    report = await run(tmp_path, OneOperator(process), held_task(timeout_seconds=0.05))
    assert process.was_killed
    assert "timed out" in (report.error_message or "")
    source: dict[str, Any] = {"inputs": [], "timeout_seconds": 0}
    assert (
        await run(tmp_path, OneOperator(ScriptedOperator(completes)), held_task(**source))
    ).status == "Completed"
