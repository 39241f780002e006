"""Output commits: files that are there, scopes of the task's own, and one current partition per block."""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import pytest

from tests.support.conversation import Conversation, Lease, dag, reactive, source
from tracelake.contracts.dispatcher_api import OutputIn
from tracelake.contracts.manifest import Manifest, ManifestFile
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import Conflict, Forbidden, Invalid

CONTENT = b"PAR1 rows PAR1"
HASH = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


async def running(talk: Conversation, start: int = 0, end: int = 9, **fields: object) -> Lease:
    fields = {"storage": "parquet", **fields}
    await talk.deploy(dag(source(), reactive("work", "src", **fields), reactive("next", "work")))
    await talk.trigger(start, end)
    return await talk.lease("work")


def write(lease: Lease, name: str, index: int = 0) -> str:
    """A file in the attempt's staging place, as a worker would write it; its URI."""
    staging = lease.payload.outputs[index].staging
    assert staging is not None
    file = Path(unquote(urlsplit(staging).path)) / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(CONTENT)
    return staging + name


def manifest(*locations: str, rows: int = 3, size: int = len(CONTENT)) -> Manifest:
    files = tuple(ManifestFile(location=uri, rows=rows, bytes=size, content_hash=HASH) for uri in locations)
    return Manifest(files=files, schema_hash=HASH, verified="full")


async def partitions(talk: Conversation) -> list[dict[str, object]]:
    rows = await talk.query("SELECT * FROM partition WHERE stored ORDER BY partition_id")
    return [dict(row) for row in rows]


async def test_a_completion_points_the_partition_at_the_reported_files(talk: Conversation) -> None:
    lease = await running(talk)
    files = [write(lease, "work_0_4.parquet"), write(lease, "work_5_9.parquet")]
    staging = lease.payload.outputs[0].staging
    output = OutputIn(0, location=staging, start=0, end=9, row_count=6, manifest=manifest(*files))
    await talk.complete(lease, output)
    [partition] = await partitions(talk)
    assert (partition["current"], partition["row_count"], partition["location"]) == (True, 6, staging)
    assert (partition["task_id"], partition["attempt"]) == (lease.task_id, 1)
    assert partition["epoch"] == lease.payload.epoch
    committed = partition["manifest"]
    assert isinstance(committed, dict)
    assert [file["location"] for file in committed["files"]] == files
    assert committed["verified"] == "full"
    await talk.only_queued("next")


async def test_without_a_manifest_the_files_that_are_there_are_committed(talk: Conversation) -> None:
    lease = await running(talk)
    file = write(lease, "work_0_9.parquet")
    await talk.complete(
        lease, OutputIn(0, location=lease.payload.outputs[0].staging, start=0, end=9, row_count=3)
    )
    write(lease, "work_3_4.parquet")
    [partition] = await partitions(talk)
    committed = partition["manifest"]
    assert isinstance(committed, dict)
    assert [entry["location"] for entry in committed["files"]] == [file]


async def test_an_empty_output_says_so_and_needs_no_files(talk: Conversation) -> None:
    lease = await running(talk)
    await talk.complete(lease, OutputIn(0, start=0, end=9, row_count=0))
    [partition] = await partitions(talk)
    assert (partition["current"], partition["row_count"]) == (True, 0)


async def refused_output(talk: Conversation, lease: Lease, *outputs: OutputIn) -> str:
    """The reason for which a completion is refused; nothing may have changed."""
    before = await talk.everything()
    with pytest.raises((Invalid, Forbidden)) as refused:
        await talk.complete(lease, *outputs)
    assert await talk.everything() == before
    return refused.value.reason


async def test_files_that_are_missing_refuse_the_completion(talk: Conversation) -> None:
    lease = await running(talk)
    staging = lease.payload.outputs[0].staging
    assert staging is not None
    gone = manifest(staging + "work_0_9.parquet")
    base = {"start": 0, "end": 9}
    assert await refused_output(talk, lease, OutputIn(0, **base, location=staging)) == "OutputMissing"
    assert await refused_output(talk, lease, OutputIn(0, **base, manifest=gone)) == "OutputMissing"
    assert await refused_output(talk, lease, OutputIn(0, **base, row_count=3)) == "OutputMissing"
    write(lease, "work_0_9.parquet")
    wrong_size = manifest(staging + "work_0_9.parquet", size=1)
    assert await refused_output(talk, lease, OutputIn(0, **base, manifest=wrong_size)) == "OutputSizeMismatch"


async def test_files_outside_the_attempts_own_staging_refuse_the_completion(talk: Conversation) -> None:
    lease = await running(talk)
    old = write(lease, "work_0_9.parquet")
    await talk.complete(lease, status="Released")
    current = await talk.lease(lease.task_id)
    for place in (old, str(talk.ctx.objects.root.uri), "s3://elsewhere/x/"):
        output = OutputIn(0, start=0, end=9, location=place)
        assert await refused_output(talk, current, output) == "OutputOutsideStaging"
    listed = OutputIn(0, start=0, end=9, manifest=manifest(old))
    assert await refused_output(talk, current, listed) == "OutputOutsideStaging"


async def test_files_of_another_range_refuse_the_completion(talk: Conversation) -> None:
    lease = await running(talk)
    output = OutputIn(0, start=0, end=9, manifest=manifest(write(lease, "work_0_10.parquet")))
    assert await refused_output(talk, lease, output) == "OutputRangeInvalid"


async def test_an_output_outside_of_the_tasks_scope_is_refused(talk: Conversation) -> None:
    lease = await running(talk)
    output = OutputIn(0, start=0, end=10, row_count=0)
    assert await refused_output(talk, lease, output) == "OutputOutsideScope"


