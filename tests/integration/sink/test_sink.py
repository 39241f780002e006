"""A sink task drains its queue: what is good is written once, what isn't is a dead letter, and nothing is lost."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from uuid import UUID, uuid4

import pytest
import pytest_asyncio

from tests.support.databases import install_data, role_dsn
from tests.support.hot_scene import HotScene
from tests.support.postgres import SharedPostgres
from tests.support.proxies import CuttingProxy
from tests.support.sink_scene import COLUMNS, ORG, SinkScene, build_queue, schema_of
from tracelake.contracts.dispatcher_api import HeartbeatResponse, PayloadInput
from tracelake.domain.dag.model import ColumnType
from tracelake.domain.errors import Conflict, Invalid
from tracelake.hot.install import WRITER_ROLE
from tracelake.leases.held_task import Stop
from tracelake.objects.base import ObjectLocation, batch_location
from tracelake.sink import drain
from tracelake.tables.hot_and_cold import scan_of_request, split_scan


@pytest.fixture(scope="module")
def dsns(postgres_cluster: SharedPostgres) -> Iterator[tuple[str, str]]:
    """A queue's and a data database for all: each scene has a dataset of its own."""
    queue_dsn = postgres_cluster.clone("queue", build_queue)
    data_dsn = postgres_cluster.clone("empty", lambda _: None)
    install_data(data_dsn)
    yield queue_dsn, data_dsn
    postgres_cluster.drop(queue_dsn)
    postgres_cluster.drop(data_dsn)


@pytest_asyncio.fixture
async def scene(dsns: tuple[str, str], tmp_path: Path) -> AsyncIterator[SinkScene]:
    async with SinkScene.open(*dsns, tmp_path) as opened:
        yield opened


def record(key: str, note: str = "x", **more: object) -> dict[str, object]:
    return {"key": key, "block_number": 1, "note": note, **more}


async def test_published_records_become_rows_with_their_origin_and_then_an_event(scene: SinkScene) -> None:
    await scene.publish(record("a"), record("b", org_id=ORG), producer="dag/one", revision=3)
    await scene.publish(record("c"), producer="dag/two", scope_start=None, scope_end=None)
    async with scene.sinking():
        await scene.until_drained()
    found = await scene.rows(
        "SELECT org_id::text, key, position, producer, scope_start, scope_end, revision FROM {} ORDER BY position"
    )
    assert found == [
        (ORG, "a", 1, "dag/one", 0, 9, 3),
        (ORG, "b", 2, "dag/one", 0, 9, 3),
        (ORG, "c", 3, "dag/two", None, None, 0),
    ]
    assert scene.listener.cursors[-1] == 3


async def test_values_of_every_type_arrive_exactly(scene: SinkScene) -> None:
    kinds = {kind.value: kind for kind in ColumnType}
    scene.schema = scene.listener.schema = schema_of({**COLUMNS, **kinds})
    values: dict[str, object] = {
        "text": "“quoted”, back\\slash\n",
        "bigint": -(2**63),
        "integer": 2**31 - 1,
        "numeric": "115792089237316195423570985008687907853269984665640564039457584007913129639935.25",
        "boolean": True,
        "timestamptz": "2026-01-02T03:04:05.123456+02:00",
        "jsonb": {"deep": [1, {"x": None}], "text": "ü"},
        "bytea": "0x00ff",
        "double": 0.1,
        "uuid": ORG,
    }
    await scene.publish(
        {"key": "full", **values}, {"key": "empty"}, {"key": "nulls", **dict.fromkeys(values)}
    )
    async with scene.sinking():
        await scene.until_drained()
    full, *rest = await scene.rows(
        """SELECT text, "bigint", "integer", "numeric", "boolean", "timestamptz", bytea, double, uuid,
                  jsonb -> 'deep' ->> 0, jsonb ->> 'text' FROM {} ORDER BY position"""
    )
    assert full == (
        values["text"],
        values["bigint"],
        values["integer"],
        Decimal(str(values["numeric"])),
        True,
        datetime(2026, 1, 2, 1, 4, 5, 123456, UTC),
        b"\x00\xff",
        0.1,
        UUID(ORG),
        "1",
        "ü",
    )
    assert rest == [(None,) * len(full)] * 2


