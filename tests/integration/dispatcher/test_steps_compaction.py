"""What the Dispatcher knows of compaction and of checks: which rows belong together, who may take what back."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from tests.support.conversation import Conversation, Lease, dag, reactive, source, taken_back
from tracelake.contracts.dispatcher_api import EventIn, OutputIn
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import Conflict, Forbidden, InvalidDag

FOLLOWER = source(
    "follower",
    kind="always_on",
    operator="block_follower",
    outputs=3,
    config={"chain_id": 1, "rpc_pool": "main"},
)
RANGES = reactive(
    "ranges",
    "follower",
    strategy="PerUpdate",
    runtime="dispatcher",
    operator="range_aggregator",
    outputs=1,
    config={"range_size": 10, "finality": "finalized"},
)
STILL = {"from": {"job": "follower", "output": 0}, "trigger": False}


def compact(*inputs: Any, outputs: int = 3, **fields: Any) -> dict[str, Any]:
    return reactive("compact", *inputs, operator="parquet_compact", outputs=outputs, **fields)


COMPACT = compact("ranges", STILL)
READER = reactive("reader", "ranges", {"from": {"job": "compact", "output": 1}, "trigger": False})


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


async def version(talk: Conversation, job: str, index: int = 0) -> UUID:
    found: UUID = (await talk.output(job, index))["dataset_version"]
    return found


async def refusal(talk: Conversation, *jobs: dict[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(InvalidDag) as invalid:
        await talk.deploy(dag(*jobs))
    return [(problem.field, problem.message) for problem in invalid.value.problems]


async def at_block(talk: Conversation, block: int, finalized: int) -> Lease:
    """The follower has come so far, and the aggregator has announced what is whole."""
    follower = await talk.lease("follower")
    await talk.emit(follower, EventIn(await talk.dataset("follower"), cursor=block, finalized=finalized))
    ranges = await talk.lease("ranges")
    events = [
        EventIn(await talk.dataset("ranges"), start=start, end=start + 9)
        for start in range(0, finalized - 8, 10)
    ]
    await talk.complete(ranges, events=events)
    return follower


async def test_one_hot_input_brings_the_followers_further_outputs_with_it(talk: Conversation) -> None:
    await talk.deploy(dag(FOLLOWER, RANGES, COMPACT))
    await at_block(talk, 12, 9)
    payload = (await talk.lease("compact")).payload
    assert [read.dataset_version for read in payload.inputs] == [
        await version(talk, "ranges"),
        *[await version(talk, "follower", index) for index in range(3)],
    ]
    assert [(read.trigger, read.start, read.end) for read in payload.inputs[1:]] == [(False, 0, 9)] * 3
    assert payload.inputs[1].finalized == 9
    assert [output.name for output in payload.outputs] == ["blocks", "transactions", "logs"]


async def test_outputs_without_a_hot_input_are_refused(talk: Conversation) -> None:
    [(field, message)] = await refusal(talk, FOLLOWER, RANGES, compact("ranges", STILL, outputs=4))
    assert field == "jobs[2].outputs"
    assert "4 outputs and 3 such inputs" in message
    [(field, message)] = await refusal(talk, FOLLOWER, RANGES, compact("ranges", outputs=1))
    assert "1 outputs and 0 such inputs" in message


async def test_a_compaction_of_a_part_of_the_rows_is_refused(talk: Conversation) -> None:
    part = {**STILL, "where": "block_number > 5"}
    [(field, message)] = await refusal(talk, FOLLOWER, RANGES, compact("ranges", part, outputs=1))
    assert (field, message) == (
        "jobs[2].inputs[1].where",
        "parquet_compact keeps every row of its inputs",
    )


async def test_a_compacted_input_that_is_read_as_it_is_comes_with_its_hot_rows(talk: Conversation) -> None:
    triggered = reactive("triggered", "compact:1")
    await talk.deploy(dag(FOLLOWER, RANGES, COMPACT, READER, triggered))
    await at_block(talk, 12, 9)
    read = (await talk.lease("reader")).payload.inputs[1]
    assert read.dataset_version == await version(talk, "compact", 1)
    assert read.hot is not None
    assert (read.hot.dataset_version, read.hot.revision) == (await version(talk, "follower", 1), 0)
    await talk.run("compact")
    assert (await talk.lease("triggered")).read.hot is None, "what triggers is committed, and cold"


async def test_a_reorg_under_a_reader_of_hot_and_cold_refuses_its_completion(talk: Conversation) -> None:
    await talk.deploy(dag(FOLLOWER, RANGES, COMPACT, READER))
    follower = await at_block(talk, 12, 9)
    lease = await talk.lease("reader")
    await talk.emit(follower, taken_back(await talk.dataset("follower", 1), 5, 7))
    with pytest.raises(Conflict) as refused:
        await talk.complete_scope(lease)
    assert refused.value.reason == "InputChanged"


async def test_a_reorg_during_a_compaction_leaves_nothing_committed(talk: Conversation) -> None:
    await talk.deploy(dag(FOLLOWER, RANGES, COMPACT))
    follower = await at_block(talk, 12, 9)
    lease = await talk.lease("compact")
    await talk.emit(follower, taken_back(await talk.dataset("follower", 2), 9, 12))
    outputs = [OutputIn(index, start=0, end=9, row_count=0) for index in range(3)]
    with pytest.raises(Conflict) as refused:
        await talk.complete(lease, *outputs)
    assert refused.value.reason == "InputChanged"
    assert await talk.scopes("compact") == []


CHECK = reactive("check", "ingest", operator="integrity_check", outputs=1, config={"rpc_pool": "main"})
INGEST = reactive("ingest", "src", storage="parquet")


async def test_a_check_takes_back_what_it_reads_and_the_producer_makes_it_again(talk: Conversation) -> None:
    await talk.deploy(dag(source(), INGEST, CHECK))
    await talk.trigger(0, 9)
    await talk.run("ingest")
    check = await talk.lease("check")
    wrong = taken_back(await talk.dataset("ingest"), 3, 4, "check-1", "block 3 is not the chain's")
    await talk.emit(check, wrong)
    assert await talk.scopes("ingest") == []
    await talk.complete(check)
    again = await talk.lease("ingest")
    assert (again.read.start, again.read.end) == (0, 9)
    await talk.complete_scope(again)
    recheck = await talk.lease("check")
    assert recheck.read.invalidation is not None
    assert recheck.read.invalidation.reason == "block 3 is not the chain's"
    await talk.complete_scope(recheck)
    assert await talk.scopes("ingest") == [(0, 9)]


async def test_nobody_else_takes_back_what_they_read(talk: Conversation) -> None:
    await talk.deploy(dag(source(), INGEST, CHECK, reactive("other", "ingest")))
    await talk.trigger(0, 9)
    await talk.run("ingest")
    ingested = await talk.dataset("ingest")
    other, check = await talk.lease("other"), await talk.lease("check")
    for lease, event in [
        (other, taken_back(ingested, 0, 9)),
        (check, EventIn(ingested, start=0, end=9)),
        (check, taken_back(await talk.dataset("src"), 0, 9)),
        (check, taken_back(await talk.dataset("other"), 0, 9)),
    ]:
        before = await talk.everything()
        with pytest.raises(Forbidden) as refused:
            await talk.emit(lease, event)
        assert refused.value.reason == "NotYourDataset"
        assert await talk.everything() == before
