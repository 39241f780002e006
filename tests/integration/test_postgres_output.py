"""Rows of Postgres outputs: staged by the operator under its small role, committed by the wrapper's committer."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pyarrow as pa
import pytest
from psycopg import sql

from tracelake.contracts.dispatcher_api import EventIn, PayloadInput, TaskPayload
from tracelake.contracts.operator_protocol import Action, CommitRows
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.hot.commit import HotStore
from tracelake.hot.install import STAGING_ROLE, WRITER_ROLE, install
from tracelake.operators import Context, Output
from tracelake.secret import Secret
from tracelake.testing.operator_process import a_task, an_input, an_output
from tracelake.testing.postgres import CloneDatabase
from tracelake.worker.data_commit import DataCommitter

PASSWORD = Secret("a-password")


class Wrapper:
    """Commits what the operator has staged, as the worker's wrapper does."""

    canceled = paused = False

    def __init__(self, dsn: str, task: TaskPayload) -> None:
        self._dsn, self._task = dsn, task
        self.said: list[EventIn] = []
        self._run(CommitRows(outputs=[], start=0, end=0), begin=True)

    def call(self, action: Action) -> Any:
        assert isinstance(action, CommitRows)
        return self._run(action, begin=False)

    def report(self, fields: dict[str, Any]) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def spark(self) -> Any: ...

    def _run(self, wish: CommitRows, *, begin: bool) -> Any:
        async def say(events: Sequence[EventIn]) -> None:
            self.said += events

        async def work() -> Any:
            committer = DataCommitter(HotStore(Secret(role_dsn(self._dsn, WRITER_ROLE))))
            try:
                if begin:
                    return await committer.begin(self._task, say)
                return msgspec.to_builtins(await committer.commit(self._task, wish, say))
            finally:
                await committer.close()

        return asyncio.run(work())


def role_dsn(dsn: str, role: str) -> str:
    scheme, rest = dsn.split("://", 1)
    return f"{scheme}://{role}:{PASSWORD.reveal()}@{rest.split('@', 1)[1]}"


@pytest.fixture
def data_dsn(clone_database: CloneDatabase) -> str:
    dsn = clone_database("data", lambda dsn: None)
    asyncio.run(install(dsn, staging_password=PASSWORD, writer_password=PASSWORD))
    return dsn


def attempt(dsn: str, source: PayloadInput) -> tuple[Context, Wrapper]:
    task_id = UUID(int=7)
    output = an_output(storage="postgres", staging=f"postgres_table:staging_{task_id.hex}_1_1_0")
    task = a_task("mine", inputs=[source], outputs=[output], task_id=task_id)
    wrapper = Wrapper(dsn, task)
    return Context(task, wrapper, staging_dsn=role_dsn(dsn, STAGING_ROLE)), wrapper


def stored(dsn: str, ctx: Context) -> list[tuple[Any, ...]]:
    table = f"d_{ctx.task.outputs[0].dataset_version.hex}"
    with psycopg.connect(dsn) as connection:
        query = sql.SQL("TABLE {} ORDER BY 1").format(sql.Identifier("data", table))
        return connection.execute(query).fetchall()


def test_staged_rows_are_committed_for_the_scope_when_the_operator_returns(data_dsn: str) -> None:
    ctx, wrapper = attempt(data_dsn, an_input(start=0, end=9))
    rows = pa.table(
        {
            "block_number": [1, 2],
            "at": pa.array([0, None], pa.timestamp("us", "UTC")),
            "raw": [b"\x00\xff", None],
            "value": [str(2**256 - 1), "0"],
            "tags": [["a", "b\t\\"], []],
        }
    )
    assert ctx.outputs[0].stage(rows, types={"value": "numeric(78,0)"}) == 2
    [output], events = ctx.finish()
    assert (output.start, output.end, output.row_count, events) == (0, 9, 2, [])
    assert wrapper.said == []
    assert stored(data_dsn, ctx) == [
        (1, datetime(1970, 1, 1, tzinfo=UTC), b"\x00\xff", Decimal(2**256 - 1), ["a", "b\t\\"]),
        (2, None, None, Decimal(0), []),
    ]


def test_a_cursor_is_committed_together_with_its_event(data_dsn: str) -> None:
    ctx, wrapper = attempt(data_dsn, an_input(after=0, upto=5))
    ctx.outputs[0].stage(pa.table({"block_number": [1, 5]}))
    assert ctx.finish() == ([], [])
    assert [event.cursor for event in wrapper.said] == [5]
    assert stored(data_dsn, ctx) == [(1,), (5,)]


def test_a_source_commits_as_it_goes_and_says_what_it_wants(data_dsn: str) -> None:
    ctx, wrapper = attempt(
        data_dsn, PayloadInput(0, UUID(int=1), UUID(int=2), 0, None, "none", trigger=False)
    )
    output = ctx.outputs[0]
    for block in (1, 2):
        output.stage(pa.table({"block_number": [block]}))
        event = output.event(cursor=block)
        assert ctx.commit([output], start=block, end=block, events=[event]) == 1
    assert ctx.commit([output], start=2, end=2) == 0
    assert [event.cursor for event in wrapper.said] == [1, 2]
    assert stored(data_dsn, ctx) == [(1,)]


def test_rows_that_were_staged_and_never_committed_are_the_operators_mistake(data_dsn: str) -> None:
    ctx, _ = attempt(data_dsn, PayloadInput(0, UUID(int=1), UUID(int=2), 0, None, "none", trigger=False))
    ctx.outputs[0].stage(pa.table({"block_number": [1]}))
    with pytest.raises(Invalid, match="staged but not committed"):
        ctx.finish()
    ctx.outputs[0].finish_staging()


@pytest.mark.parametrize(
    ("types", "why"),
    [
        ({"value": "money; drop table x"}, "is not a column type"),
        ({"other": "text"}, "columns that aren't there: other"),
        ({"value": "integer"}, "refuses the rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused(data_dsn: str, types: dict[str, str], why: str) -> None:
    ctx, _ = attempt(data_dsn, an_input(start=0, end=9))
    with pytest.raises(Invalid, match=why):
        ctx.outputs[0].stage(pa.table({"block_number": [1], "value": ["x"]}), types=types)
    ctx.outputs[0].finish_staging()


def test_a_data_database_that_is_away_is_worth_another_try() -> None:
    payload = an_output(storage="postgres", staging="postgres_table:staging_x")
    output = Output(payload, None, "postgresql://x:y@127.0.0.1:1/none")
    with pytest.raises(Unavailable, match="can't be reached"):
        output.stage(pa.table({"a": [1]}))