async def test_the_same_batch_ten_times_from_two_attempts_and_two_jobs_is_one_row(scene: SinkScene) -> None:
    for turn in range(10):
        await scene.publish(record("a", "first"), attempt=1 + turn % 2)
    await scene.publish(record("a", "of another job"), producer="dag/other")
    async with scene.sinking():
        await scene.until_drained()
        await scene.publish(record("a", "late"), attempt=2)
        await scene.until_drained()
    assert await scene.notes() == {"a": "first"}
    assert set(scene.listener.cursors) == {1}
    assert scene.listener.letters == []


async def test_a_poison_batch_goes_whole_to_the_dead_letters_and_the_others_go_on(scene: SinkScene) -> None:
    await scene.publish(record("before"))
    poison = await scene.publish(record("good"), record("bad", "x", surprise=1))
    await scene.publish(text='[{"key": "cut', producer="dag/cut")
    await scene.put({"kind": "batch", "nonsense": True})
    await scene.publish(record("of another dataset"), dataset_version=UUID(ORG))
    await scene.publish(record("after"))
    async with scene.sinking():
        await scene.until_drained()
    assert set(await scene.notes()) == {"before", "after"}
    letters = {letter.reason: letter for letter in scene.listener.letters}
    assert len(letters) == 4
    [reason] = [reason for reason in letters if "surprise" in reason]
    assert "record 1" in reason
    assert letters[reason].message == poison
    assert {letter.tries for letter in letters.values()} == {1}
    counted = {
        name: scene.registry.get_sample_value(f"tracelake_sink_{name}_total")
        for name in ("messages", "rows", "dead_letters")
    }
    assert counted == {"messages": 2.0, "rows": 2.0, "dead_letters": 4.0}


async def test_rows_that_claim_another_org_are_a_dead_letter(scene: SinkScene) -> None:
    await scene.publish(record("mine"), record("theirs", org_id="00000000-0000-4000-8000-00000000dead"))
    await scene.publish(record("fine"))
    async with scene.sinking():
        await scene.until_drained()
    assert set(await scene.notes()) == {"fine"}
    [letter] = scene.listener.letters
    assert "org_id" in letter.reason


async def test_a_batch_that_only_the_database_refuses_is_found_among_good_ones_and_tried_thrice(
    scene: SinkScene,
) -> None:
    for number in range(20):
        await scene.publish(record(f"good {number}"))
    await scene.publish(record("bad"), record("bad beside"), revision=2**63)
    for number in range(20, 40):
        await scene.publish(record(f"good {number}"))
    async with scene.sinking():
        await scene.until_drained()
    assert set(await scene.notes()) == {f"good {number}" for number in range(40)}
    [letter] = scene.listener.letters
    assert letter.tries == 3
    assert scene.listener.cursors[-1] == (await scene.rows("SELECT max(position) FROM {}"))[0][0]


async def test_a_large_batch_is_read_from_its_artifact(scene: SinkScene) -> None:
    good = scene.objects.root.child("buffer").location("good.json")
    await scene.objects.put(good, b'[{"key": "from an object", "note": "x"}]')
    await scene.publish(records=None, artifact=good.uri)
    await scene.publish(records=None, artifact=scene.objects.root.child("buffer").location("gone.json").uri)
    await scene.publish(records=None, artifact="file:///etc/passwd")
    await scene.publish(record("after"))
    async with scene.sinking():
        await scene.until_drained()
    assert set(await scene.notes()) == {"from an object", "after"}
    assert sorted((letter.tries, "can't be read" in letter.reason) for letter in scene.listener.letters) == [
        (1, True),
        (3, True),
    ]


async def test_an_artifact_is_emptied_once_its_records_are_rows_and_its_message_may_come_again(
    scene: SinkScene,
) -> None:
    def lying(batch_id: UUID) -> ObjectLocation:
        return batch_location(scene.objects.root, scene.output.dataset_uuid, batch_id)

    written, refused = uuid4(), uuid4()
    await scene.objects.put(lying(written), b'[{"key": "a", "note": "x"}]')
    await scene.objects.put(lying(refused), b'[{"nope": 1}]')
    body = await scene.publish(records=None, artifact=lying(written).uri, batch_id=written)
    await scene.publish(records=None, artifact=lying(refused).uri, batch_id=refused)
    await scene.publish(records=None, artifact=lying(refused).uri)
    async with scene.sinking():

        async def emptied() -> bool:
            return await scene.objects.read(lying(written), 100) == b"[]"

        await scene.until("the artifact to be emptied", emptied)
        await scene.put(body)
        await scene.until_drained()
    assert await scene.notes() == {"a": "x"}
    assert len(scene.listener.letters) == 2
    assert await scene.objects.read(lying(refused), 100) == b'[{"nope": 1}]', "a dead letter may be replayed"


