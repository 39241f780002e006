"""Publishing to a buffered dataset: who may, what is refused and how, and what reaches the queue."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, cast
from uuid import UUID, uuid4

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from tests.support.conversation import Conversation, Lease, dag, reactive, source, taken_back
from tests.support.surfaces import Surfaces, open_surfaces
from tracelake.contracts.buffers import (
    MAX_BATCH_BYTES,
    BufferBatch,
    BufferMessage,
    BufferRetract,
    buffer_queue,
)
from tracelake.contracts.dispatcher_api import EventIn
from tracelake.dispatcher.loops.deliver_outbox import BufferDelivery
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.objects.base import ObjectLocation
from tracelake.queue.base import MAX_BODY_BYTES, Body, Queue, encode_body

PATH = "/v1/task/buffer-publish"
COLUMNS = {"org_id": "uuid", "key": "text", "block_number": "bigint", "severity": "text"}


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


@pytest.fixture
async def api(ctx: StepContext) -> AsyncIterator[Surfaces]:
    async with open_surfaces(ctx) as surfaces:
        yield surfaces


def buffered(**columns: str) -> dict[str, Any]:
    schema = {"columns": {**COLUMNS, **columns}, "unique": ["org_id", "key"]}
    return {"storage": "postgres", "write_mode": "buffered", "schema": schema}


def alerting(*jobs: dict[str, Any], name: str = "chain", dataset: str = "alerts", **columns: str) -> str:
    return dag(source(), *jobs, name=name, publish={dataset: buffered(**columns)})


class Publisher:
    """A running task with its token, that publishes over HTTP."""

    def __init__(self, api: Surfaces, claim: dict[str, Any]) -> None:
        self.api = api
        self.claim = claim
        self.task_id = UUID(claim["task_id"])

    async def publish(
        self, records: Any = ({"key": "k"},), *, token: str | None = None, **fields: Any
    ) -> Any:
        """A field that is ``...`` is left out."""
        fence = {name: self.claim[name] for name in ("task_id", "attempt", "lease_token")}
        body = {**fence, "dataset": "alerts", "records": records, **fields}
        body = {name: value for name, value in body.items() if value is not ...}
        content = json.dumps(body).encode()
        headers = self.api.task(token or self.claim["capability_token"])
        return await self.api.internal.post(PATH, content=content, headers=headers)

    async def complete(self, **fields: Any) -> Any:
        fence = {name: self.claim[name] for name in ("task_id", "attempt", "lease_token")}
        body = {**fence, "status": "Completed", **fields}
        answer = await self.api.worker.post("/internal/task-complete", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


async def publisher(api: Surfaces, talk: Conversation, job: str = "watch") -> Publisher:
    task_id = str(await talk.only_queued(job))
    claim = (
        await api.worker.post("/internal/task-claim", json={"task_id": task_id, "worker_id": "w"})
    ).json()
    assert claim["status"] == "Claimed", claim
    return Publisher(api, claim)


@pytest.fixture
async def watch(api: Surfaces, talk: Conversation) -> Publisher:
    await talk.deploy(alerting(reactive("watch", "src")))
    await talk.trigger(100, 109)
    return await publisher(api, talk)


async def messages(talk: Conversation) -> list[BufferBatch | BufferRetract]:
    rows = await talk.query("SELECT body FROM outbox WHERE kind = 'buffer' ORDER BY outbox_id")
    return [msgspec.json.decode(row["body"], type=BufferMessage) for row in rows]


def refusal(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["reason"]


async def test_a_publish_is_a_message_that_says_whose_rows_these_are_and_of_which_blocks(
    watch: Publisher, talk: Conversation
) -> None:
    records = [{"key": "a", "block_number": 101, "severity": "critical"}, {"key": "b"}]
    answer = await watch.publish(records)
    assert answer.status_code == 200
    [batch] = await messages(talk)
    assert isinstance(batch, BufferBatch)
    assert answer.json() == {"accepted": 2, "batch_id": str(batch.batch_id)}
    assert json.loads(batch.records or "") == records
    assert (batch.producer, batch.scope_start, batch.scope_end) == ("chain/watch", 100, 109)
    assert (batch.task_id, batch.attempt, batch.revision, batch.row_count) == (watch.task_id, 1, 0, 2)
    shown = (await watch.api.person.get("/v1/buffers/alerts")).json()
    assert (batch.schema_hash, str(batch.dataset_uuid)) == (shown["schema_hash"], shown["dataset_uuid"])
    assert (shown["writers"], shown["undelivered"]) == (["chain/watch"], 1)


async def test_a_dataset_is_named_by_its_uuid_too_and_the_hash_may_be_given(watch: Publisher) -> None:
    shown = (await watch.api.person.get("/v1/datasets/alerts")).json()
    assert (shown["write_mode"], shown["storage"]) == ("buffered", "postgres")
    answer = await watch.publish(
        dataset=..., dataset_uuid=shown["dataset_uuid"], schema_hash=shown["schema_hash"]
    )
    assert answer.json()["accepted"] == 1


async def test_no_records_are_no_message(watch: Publisher, talk: Conversation) -> None:
    assert (await watch.publish([])).json()["accepted"] == 0
    assert await messages(talk) == []


async def test_an_update_is_about_the_blocks_that_it_reads(api: Surfaces, talk: Conversation) -> None:
    follower = source("follow", kind="always_on", storage="postgres")
    await talk.deploy(
        dag(
            follower,
            reactive("watch", "follow", strategy="PerUpdate"),
            publish={"alerts": buffered()},
        )
    )
    lease = await talk.lease("follow")
    await talk.emit(lease, EventIn(dataset_uuid=await talk.dataset("follow"), cursor=41))
    first = await publisher(api, talk)
    await first.publish()
    await first.complete()
    await talk.emit(lease, EventIn(dataset_uuid=await talk.dataset("follow"), cursor=50))
    second = await publisher(api, talk)
    await second.publish()
    assert [(m.scope_start, m.scope_end) for m in await messages(talk)] == [(0, 41), (42, 50)]


async def test_a_reader_of_a_buffer_that_publishes_is_about_no_blocks(
    api: Surfaces, talk: Conversation
) -> None:
    page = reactive("page", {"from": {"dataset": "alerts"}}, strategy="PerUpdate")
    text = dag(source(), page, publish={"alerts": buffered(), "pages": buffered()})
    await talk.deploy(text)
    await talk.emit(await talk.lease("alerts.sink"), EventIn(dataset="alerts", cursor=9))
    await (await publisher(api, talk, "page")).publish(dataset="pages")
    [batch] = await messages(talk)
    assert (batch.scope_start, batch.scope_end) == (None, None)


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"attempt": 2}, 403, "NotYourTask"),
    ({"task_id": str(uuid4())}, 403, "NotYourTask"),
    ({"lease_token": str(uuid4())}, 409, "StaleLease"),
    ({"lease_token": ...}, 422, "InvalidRequest"),
    ({"dataset": "nobody"}, 403, "NotYourDataset"),
    ({"dataset": "theirs"}, 403, "NotYourDataset"),
    ({"dataset": "theirs", "records": [{"nope": 1}]}, 403, "NotYourDataset"),
    ({"dataset": "theirs", "schema_hash": "sha256:0"}, 403, "NotYourDataset"),
    ({"dataset": "cold"}, 403, "NotYourDataset"),
    ({"dataset": ..., "dataset_uuid": str(uuid4())}, 403, "NotYourDataset"),
    ({"dataset": "a\0b"}, 422, "InvalidRequest"),
    ({"dataset": ...}, 422, "InvalidPublish"),
    ({"dataset_uuid": str(uuid4())}, 422, "InvalidPublish"),
    ({"records": ...}, 422, "InvalidPublish"),
    ({"batch_uri": "file:///x"}, 422, "InvalidPublish"),
    ({"schema_hash": "sha256:0"}, 409, "SchemaMismatch"),
    ({"records": [{"key": 1}], "schema_hash": "sha256:0"}, 409, "SchemaMismatch"),
    ({"org_id": "x"}, 422, "InvalidRequest"),
    ({"records": {"key": "k"}}, 422, "BadRecords"),
    ({"records": None}, 422, "BadRecords"),
    ({"records": [{"key": "k", "org_id": str(uuid4())}]}, 422, "BadRecords"),
    ({"records": [{"key": "k", "severity": "\0"}]}, 422, "BadRecords"),
]


async def test_what_is_refused_leaves_nothing_behind(watch: Publisher, talk: Conversation) -> None:
    await talk.deploy(alerting(name="other", dataset="theirs"))
    cold = {"from": {"job": "watch", "output": 0}}
    await talk.deploy(dag(source(), reactive("watch", "src"), publish={"alerts": buffered(), "cold": cold}))
    state = await talk.everything()
    for fields, status, reason in REFUSED:
        answer = await watch.publish(**fields)
        assert refusal(answer) == (status, reason), (fields, answer.text)
    assert await talk.everything() == state


async def test_each_record_that_does_not_fit_is_named_with_its_field(watch: Publisher) -> None:
    answer = await watch.publish([{"key": "k"}, {"key": 7}, {"severity": "x"}, {"key": "k", "nope": 1}])
    assert refusal(answer) == (422, "BadRecords")
    assert [(error["field"], error["message"]) for error in answer.json()["errors"]] == [
        ("records[1].key", "must be a string"),
        ("records[2].key", "is required: it is part of the key"),
        ("records[3].nope", "is not in the schema"),
    ]


async def test_another_tasks_token_does_not_publish(
    watch: Publisher, api: Surfaces, talk: Conversation
) -> None:
    await talk.trigger(110, 119)
    other = await publisher(api, talk)
    answer = await watch.publish(token=other.claim["capability_token"])
    assert refusal(answer) == (403, "NotYourTask")


async def test_an_attempt_that_is_over_does_not_publish(
    watch: Publisher, api: Surfaces, talk: Conversation
) -> None:
    await watch.complete(outputs=[{"output_index": 0, "start": 100, "end": 109}])
    assert refusal(await watch.publish()) == (409, "StaleLease")
    await talk.trigger(110, 119)
    second = await publisher(api, talk)
    await second.complete(status="Failed", error_message="x")
    assert refusal(await second.publish()) == (409, "StaleLease")
    await talk.trigger(120, 129)
    await talk.query("DELETE FROM outbox")
    third = Publisher(
        api,
        (
            await api.worker.post(
                "/internal/task-claim",
                json={"task_id": str((await talk.queued("watch"))[-1]), "worker_id": "w"},
            )
        ).json(),
    )
    await talk.cancel(third.task_id)
    assert refusal(await third.publish()) == (409, "Canceled")
    assert await messages(talk) == []


async def test_a_sink_does_not_publish_to_itself(api: Surfaces, talk: Conversation) -> None:
    await talk.deploy(alerting())
    sink = await publisher(api, talk, "alerts.sink")
    assert refusal(await sink.publish()) == (403, "NotYourDataset")


async def test_a_deploy_in_between_is_noticed(watch: Publisher, talk: Conversation) -> None:
    wide = [{"key": "k", "note": "new"}]
    old = (await watch.api.person.get("/v1/datasets/alerts")).json()["schema_hash"]
    assert refusal(await watch.publish(wide)) == (422, "BadRecords")
    await talk.deploy(alerting(reactive("watch", "src"), note="text"))
    assert (await watch.publish(wide)).status_code == 200
    [batch] = await messages(talk)
    assert isinstance(batch, BufferBatch)
    assert batch.schema_hash != old
    assert refusal(await watch.publish(schema_hash=old)) == (409, "SchemaMismatch")
    await talk.deploy(dag(source(), reactive("watch", "src")))
    assert refusal(await watch.publish(wide)) == (403, "NotYourDataset")


async def test_what_does_not_fit_a_message_is_kept_as_an_object(watch: Publisher, talk: Conversation) -> None:
    records = [{"key": f"{n}", "severity": '"' * 1000} for n in range(150)]
    assert len(json.dumps(records)) < MAX_BODY_BYTES * 1.3
    assert (await watch.publish(records)).status_code == 200
    fitting = [{"key": f"{n}", "severity": "x" * 200} for n in range(1000)]
    assert (await watch.publish(fitting)).status_code == 200
    kept, inline = await messages(talk)
    assert isinstance(kept, BufferBatch)
    assert isinstance(inline, BufferBatch)
    assert (kept.records, inline.artifact, kept.row_count) == (None, None, 150)
    place = ObjectLocation.parse(kept.artifact or "")
    assert json.loads(await talk.ctx.objects.read(place, MAX_BATCH_BYTES)) == records
    for message in (kept, inline):
        encode_body(msgspec.to_builtins(message))


async def test_a_body_above_the_limit_is_too_large(watch: Publisher, talk: Conversation) -> None:
    assert refusal(await watch.publish([{"key": "x" * MAX_BATCH_BYTES}])) == (413, "TooLarge")
    assert await messages(talk) == []


async def test_a_batch_may_lie_where_the_task_writes_and_nowhere_else(
    api: Surfaces, talk: Conversation
) -> None:
    await talk.deploy(alerting(reactive("watch", "src", storage="parquet", operator="own")))
    await talk.trigger(0, 9)
    watch = await publisher(api, talk)
    staging = watch.claim["task"]["outputs"][0]["staging"]
    objects = talk.ctx.objects
    records = [{"key": f"k{n}"} for n in range(3)]
    for folder in (staging, staging.replace(str(watch.task_id), str(uuid4()))):
        await objects.put(ObjectLocation.parse(f"{folder}batch.json"), json.dumps(records).encode())
    answer = await watch.publish(records=..., batch_uri=f"{staging}batch.json")
    assert answer.json()["accepted"] == 3, answer.text
    await objects.put(ObjectLocation.parse(f"{staging}batch.json"), b"[]")
    [batch] = await messages(talk)
    assert isinstance(batch, BufferBatch)
    assert json.loads(batch.records or "") == records
    for uri, status, reason in [
        (staging.replace(str(watch.task_id), str(uuid4())) + "batch.json", 403, "LocationOutsidePrefix"),
        (f"{staging}../batch.json", 422, "PrefixInvalid"),
        (staging, 403, "LocationOutsidePrefix"),
        ("file:///etc/passwd", 403, "LocationOutsidePrefix"),
        (f"{staging}missing.json", 422, "ObjectNotFound"),
    ]:
        assert refusal(await watch.publish(records=..., batch_uri=uri)) == (status, reason), uri
    await objects.put(ObjectLocation.parse(f"{staging}large.json"), b" " * (MAX_BATCH_BYTES + 1))
    assert refusal(await watch.publish(records=..., batch_uri=f"{staging}large.json")) == (
        413,
        "ObjectTooLarge",
    )
    await objects.put(ObjectLocation.parse(f"{staging}odd.json"), b"[\xff]")
    assert refusal(await watch.publish(records=..., batch_uri=f"{staging}odd.json")) == (422, "BadRecords")


async def retractions(talk: Conversation) -> list[tuple[int | None, int | None, int]]:
    found = [m for m in await messages(talk) if isinstance(m, BufferRetract)]
    return [(m.scope_start, m.scope_end, m.revision) for m in found]


async def test_a_task_that_ran_because_of_an_invalidation_retracts_and_no_other_does(
    api: Surfaces, talk: Conversation
) -> None:
    cold = reactive("cold", "src", storage="parquet", operator="own")
    jobs = [cold, reactive("watch", "cold"), reactive("quiet", "cold")]
    await talk.deploy(alerting(*jobs))
    await talk.trigger(100, 109)
    made = await talk.run("cold")
    watch = await publisher(api, talk)
    await watch.publish()
    await watch.complete(outputs=[{"output_index": 0, "start": 100, "end": 109}])
    quiet = await publisher(api, talk, "quiet")
    await quiet.complete(outputs=[{"output_index": 0, "start": 100, "end": 109}])
    assert await retractions(talk) == []

    await talk.trigger(110, 119)
    later = await talk.lease("cold")
    await talk.emit(later, taken_back(await talk.dataset("cold"), 105, 105))
    await talk.complete_scope(later)
    again = await talk.lease("cold")
    assert (again.read.start, made.read.start) == (100, 100)
    await talk.complete_scope(again)
    runs = [await publisher_of(api, task) for task in await talk.queued("watch")]
    for run in runs:
        scope = run.claim["task"]["inputs"][0]
        await run.publish()
        await run.complete(outputs=[{"output_index": 0, "start": scope["start"], "end": scope["end"]}])
    assert len(runs) == 2
    assert [span[:2] for span in await retractions(talk)] == [(100, 109)]
    for run in runs:
        await run.complete(
            outputs=[
                {"output_index": 0, "start": s["start"], "end": s["end"]}
                for s in [run.claim["task"]["inputs"][0]]
            ]
        )
    assert len(await retractions(talk)) == 1
    [retract] = [m for m in await messages(talk) if isinstance(m, BufferRetract)]
    republished = [
        m for m in await messages(talk) if isinstance(m, BufferBatch) and m.task_id == retract.task_id
    ]
    assert [m.revision for m in republished] == [retract.revision]
    assert retract.revision > 0
    assert retract.producer == "chain/watch"


async def publisher_of(api: Surfaces, task_id: UUID) -> Publisher:
    claim = {"task_id": str(task_id), "worker_id": "w"}
    return Publisher(api, (await api.worker.post("/internal/task-claim", json=claim)).json())


async def test_an_update_that_has_nothing_new_to_read_retracts_what_was_taken_back(
    api: Surfaces, talk: Conversation
) -> None:
    follower = source("follow", kind="always_on", storage="postgres")
    watch = reactive("watch", "follow", strategy="PerUpdate")
    await talk.deploy(dag(follower, watch, publish={"alerts": buffered()}))
    lease = await talk.lease("follow")
    uuid = await talk.dataset("follow")
    await talk.emit(lease, EventIn(dataset_uuid=uuid, cursor=100))
    first = await publisher(api, talk)
    await first.publish([{"key": "k", "block_number": 98}])
    await first.complete()
    assert await retractions(talk) == []
    await talk.emit(lease, taken_back(uuid, 95, 100))
    empty = await publisher(api, talk)
    assert empty.claim["task"]["inputs"][0]["upto"] == 94
    await empty.complete()
    assert [span[:2] for span in await retractions(talk)] == [(95, 100)]
    await talk.emit(lease, EventIn(dataset_uuid=uuid, cursor=97, revision=1))
    onward = await publisher(api, talk)
    await onward.publish([{"key": "k", "block_number": 96}])
    await onward.complete()
    assert len(await retractions(talk)) == 1
    before, retract, after = await messages(talk)
    assert before.revision < retract.revision == after.revision
    assert (after.scope_start, after.scope_end) == (95, 97)


@pytest.mark.parametrize("how", ["failed", "canceled"])
async def test_what_an_attempt_had_published_that_was_given_up_is_retracted(
    api: Surfaces, talk: Conversation, how: str
) -> None:
    follower = source("follow", kind="always_on", storage="postgres")
    watch = reactive("watch", "follow", strategy="PerUpdate")
    await talk.deploy(dag(follower, watch, publish={"alerts": buffered()}))
    lease = await talk.lease("follow")
    uuid = await talk.dataset("follow")
    await talk.emit(lease, EventIn(dataset_uuid=uuid, cursor=99))
    await (await publisher(api, talk)).complete()
    await talk.emit(lease, EventIn(dataset_uuid=uuid, cursor=105))
    lost = await publisher(api, talk)
    await lost.publish([{"key": "k", "block_number": 103}])
    if how == "failed":
        await lost.complete(status="Failed", error_message="x", retryable=False)
    else:
        await talk.cancel(lost.task_id)
    await talk.emit(lease, taken_back(uuid, 100, 105), EventIn(dataset_uuid=uuid, cursor=107, revision=1))
    await (await publisher(api, talk)).complete()
    [published, retract] = await messages(talk)
    assert isinstance(retract, BufferRetract)
    assert (retract.scope_start, retract.scope_end) == (100, 107)
    assert published.revision < retract.revision


async def test_a_reorg_of_any_input_retracts_what_was_made_of_it(api: Surfaces, talk: Conversation) -> None:
    heads = [source(name, kind="always_on", storage="postgres") for name in ("one", "two")]
    watch = reactive("watch", "one", "two", strategy="PerUpdate")
    await talk.deploy(dag(*heads, watch, publish={"alerts": buffered()}))
    leases = [await talk.lease(name) for name in ("one", "two")]
    for name, lease in zip(("one", "two"), leases, strict=True):
        await talk.emit(lease, EventIn(dataset_uuid=await talk.dataset(name), cursor=110))
    first = await publisher(api, talk)
    await first.publish([{"key": "k", "block_number": 103}])
    await first.complete()
    uuid = await talk.dataset("two")
    await talk.emit(leases[1], taken_back(uuid, 100, 105), EventIn(dataset_uuid=uuid, cursor=110, revision=1))
    await (await publisher(api, talk)).complete()
    assert [span[:2] for span in await retractions(talk)] == [(100, 110)]


async def test_what_a_new_generation_publishes_outranks_the_one_before_and_so_does_a_rollback(
    api: Surfaces, talk: Conversation
) -> None:
    def generation(number: int) -> str:
        follower = source("follow", kind="always_on", storage="postgres", config={"n": number})
        watch = reactive("watch", "follow", strategy="PerUpdate")
        return dag(follower, watch, publish={"alerts": buffered()})

    for number, reorgs in ((1, 3), (2, 1), (1, 0)):
        await talk.deploy(generation(number))
        lease = await talk.lease((await talk.queued("follow"))[-1])
        uuid = await talk.dataset("follow")
        for reorg in range(reorgs):
            await talk.emit(lease, taken_back(uuid, 5, 9, f"reorg-{number}-{reorg}"))
        await talk.emit(lease, EventIn(dataset_uuid=uuid, cursor=20 + number + 5 * (not reorgs)))
        run = await publisher_of(api, (await talk.queued("watch"))[-1])
        await run.publish()
        await run.complete()
    revisions = [message.revision for message in await messages(talk) if isinstance(message, BufferBatch)]
    assert len(revisions) == 3
    assert revisions == sorted(set(revisions))


async def test_a_task_that_was_taken_back_meanwhile_retracts_nothing(
    api: Surfaces, talk: Conversation
) -> None:
    follower = source("follow", kind="always_on", storage="postgres")
    await talk.deploy(
        dag(follower, reactive("watch", "follow", strategy="PerUpdate"), publish={"alerts": buffered()})
    )
    lease = await talk.lease("follow")
    uuid = await talk.dataset("follow")
    await talk.emit(lease, EventIn(dataset_uuid=uuid, cursor=100))
    first = await publisher(api, talk)
    await first.publish()
    await talk.emit(lease, taken_back(uuid, 95, 100))
    fence = {name: first.claim[name] for name in ("task_id", "attempt", "lease_token")}
    answer = await api.worker.post("/internal/task-complete", json={**fence, "status": "Completed"})
    assert refusal(answer) == (409, "InputChanged")
    assert await retractions(talk) == []
    again = await publisher_of(api, first.task_id)
    await again.publish()
    await again.complete()
    assert len(await retractions(talk)) == 1


class Queues:
    """A queue that keeps what it is given, and refuses what it is told to."""

    def __init__(self) -> None:
        self.bodies: dict[str, list[Body]] = {}
        self.durable: set[bool] = set()
        self.down = False
        self.poison: str | None = None

    async def publish(
        self, queue: str, bodies: Any, *, delay: float = 0.0, durable: bool = False
    ) -> list[str]:
        if self.down:
            raise Unavailable("QueueUnavailable", "the queue is down")
        if self.poison is not None and any(self.poison in body.get("records", "") for body in bodies):
            raise Invalid("BadBody", "can't be carried")
        self.durable.add(durable)
        self.bodies.setdefault(queue, []).extend(bodies)
        return [str(n) for n in range(len(bodies))]


@pytest.fixture
def queues() -> Queues:
    return Queues()


@pytest.fixture
def delivery(ctx: StepContext, queues: Queues) -> BufferDelivery:
    return BufferDelivery(ctx.db, cast(Queue, queues), CollectorRegistry())


async def test_what_nobody_delivered_is_swept_to_the_queue_durably_and_once(
    watch: Publisher, talk: Conversation, delivery: BufferDelivery, queues: Queues
) -> None:
    await watch.publish([{"key": "a"}])
    await watch.publish([{"key": "b"}])
    sent = await messages(talk)
    await talk.pass_time(5)
    await delivery.sweep()
    await delivery.sweep()
    [(queue, bodies)] = queues.bodies.items()
    assert queue == buffer_queue(sent[0].dataset_uuid)
    assert [msgspec.convert(body, BufferMessage) for body in bodies] == sent
    assert queues.durable == {True}
    assert await messages(talk) == []


async def test_a_queue_that_is_down_for_long_loses_nothing(
    watch: Publisher, talk: Conversation, delivery: BufferDelivery, queues: Queues
) -> None:
    await watch.publish()
    queues.down = True
    for _ in range(40):
        await talk.pass_time(60)
        await delivery.sweep()
    assert len(await messages(talk)) == 1
    queues.down = False
    await talk.pass_time(60)
    await delivery.sweep()
    assert [len(bodies) for bodies in queues.bodies.values()] == [1]


async def test_one_message_that_can_not_be_carried_does_not_hold_up_the_others(
    watch: Publisher, talk: Conversation, delivery: BufferDelivery, queues: Queues
) -> None:
    for key in ("good", "poison", "fine"):
        await watch.publish([{"key": key}])
    queues.poison = "poison"
    for _ in range(10):
        await talk.pass_time(60)
        await delivery.sweep()
    [bodies] = queues.bodies.values()
    assert [json.loads(body["records"])[0]["key"] for body in bodies] == ["good", "fine"]
    failed = (await watch.api.person.get("/v1/outbox/failed")).json()["failed"]
    assert [(entry["kind"], entry["last_error"]) for entry in failed] == [("buffer", "can't be carried")]
    queues.poison = None
    assert (await watch.api.person.post("/v1/outbox/replay")).json() == {"replayed": 1}
    await talk.pass_time(5)
    await delivery.sweep()
    assert len(bodies) == 3


async def sink_lease(talk: Conversation) -> Lease:
    return await talk.lease("alerts.sink")


def buried(lease: Lease, message: Any, **fields: Any) -> dict[str, Any]:
    body = msgspec.to_builtins(message)
    fence = {"task_id": str(lease.task_id), "attempt": lease.attempt, "lease_token": str(lease.token)}
    return {
        **fence,
        "dataset_uuid": body["dataset_uuid"],
        "message": body,
        "reason": "bad",
        "tries": 3,
        **fields,
    }


async def test_a_dead_letter_is_kept_whole_shown_and_sent_again(watch: Publisher, talk: Conversation) -> None:
    person, worker = watch.api.person, watch.api.worker
    await watch.publish()
    [message] = await messages(talk)
    await talk.query("DELETE FROM outbox WHERE kind = 'buffer'")
    request = buried(await sink_lease(talk), message)
    first = await worker.post("/internal/buffer-dead-letter", json=request)
    again = await worker.post("/internal/buffer-dead-letter", json={**request, "reason": "worse", "tries": 4})
    assert first.json() == again.json()
    letter_id = first.json()["dead_letter_id"]
    page = (await person.get("/v1/buffers/alerts/dead-letters")).json()
    assert [(d["dead_letter_id"], d["reason"], d["tries"]) for d in page["dead_letters"]] == [
        (letter_id, "worse", 4)
    ]
    [summary] = (await person.get("/v1/buffers")).json()["buffers"]
    assert (summary["dataset"], summary["dead_letters"], summary["sink_status"]) == ("alerts", 1, "Running")
    whole = (await person.get(f"/v1/dead-letters/{letter_id}")).json()
    assert msgspec.convert(whole["message"], BufferMessage) == message

    assert (await person.post("/v1/buffers/alerts/replay")).json() == {"replayed": 1}
    assert await messages(talk) == [message]
    assert (await person.get("/v1/buffers/alerts/dead-letters")).json()["dead_letters"] == []
    assert (await person.post("/v1/buffers/alerts/replay")).json() == {"replayed": 0}
    assert (await person.get(f"/v1/dead-letters/{letter_id}")).status_code == 404


async def test_many_dead_letters_leave_in_portions(watch: Publisher, talk: Conversation) -> None:
    person, worker = watch.api.person, watch.api.worker
    await watch.publish()
    [message] = await messages(talk)
    await talk.query("DELETE FROM outbox WHERE kind = 'buffer'")
    lease = await sink_lease(talk)
    ids = []
    for _ in range(120):
        body = buried(lease, msgspec.structs.replace(message, batch_id=uuid4()))
        ids.append((await worker.post("/internal/buffer-dead-letter", json=body)).json()["dead_letter_id"])
    page = (await person.get("/v1/buffers/alerts/dead-letters?limit=100")).json()
    rest = (await person.get(f"/v1/buffers/alerts/dead-letters?after={page['next']}")).json()
    assert [d["dead_letter_id"] for d in page["dead_letters"] + rest["dead_letters"]] == ids
    assert rest["next"] is None
    dropped = await person.post("/v1/buffers/alerts/drop", json={"dead_letter_ids": ids[:2]})
    assert dropped.json() == {"dropped": 2}
    assert (await person.post("/v1/buffers/alerts/drop", json={})).status_code == 422
    assert (await person.post("/v1/buffers/alerts/replay")).json() == {"replayed": 118}
    assert len(await messages(talk)) == 118


async def test_only_the_sink_that_holds_the_lease_gives_messages_up(
    watch: Publisher, talk: Conversation
) -> None:
    worker = watch.api.worker
    await watch.publish()
    [message] = await messages(talk)
    lease = await sink_lease(talk)
    request = buried(lease, message)
    watching = {name: watch.claim[name] for name in ("task_id", "attempt", "lease_token")}
    changes: list[tuple[dict[str, Any], int, str]] = [
        ({"lease_token": str(uuid4())}, 409, "StaleLease"),
        ({"attempt": 2}, 409, "StaleAttempt"),
        (watching, 403, "NotYourDataset"),
        ({"dataset_uuid": str(uuid4())}, 422, "BadMessage"),
        ({"message": {"kind": "batch"}}, 422, "BadMessage"),
        ({"task_id": str(uuid4())}, 404, "UnknownTask"),
    ]
    for change, status, reason in changes:
        answer = await worker.post("/internal/buffer-dead-letter", json={**request, **change})
        assert refusal(answer) == (status, reason)
    assert (await watch.api.internal.post("/internal/buffer-dead-letter", json=request)).status_code == 401
    assert (await watch.api.person.get("/v1/buffers/alerts")).json()["dead_letters"] == 0


async def test_dead_letters_of_a_dataset_that_is_gone_wait_for_its_return(
    watch: Publisher, talk: Conversation
) -> None:
    person, worker = watch.api.person, watch.api.worker
    await watch.publish()
    [message] = await messages(talk)
    await worker.post("/internal/buffer-dead-letter", json=buried(await sink_lease(talk), message))
    await talk.deploy(dag(source(), reactive("watch", "src")))
    path = f"/v1/buffers/{message.dataset_uuid}"
    assert (await person.get("/v1/buffers/alerts")).status_code == 404
    shown = (await person.get(path)).json()
    assert (shown["dataset"], shown["published"], shown["dead_letters"]) == ("alerts", False, 1)
    assert refusal(await person.post(f"{path}/replay")) == (409, "NotPublished")
    await talk.deploy(alerting(reactive("watch", "src")))
    assert (await person.post("/v1/buffers/alerts/replay")).json() == {"replayed": 1}


async def test_a_sink_may_ask_for_the_schema_and_nobody_else(watch: Publisher) -> None:
    shown = (await watch.api.person.get("/v1/buffers/alerts")).json()
    path = f"/internal/buffer-schema?dataset_uuid={shown['dataset_uuid']}"
    assert (await watch.api.worker.get(path)).json()["schema_hash"] == shown["schema_hash"]
    assert (await watch.api.internal.get(path)).status_code == 401
    unknown = await watch.api.worker.get(f"/internal/buffer-schema?dataset_uuid={uuid4()}")
    assert refusal(unknown) == (404, "UnknownDataset")
