"""Commits to the data database: fenced by epoch, by range and by input revisions, all or nothing."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import asyncpg
import pytest

from tests.support.hot_scene import (
    SCOPE,
    VERSION,
    Connection,
    Operators,
    output_of,
    rows,
    stage,
    staging_tables,
    writer,
)
from tracelake.contracts.dispatcher_api import EventIn
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Conflict, Invalid
from tracelake.hot.commit import HotStore
from tracelake.hot.install import WRITER_ROLE


async def test_a_commit_replaces_exactly_its_range(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    first, second = writer(1), writer(2)
    await hot.begin(first, VERSION, BlockRange(0, 19))
    assert await hot.commit(
        first, [output_of(await stage(operator, first, 1, 5, 15))], BlockRange(0, 19), []
    ) == [3]
    await hot.begin(second, VERSION, SCOPE)
    assert await hot.commit(
        second, [output_of(await stage(operator, second, 7, value="new"))], SCOPE, []
    ) == [1]
    assert await rows(admin) == [(7, "new"), (15, "x")]
    assert await staging_tables(admin) == []


async def test_an_attempt_that_was_superseded_commits_nothing(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    task_id = uuid4()
    old, new = writer(1, task_id), writer(2, task_id)
    await hot.begin(old, VERSION, SCOPE)
    staged = output_of(await stage(operator, old, 1))
    await hot.begin(new, VERSION, SCOPE)
    with pytest.raises(Conflict) as refused:
        await hot.commit(old, [staged], SCOPE, [EventIn(VERSION, VERSION, cursor=9)])
    assert refused.value.reason == "StaleEpoch"
    assert await rows(admin) == []
    assert await hot.pending_events(task_id) == []


async def test_an_older_attempt_cannot_even_begin(hot: HotStore) -> None:
    await hot.begin(writer(5), VERSION, SCOPE)
    with pytest.raises(Conflict):
        await hot.begin(writer(4), VERSION, BlockRange(9, 30))
    await hot.begin(writer(4), VERSION, BlockRange(10, 30))


async def test_who_read_an_older_revision_is_refused_whatever_its_epoch(
    hot: HotStore, operator: Operators
) -> None:
    await hot.begin(writer(5, revision=3), VERSION, SCOPE)
    late = writer(6, revision=2)
    with pytest.raises(Conflict):
        await hot.begin(late, VERSION, SCOPE)


async def test_a_commit_without_a_fence_of_its_own_is_refused(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    who = writer(1)
    with pytest.raises(Conflict):
        await hot.commit(who, [output_of(await stage(operator, who, 1))], SCOPE, [])
    await hot.begin(who, VERSION, SCOPE)
    with pytest.raises(Conflict):
        await hot.commit(who, [output_of()], BlockRange(0, 10), [])
    assert await rows(admin) == []


async def test_rows_outside_of_the_range_are_refused_and_nothing_is_lost(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    first, second = writer(1), writer(2)
    await hot.begin(first, VERSION, SCOPE)
    await hot.commit(first, [output_of(await stage(operator, first, 1))], SCOPE, [])
    await hot.begin(second, VERSION, SCOPE)
    with pytest.raises(Invalid) as refused:
        await hot.commit(second, [output_of(await stage(operator, second, 2, 10))], SCOPE, [])
    assert "1 staged rows lie outside of blocks 0 to 9" in refused.value.message
    assert await rows(admin) == [(1, "x")]


async def test_other_columns_than_the_dataset_has_are_refused(hot: HotStore, operator: Operators) -> None:
    first, second = writer(1), writer(2)
    await hot.begin(first, VERSION, SCOPE)
    await hot.commit(first, [output_of(await stage(operator, first, 1))], SCOPE, [])
    await hot.begin(second, VERSION, SCOPE)
    staged = await stage(operator, second, 1, more=["extra"])
    with pytest.raises(Invalid) as refused:
        await hot.commit(second, [output_of(staged)], SCOPE, [])
    assert "extra" in refused.value.message


async def test_events_of_a_commit_are_kept_with_it_until_they_were_sent(
    hot: HotStore, operator: Operators
) -> None:
    who = writer(1)
    event = EventIn(VERSION, VERSION, cursor=9)
    await hot.begin(who, VERSION, SCOPE)
    await hot.commit(who, [output_of(await stage(operator, who, 1))], SCOPE, [event])
    [pending] = await hot.pending_events(who.task_id)
    assert pending.events == [event]
    await hot.mark_delivered(pending.outbox_id)
    assert await hot.pending_events(who.task_id) == []


async def test_an_append_takes_each_key_once(hot: HotStore, operator: Operators, admin: Connection) -> None:
    first, second = writer(1), writer(2)
    for who, blocks in ((first, (1, 2)), (second, (2, 3))):
        await hot.begin(who, VERSION, SCOPE)
        staged = await stage(operator, who, *blocks, value=f"epoch {who.epoch}")
        appended = output_of(staged, appends=True, unique_key=("block_number",))
        await hot.commit(who, [appended], SCOPE, [])
    assert await rows(admin) == [(1, "epoch 1"), (2, "epoch 1"), (3, "epoch 2")]


async def test_no_fence_slips_in_between_a_commits_look_and_its_end(
    hot: HotStore, operator: Operators, admin: Connection, data_dsn: str
) -> None:
    """The newer attempt's begin waits for the commit that is under way; the older one's rows are there then."""
    task_id = uuid4()
    old, new = writer(1, task_id), writer(2, task_id)
    await hot.begin(old, VERSION, SCOPE)
    staged = output_of(await stage(operator, old, 1))
    holder = await asyncpg.connect(data_dsn)
    try:
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("SELECT tracelake.lock_version($1)", VERSION)
        committing = asyncio.create_task(hot.commit(old, [staged], SCOPE, []))
        beginning = asyncio.create_task(hot.begin(new, VERSION, SCOPE))
        async with asyncio.timeout(10):
            while await admin.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted") < 2:
                await asyncio.wait([committing, beginning], timeout=0.01)
        await transaction.rollback()
        done = await asyncio.gather(committing, beginning, return_exceptions=True)
    finally:
        await holder.close()
    assert done[1] is None
    assert await rows(admin) == ([(1, "x")] if done[0] == [1] else [])


async def test_operators_can_stage_and_nothing_else(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    who = writer(1)
    await hot.begin(who, VERSION, SCOPE)
    await hot.commit(who, [output_of(await stage(operator, who, 1))], SCOPE, [])
    table = await admin.fetchval("SELECT 'data.' || tracelake.table_of($1)", VERSION)
    connection = await operator.connection(who)
    for attempt in (
        f"TABLE {table}",
        f"TRUNCATE {table}",
        "SELECT * FROM tracelake.fence",
        "SELECT tracelake.table_of(gen_random_uuid())",
        "CREATE TABLE public.mine (x int)",
        "CREATE TABLE data.mine (x int)",
        "CREATE SCHEMA mine",
        f"SET ROLE {WRITER_ROLE}",
    ):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(attempt)


async def test_staging_tables_of_earlier_attempts_are_swept_by_the_next(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    task_id = uuid4()
    old, new = writer(1, task_id), writer(2, task_id)
    await stage(operator, old, 1)
    await operator.ticket(new)
    assert await staging_tables(admin) == []