@pytest.mark.parametrize("retraction_first", [True, False])
async def test_a_retraction_gives_the_same_before_and_after_the_republished_rows(
    scene: SinkScene, retraction_first: bool
) -> None:
    await scene.publish(record("gone"), record("kept"), revision=0)
    async with scene.sinking():
        await scene.until_drained()
        if retraction_first:
            await scene.retract(1)
            await scene.until_drained()
        await scene.publish(record("kept", "again"), revision=1)
        await scene.until_drained()
        if not retraction_first:
            await scene.retract(1)
            await scene.until_drained()
    found = await scene.rows("SELECT key, note, retracted_at IS NOT NULL FROM {} ORDER BY key")
    assert found == [("gone", "x", True), ("kept", "again", False)]
    assert scene.listener.cursors[-1] > 2


async def test_columns_that_a_deploy_adds_reach_a_running_sink(scene: SinkScene) -> None:
    await scene.publish(record("old"))
    async with scene.sinking():
        await scene.until_drained()
        old_hash = scene.schema.hash
        scene.listener.schema = schema_of({**COLUMNS, "amount": ColumnType.NUMERIC})
        await scene.publish(record("still old"), schema_hash=old_hash)
        await scene.publish(record("new", amount="1.5"))
        for turn in range(3):
            await scene.publish(record(f"mixed {turn}"), schema_hash=old_hash)
        await scene.until_drained()
    assert len(await scene.notes()) == 6
    assert await scene.rows("SELECT key, amount FROM {} WHERE amount IS NOT NULL") == [
        ("new", Decimal("1.5"))
    ]
    assert scene.listener.schema_questions == 1


async def test_batches_of_several_older_schemas_in_turn_ask_for_the_schema_once_each(
    scene: SinkScene,
) -> None:
    for turn in range(10):
        await scene.publish(record(f"{turn}"), schema_hash=f"sha256:older {turn % 2}")
    async with scene.sinking():
        await scene.until_drained()
    assert len(await scene.notes()) == 10
    assert scene.listener.schema_questions == 2
    assert len(await scene.rows("SELECT DISTINCT written_at FROM {}")) == 1, "they are one portion"


async def test_a_consumer_reads_what_was_written_after_its_cursor_and_a_changed_row_comes_again(
    scene: SinkScene,
) -> None:
    async with scene.sinking():
        await scene.publish(record("a"), record("b"), record("c"))
        await scene.until_drained()
        await scene.publish(record("a", "again"), revision=1)
        await scene.until_drained()
        await scene.retract(1)
        await scene.until_drained()
    read = await asyncio.to_thread(_positions, scene, [(-1, 2), (2, 4), (4, 9), (9, 9)])
    assert read == [[], [("a", 4, False)], [("b", 5, True), ("c", 6, True)], []]


def _positions(scene: SinkScene, cuts: list[tuple[int, int]]) -> list[list[tuple[str, int, bool]]]:
    """The rows of each cut, as an operator reads them."""
    output = scene.output
    inputs = [
        PayloadInput(
            *(place, output.dataset_uuid, output.dataset_version, 0, "alerts", "postgres"),
            after=after,
            upto=upto,
            cursor_column="position",
        )
        for place, (after, upto) in enumerate(cuts)
    ]
    ctx = HotScene(scene.data_dsn).begin(*inputs, versions=[])
    found = []
    for source in ctx.inputs:
        scan = scan_of_request(source.request())
        assert scan is not None
        parts = split_scan(scan, source.data.snapshot().connection, rows_per_task=1)
        rows = source.arrow().sort_by("position").to_pylist()
        assert sum(batch.num_rows for part in parts for batch in part.batches()) == len(rows)
        found.append([(row["key"], row["position"], row["retracted_at"] is not None) for row in rows])
    ctx.close()
    return found


async def test_a_schema_that_the_table_can_not_have_fails_the_task_with_the_reason(scene: SinkScene) -> None:
    async with scene.sinking() as sink:
        await scene.publish(record("a"))
        await scene.until_drained()
    scene.schema = scene.listener.schema = schema_of({**COLUMNS, "note": ColumnType.BYTEA})
    async with scene.sinking() as sink:
        report = await asyncio.wait_for(sink, 30)
    assert report is not None
    assert report.status == "Failed"
    assert "note is text, not bytea" in (report.error_message or "")


