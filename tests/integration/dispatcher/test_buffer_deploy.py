"""A deploy and its buffered datasets: the sink that comes with one, schemas that grow, datasets that return."""

from __future__ import annotations

from typing import Any

import asyncpg
import msgspec
import pytest

from tests.support.conversation import Conversation, Lease, dag, reactive, source
from tests.support.postgres import CloneDatabase
from tracelake.contracts.buffers import SinkConfig
from tracelake.contracts.dispatcher_api import EventIn
from tracelake.dispatcher.steps.buffered_datasets import current_schema
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.deploy_dag import plan_dag
from tracelake.dispatcher.steps.running_attempt import fetch_task
from tracelake.domain.buffers import BufferSchema
from tracelake.domain.dag.plan import render
from tracelake.domain.errors import Conflict, InvalidDag, NotFound
from tracelake.store import reads
from tracelake.store.installation import migrate, migrations

SINK = "alerts.sink"


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


def buffered(unique: tuple[str, ...] = ("key",), **columns: str) -> dict[str, Any]:
    return {
        "storage": "postgres",
        "write_mode": "buffered",
        "schema": {"columns": {"key": "text", **columns}, "unique": list(unique)},
    }


def alerting(*jobs: dict[str, Any], name: str = "chain", **datasets: Any) -> str:
    return dag(source(), *jobs, name=name, publish=datasets)


async def sink(talk: Conversation) -> Lease:
    return await talk.lease(SINK)


async def test_a_buffered_dataset_comes_with_a_sink_that_is_told_its_schema(talk: Conversation) -> None:
    deployed = await talk.deploy(alerting(alerts=buffered(severity="text")))
    [buffer] = deployed.buffers
    assert set(deployed.jobs) == {"src"}
    lease = await sink(talk)
    payload = lease.payload
    config = msgspec.convert(payload.config, SinkConfig)
    assert (payload.operator, payload.runtime, payload.unique_key) == ("buffer_sink", "sink", ["key"])
    assert (config.dataset, config.org_id, config.schema_hash) == (
        "alerts",
        str(talk.ctx.org_id),
        buffer.schema_hash,
    )
    assert (config.schema.hash, config.schema.names) == (buffer.schema_hash, ("key", "severity"))
    [output] = payload.outputs
    assert (output.dataset_uuid, output.dataset_version) == (buffer.dataset_uuid, buffer.dataset_version)
    assert (output.storage, output.dataset) == ("postgres", "alerts")
    assert (await fetch_task(talk.ctx, lease.task_id)).task.config == payload.config


async def test_the_sink_is_woken_on_its_own_queue_and_shown_like_any_other_task(talk: Conversation) -> None:
    await talk.deploy(alerting(alerts=buffered()))
    [wake] = await talk.all_wakes()
    assert wake["runtime"] == "sink"
    shown = await talk.ctx.db.run(lambda tx: reads.task(tx, wake["task_id"]))
    assert (shown.job, shown.operator, shown.kind, shown.status) == (SINK, "buffer_sink", "source", "Queued")
    assert shown.waiting_for is not None
    assert shown.waiting_for.reason == "Worker"


async def test_the_sinks_events_move_its_readers_by_position(talk: Conversation) -> None:
    page = reactive("page", {"from": {"dataset": "alerts"}}, strategy="PerUpdate")
    await talk.deploy(alerting(page, alerts=buffered()))
    lease = await sink(talk)
    await talk.emit(lease, EventIn(dataset="alerts", cursor=17))
    read = (await talk.lease("page")).read
    assert (read.after, read.upto, read.cursor_column, read.storage) == (-1, 17, "position", "postgres")


async def test_the_same_schema_again_keeps_the_task_and_the_version(talk: Conversation) -> None:
    before = await talk.deploy(alerting(alerts=buffered(severity="text")))
    lease = await sink(talk)
    rearranged = {"key": "text"}
    after = await talk.deploy(
        alerting(
            source("other"),
            alerts={
                **buffered(),
                "schema": {"columns": {"severity": "text", **rearranged}, "unique": ["key"]},
            },
        )
    )
    assert after.buffers == before.buffers
    assert not (await talk.beat(lease)).cancel
    assert len(await talk.tasks(SINK)) == 1


async def test_a_new_column_reaches_the_running_sink_and_nobody_is_replaced(talk: Conversation) -> None:
    page = reactive("page", {"from": {"dataset": "alerts"}}, strategy="PerUpdate")
    [before] = (await talk.deploy(alerting(page, alerts=buffered()))).buffers
    lease = await sink(talk)
    wider = alerting(page, alerts=buffered(severity="text"))
    assert "column severity text is added" in render(await plan_dag(talk.ctx, wider))
    deployed = await talk.deploy(wider)
    [after] = deployed.buffers
    assert {change.kind for change in deployed.plan.jobs} == {"unchanged"}
    assert (after.dataset_uuid, after.dataset_version) == (before.dataset_uuid, before.dataset_version)
    assert after.schema_hash != before.schema_hash
    assert not (await talk.beat(lease)).cancel
    now = await current_schema(talk.ctx, before.dataset_uuid)
    assert (now.schema_hash, now.schema.names) == (after.schema_hash, ("key", "severity"))


async def test_a_schema_that_does_more_than_grow_is_refused_with_every_reason(talk: Conversation) -> None:
    await talk.deploy(alerting(alerts=buffered(severity="text", at="timestamptz")))
    state = await talk.everything()
    with pytest.raises(InvalidDag) as refused:
        await talk.deploy(alerting(alerts=buffered(("key", "severity"), severity="bigint")))
    assert [(problem.field, problem.line > 1) for problem in refused.value.problems] == [
        ("publish.alerts.schema.columns.severity", True),
        ("publish.alerts.schema.columns", True),
        ("publish.alerts.schema.unique", True),
    ]
    assert await talk.everything() == state