async def test_an_output_must_be_the_jobs_own(talk: Conversation) -> None:
    lease = await running(talk)
    scope = {"start": 0, "end": 9, "row_count": 0}
    assert await refused_output(talk, lease, OutputIn(1, **scope)) == "UnknownOutput"
    foreign = OutputIn(0, dataset_uuid=await talk.dataset("src"), **scope)
    assert await refused_output(talk, lease, foreign) == "NotYourDataset"
    assert (
        await refused_output(talk, lease, OutputIn(0, dataset_version=uuid4(), **scope)) == "UnknownVersion"
    )


async def test_an_output_has_one_scope_that_agrees_with_itself(talk: Conversation) -> None:
    lease = await running(talk)
    for scope in (
        {},
        {"cursor": 9, "start": 0, "end": 9},
        {"partition_key": "0-8", "start": 0, "end": 9},
        {"start": 0},
    ):
        assert await refused_output(talk, lease, OutputIn(0, **scope, row_count=0)) == "InvalidScope"


async def test_a_scope_is_done_when_all_its_stored_outputs_are(talk: Conversation) -> None:
    outputs = [{"name": "a", "storage": "parquet"}, {"name": "b", "storage": "parquet"}, {"name": "c"}]
    lease = await running(talk, outputs=outputs)
    one = OutputIn(0, start=0, end=9, row_count=0)
    assert await refused_output(talk, lease, one) == "OutputMissing"
    await talk.complete(lease, one, OutputIn(1, start=0, end=9, row_count=0))


async def test_a_partition_that_cuts_through_a_current_one_is_refused(talk: Conversation) -> None:
    await talk.complete(await running(talk), OutputIn(0, start=0, end=9, row_count=0))
    await talk.trigger(5, 14)
    lease = await talk.lease("work")
    before = await talk.everything()
    with pytest.raises(Invalid) as refused:
        await talk.complete(lease, OutputIn(0, start=5, end=14, row_count=0))
    assert refused.value.reason == "PartitionOverlap"
    assert "blocks 5-14 would cut through the partition 0-9, which is committed" in refused.value.message
    assert "ask for 0-14" in refused.value.message
    assert await talk.everything() == before
    assert (await talk.fail(lease, retryable=False)).task_status == "Failed"


async def test_a_partition_within_a_current_one_is_refused_and_says_that_nothing_is_missing(
    talk: Conversation,
) -> None:
    await talk.complete(await running(talk), OutputIn(0, start=0, end=9, row_count=0))
    await talk.trigger(2, 4)
    with pytest.raises(
        Invalid, match=r"2-4 lie within the partition 0-9.*none of them is missing.*all of 0-9"
    ):
        await talk.complete(await talk.lease("work"), OutputIn(0, start=2, end=4, row_count=0))
    assert await talk.scopes("work") == [(0, 9)]


async def test_a_partition_that_covers_current_ones_replaces_them(talk: Conversation) -> None:
    await talk.complete(await running(talk), OutputIn(0, start=0, end=9, row_count=0))
    await talk.trigger(10, 19)
    await talk.run("work")
    await talk.trigger(0, 29)
    await talk.run("work")
    assert await talk.scopes("work") == [(0, 29)]
    assert [row["current"] for row in await partitions(talk)] == [False, False, True]


async def test_one_completion_may_commit_a_scope_in_parts_that_do_not_touch(talk: Conversation) -> None:
    lease = await running(talk)
    parts = [OutputIn(0, start=0, end=4, row_count=0), OutputIn(0, start=5, end=9, row_count=0)]
    await talk.complete(lease, *parts)
    assert await talk.scopes("work") == [(0, 4), (5, 9)]
    assert len(await talk.queued("next")) == 2


async def test_one_completion_never_commits_a_block_twice(talk: Conversation) -> None:
    lease = await running(talk)
    parts = [OutputIn(0, start=0, end=5, row_count=0), OutputIn(0, start=5, end=9, row_count=0)]
    with pytest.raises(Invalid) as refused:
        await talk.complete(lease, *parts)
    assert refused.value.reason == "PartitionOverlap"
    assert await talk.scopes("work") == []


async def test_a_completion_without_storage_needs_no_files(talk: Conversation) -> None:
    lease = await running(talk, storage="none", operator="quiet")
    assert (await talk.complete(lease)).task_status == "Completed"
    assert await talk.queued("next") == [], "it has announced nothing"


async def test_what_an_output_without_storage_announces_may_lie_anywhere(talk: Conversation) -> None:
    """A splitter turns one range into many, an aggregator many into one."""
    lease = await running(talk, storage="none")
    chunks = [OutputIn(0, start=n, end=n + 4) for n in (0, 5)]
    await talk.complete(lease, *chunks, OutputIn(0, start=0, end=99))
    assert len(await talk.queued("next")) == 3


async def test_an_output_listed_twice_for_one_scope_is_refused(talk: Conversation) -> None:
    lease = await running(talk)
    same = OutputIn(0, start=0, end=9, row_count=0)
    with pytest.raises(Invalid) as refused:
        await talk.complete(lease, same, same)
    assert refused.value.reason == "OutputTwice"
    assert await talk.scopes("work") == []


async def test_whoever_may_not_complete_hears_that_and_not_about_files(talk: Conversation) -> None:
    lease = await running(talk)
    await talk.cancel(lease.task_id)
    with pytest.raises(Conflict) as refused:
        await talk.complete(
            lease, OutputIn(0, start=0, end=9, row_count=5, location=lease.payload.outputs[0].staging)
        )
    assert refused.value.reason == "Canceled"