async def test_what_was_committed_and_not_said_is_said_by_the_next_attempt(scene: SinkScene) -> None:
    scene.listener.answers.clear()
    await scene.publish(record("a"))
    async with scene.sinking():
        await scene.listener.asked.wait()
    assert scene.listener.cursors == []
    scene.listener.answers.set()
    async with scene.sinking():
        await scene.until("the event", lambda: _true(scene.listener.cursors[:1] == [1]))
        await scene.until_drained()
    assert set(scene.listener.cursors) == {1}
    assert await scene.notes() == {"a": "x"}


async def test_an_older_sink_that_still_runs_commits_nothing_and_stops(scene: SinkScene) -> None:
    async with scene.sinking() as zombie:
        await scene.publish(record("a"))
        await scene.until_drained()
        async with scene.sinking():
            sent = 0
            while not zombie.done():
                sent += 1
                await scene.publish(record(f"for whoever takes it {sent}"))
                await scene.until_drained()
        assert zombie.result() is None
    assert len(await scene.notes()) == 1 + sent
    assert len(await scene.rows("SELECT position FROM {} GROUP BY position HAVING count(*) > 1")) == 0


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (Conflict("StaleAttempt", "a newer attempt runs"), None),
        (Conflict("Canceled", "the task was canceled"), "Canceled"),
        (Invalid("Refused", "no such event"), "Failed"),
    ],
)
async def test_a_refused_event_ends_the_attempt_and_the_messages_stay(
    scene: SinkScene, refusal: Conflict | Invalid, status: str | None
) -> None:
    scene.listener.refusal = refusal
    await scene.publish(record("a"))
    async with scene.sinking() as sink:
        report = await asyncio.wait_for(sink, 30)
    assert (None if report is None else report.status) == status
    assert (await scene.queue.depth(scene.name)).visible == 1


async def test_a_canceled_task_stops_at_once_and_a_released_one_writes_what_it_has(scene: SinkScene) -> None:
    async with scene.sinking() as sink:
        assert scene.held is not None
        scene.held.apply_heartbeat(HeartbeatResponse(None, cancel=True, pause=False))
        report = await asyncio.wait_for(sink, 30)
    assert report is not None
    assert report.status == "Canceled"
    await scene.publish(record("a"))
    async with scene.sinking() as sink:
        await scene.listener.asked.wait()
        scene.held.stop(Stop.RELEASED)
        report = await asyncio.wait_for(sink, 30)
    assert report is not None
    assert report.status == "Released"
    assert (await scene.queue.depth(scene.name)).visible == 0


async def test_a_paused_sink_leaves_messages_in_their_queue(scene: SinkScene) -> None:
    async with scene.sinking():
        await scene.publish(record("before"))
        await scene.until_drained()
        assert scene.held is not None
        scene.held.apply_heartbeat(HeartbeatResponse(None, cancel=False, pause=True))
        # What it was waiting for when it was paused may still come.
        await scene.publish(record("during"))
        scene.held.apply_heartbeat(HeartbeatResponse(None, cancel=False, pause=False))
        await scene.until_drained()
    assert set(await scene.notes()) == {"before", "during"}


async def test_a_data_database_that_is_away_is_waited_for(scene: SinkScene) -> None:
    async with (
        CuttingProxy(role_dsn(scene.data_dsn, WRITER_ROLE)) as proxy,
        scene.sinking(dsn=proxy.dsn) as sink,
    ):
        await scene.publish(record("before"))
        await scene.until_drained()
        proxy.refusing = True
        proxy.cut_all()
        await scene.publish(record("during"))
        assert scene.held is not None
        held = scene.held
        await scene.until("its wait to be shown", lambda: _true(_waits(held.heartbeat().progress)))
        assert not sink.done()
        proxy.refusing = False
        await scene.until_drained()
    assert set(await scene.notes()) == {"before", "during"}


async def test_a_backlog_is_drained_with_bounded_memory(
    scene: SinkScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "MAX_PORTION_BYTES", 64 * 1024)
    monkeypatch.setattr(drain, "MAX_RECEIVED_BYTES", 128 * 1024)
    note = "n" * 1000
    for start in range(0, 2000, 500):
        for number in range(start, start + 500, 50):
            await scene.publish(*(record(f"{number + each}", note) for each in range(50)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with scene.sinking():
        await scene.until_drained()
    assert await scene.rows("SELECT count(*), max(position) FROM {}") == [(2000, 2000)]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


async def _true(condition: bool) -> bool:
    return condition


def _waits(progress: dict[str, str | int | float | bool | None] | None) -> bool:
    return progress is not None and "waits_for" in progress