async def test_a_dataset_that_goes_stops_its_sink_and_one_that_returns_goes_on(talk: Conversation) -> None:
    [before] = (await talk.deploy(alerting(alerts=buffered(severity="text")))).buffers
    lease = await sink(talk)
    await talk.emit(lease, EventIn(dataset="alerts", cursor=5))
    assert (await talk.deploy(alerting())).buffers == []
    assert (await talk.beat(lease)).cancel
    assert (await talk.claim(lease.task_id)).reason == "Canceled"
    with pytest.raises(NotFound):
        await talk.ctx.db.run(lambda tx: reads.dataset(tx, talk.ctx.org_id, "alerts"))

    with pytest.raises(InvalidDag, match="column severity can't be removed"):
        await talk.deploy(alerting(alerts=buffered()))
    [after] = (await talk.deploy(alerting(alerts=buffered(severity="text", at="timestamptz")))).buffers
    assert (after.dataset_uuid, after.dataset_version) == (before.dataset_uuid, before.dataset_version)
    again = await sink(talk)
    assert (again.task_id, again.attempt) == (lease.task_id, 2)
    assert again.payload.outputs[0].written is not None
    assert again.payload.outputs[0].written.cursor == 5
    with pytest.raises(Conflict):
        await talk.emit(lease, EventIn(dataset="alerts", cursor=6))


async def test_a_name_may_turn_from_a_buffer_into_an_output_and_back(talk: Conversation) -> None:
    [before] = (await talk.deploy(alerting(alerts=buffered()))).buffers
    await talk.deploy(alerting(alerts={"from": {"job": "src", "output": 0}}))
    found = await talk.ctx.db.run(lambda tx: reads.dataset(tx, talk.ctx.org_id, "alerts"))
    assert (found.job, found.write_mode) == ("src", "task")
    [after] = (await talk.deploy(alerting(alerts=buffered(at="timestamptz")))).buffers
    assert after.dataset_uuid == before.dataset_uuid
    shown = await talk.ctx.db.run(lambda tx: reads.dataset(tx, talk.ctx.org_id, "alerts"))
    assert (shown.job, shown.write_mode, shown.schema_hash) == (SINK, "buffered", after.schema_hash)
    assert shown.schema is not None
    assert {"key", "at"} <= {column.name for column in shown.schema.columns}


async def test_two_dags_have_sinks_of_their_own(talk: Conversation) -> None:
    [one] = (await talk.deploy(alerting(alerts=buffered()))).buffers
    with pytest.raises(InvalidDag, match="already published by DAG chain"):
        await talk.deploy(alerting(name="other", alerts=buffered()))
    await talk.deploy(alerting())
    [two] = (await talk.deploy(alerting(name="other", alerts=buffered(at="timestamptz")))).buffers
    assert two.dataset_uuid != one.dataset_uuid


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"operator": "buffer_sink"}, "the platform's own"),
        ({"runtime": "sink"}, "unknown runtime 'sink'"),
        ({"name": "alerts.sink"}, "does not match"),
    ],
)
async def test_nobody_can_pose_as_a_sink(talk: Conversation, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidDag, match=message):
        await talk.deploy(alerting({**reactive("work", "src"), **fields}, alerts=buffered()))


OLD_DATASETS = """
INSERT INTO org (org_id, name) VALUES ('00000000-0000-0000-0000-000000000001', 'o');
INSERT INTO dataset (dataset_uuid, org_id, dag_name, published_name, write_mode, buffer_schema)
SELECT u::uuid, '00000000-0000-0000-0000-000000000001', 'chain', n, 'buffered',
       '{"type": "buffered", "name": "alerts", "unique": ["key", "at"],
         "columns": [{"name": "key", "type": "text"}, {"name": "at", "type": "timestamptz"}]}'
FROM (VALUES ('00000000-0000-0000-0000-00000000000a', 'alerts'),
             ('00000000-0000-0000-0000-00000000000b', NULL)) AS old(u, n);
INSERT INTO dataset_version (dataset_version, dataset_uuid, output_index, output_name, storage, is_current)
VALUES (gen_random_uuid(), '00000000-0000-0000-0000-00000000000a', 0, 'alerts', 'postgres', true),
       (gen_random_uuid(), '00000000-0000-0000-0000-00000000000b', 0, 'gone', 'postgres', true);
"""
AFTERWARDS = """
SELECT d.job_name, d.schema_hash, d.buffer_schema::text AS schema, j.active, dv.is_current, t.status
FROM dataset d JOIN dataset_version dv USING (dataset_uuid) JOIN job j ON j.job_id = dv.job_id
LEFT JOIN task t ON t.job_id = j.job_id ORDER BY d.job_name
"""


async def test_a_dataset_declared_before_there_were_sinks_gets_one(
    clone_database: CloneDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await asyncpg.connect(clone_database("empty", lambda dsn: None))
    try:
        with monkeypatch.context() as older:
            known = [migration for migration in migrations() if migration.version < 6]
            older.setattr("tracelake.postgres.migrations.Schema.migrations", lambda _: known)
            await migrate(connection)
        await connection.execute(OLD_DATASETS)
        await migrate(connection)
        live, gone = await connection.fetch(AFTERWARDS)
    finally:
        await connection.close()
    schema = msgspec.json.decode(live["schema"], type=BufferSchema)
    assert live["schema_hash"] == schema.hash
    assert (live["job_name"], live["active"], live["is_current"], live["status"]) == (
        SINK,
        True,
        True,
        "Queued",
    )
    assert (gone["job_name"], gone["active"], gone["is_current"], gone["status"]) == (
        "gone.sink",
        False,
        False,
        None,
    )
