"""Scopes that need no task, since no row of them can match the ``where`` of the job's triggering inputs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.dispatcher.test_steps_outputs import CONTENT, HASH, write
from tests.support.conversation import Conversation, Lease, dag, reactive, source, taken_back
from tracelake.contracts.dispatcher_api import OutputIn
from tracelake.contracts.manifest import Manifest, ManifestFile
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.upkeep import reconcile_partitions
from tracelake.domain.where_bounds import ColumnBounds


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


def reading(where: str | None, job: str = "work") -> dict[str, Any]:
    entry: dict[str, Any] = {"from": {"job": job, "output": 0}}
    return entry if where is None else {**entry, "where": where}


async def deploy(talk: Conversation, *where: str | None, storage: str = "parquet", **next_: Any) -> None:
    """``src`` makes scopes of ``work`` (and ``other``, for a second input), which ``next`` reads."""
    names = ("work", "other")[: len(where)]
    jobs = [reactive(name, "src", storage=storage) for name in names]
    inputs = [reading(text, name) for name, text in zip(names, where, strict=True)]
    await talk.deploy(dag(source(), *jobs, reactive("next", *inputs, **next_)))


async def commit(
    talk: Conversation, start: int, end: int, *columns: dict[str, ColumnBounds], job: str = "work"
) -> Lease:
    """A partition of one file for each of ``columns``; without any, one without rows."""
    if job == "work":
        await talk.trigger(start, end)
    lease = await talk.lease(job)
    step = (end - start + 1) // max(1, len(columns))
    files = [
        ManifestFile(
            location=write(lease, f"{job}_{start + n * step}_{start + (n + 1) * step - 1}.parquet"),
            rows=3,
            bytes=len(CONTENT),
            content_hash=HASH,
            min_block=start + n * step,
            max_block=start + (n + 1) * step - 1,
            columns=bounds or None,
        )
        for n, bounds in enumerate(columns)
    ]
    manifest = Manifest(files=tuple(files), schema_hash=HASH) if files else None
    await talk.complete(lease, OutputIn(0, start=start, end=end, row_count=3 * len(files), manifest=manifest))
    return lease


def severity(low: str, high: str) -> dict[str, ColumnBounds]:
    return {"severity": ColumnBounds(low, high, False)}


async def test_a_scope_that_cannot_match_gets_no_task(talk: Conversation) -> None:
    await deploy(talk, "severity = 'critical'")
    await commit(talk, 0, 9, severity("info", "warning"))
    assert await talk.queued("next") == []
    await commit(talk, 10, 19, severity("critical", "warning"))
    await talk.run("next")
    # One of its files is enough.
    await commit(talk, 20, 29, severity("info", "info"), severity("critical", "info"))
    await talk.run("next")
    assert await reconcile_partitions(talk.ctx) == 0, "what was skipped isn't missing"


async def test_blocks_and_numbers_of_rows_are_known_without_columns(talk: Conversation) -> None:
    await deploy(talk, "block_number >= 15")
    await commit(talk, 0, 9, {})
    assert await talk.queued("next") == []
    await commit(talk, 10, 19, {})
    await talk.run("next")
    await commit(talk, 20, 29)
    assert await talk.queued("next") == [], "there is no row at all"


async def test_rows_are_within_their_scope_wherever_they_are(talk: Conversation) -> None:
    await deploy(talk, "block_number >= 10", storage="none")
    for start in (0, 10):
        await talk.trigger(start, start + 9)
        await talk.run("work")
    await talk.only_queued("next")


async def test_whatever_is_not_known_may_match(talk: Conversation) -> None:
    await deploy(talk, "severity = 'critical'")
    await commit(talk, 0, 9, {})
    await talk.only_queued("next")


async def test_a_join_is_skipped_when_none_of_its_triggers_can_match(talk: Conversation) -> None:
    await deploy(talk, "severity = 'critical'", "n > 5")
    few, many = {"n": ColumnBounds(0, 5, False)}, {"n": ColumnBounds(0, 6, False)}
    await commit(talk, 0, 9, severity("info", "info"))
    await commit(talk, 0, 9, few, job="other")
    assert await talk.queued("next") == []
    await commit(talk, 10, 19, severity("info", "info"))
    await commit(talk, 10, 19, many, job="other")
    await talk.only_queued("next")


async def test_a_trigger_without_a_condition_always_counts(talk: Conversation) -> None:
    await deploy(talk, "severity = 'critical'", None)
    await commit(talk, 0, 9, severity("info", "info"))
    await commit(talk, 0, 9, {}, job="other")
    await talk.only_queued("next")


async def test_a_job_that_stores_rows_runs_as_it_may_make_rows_of_none(talk: Conversation) -> None:
    await deploy(
        talk, "severity = 'critical'", storage="parquet", outputs=[{"name": "kept", "storage": "parquet"}]
    )
    await commit(talk, 0, 9, severity("info", "info"))
    await talk.only_queued("next")


async def test_a_job_that_triggers_others_runs(talk: Conversation) -> None:
    jobs = (reactive("work", "src", storage="parquet"), reactive("next", reading("severity = 'critical'")))
    await talk.deploy(dag(source(), *jobs, reactive("last", "next")))
    await commit(talk, 0, 9, severity("info", "info"))
    await talk.run("next")
    await talk.only_queued("last")


async def test_an_invalidated_scope_runs_to_retract_what_was_published(talk: Conversation) -> None:
    await deploy(talk, "severity = 'critical'")
    await commit(talk, 0, 9, severity("critical", "critical"))
    await talk.run("next")
    await talk.trigger(100, 109)
    beside = await talk.lease("work")
    await talk.emit(beside, taken_back(await talk.dataset("work"), 0, 9))
    again = await talk.lease("work")
    assert again.read.start == 0
    uri = write(again, "work_0_9.parquet")
    file = ManifestFile(
        location=uri, rows=3, bytes=len(CONTENT), content_hash=HASH, columns=severity("info", "info")
    )
    manifest = Manifest(files=(file,), schema_hash=HASH)
    await talk.complete(again, OutputIn(0, start=0, end=9, row_count=3, manifest=manifest))
    assert (await talk.lease("next")).read.start == 0


async def test_skipped_scopes_are_counted(talk: Conversation) -> None:
    await deploy(talk, "n > 5")
    await commit(talk, 0, 9, {"n": ColumnBounds(0, 5, False)})
    await commit(talk, 10, 19, {"n": ColumnBounds(0, 5, True)})
    assert await talk.query("SELECT range_start, range_end FROM skipped_scope ORDER BY 1") == [
        (0, 9),
        (10, 19),
    ]
    assert talk.ctx.metrics.skipped._value.get() == 2
