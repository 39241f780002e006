"""Attempts on a real data database, without a worker: what a context asks of its wrapper is done by the committer.

scene = HotScene(data_dsn)
ctx = scene.begin(an_input(start=0, end=9))
ctx.outputs[0].stage(table)
ctx.finish()
scene.rows(ctx)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID, uuid4

import msgspec
import psycopg
import pytest
from psycopg import sql

from tracelake.contracts.dispatcher_api import EventIn, PayloadInput, PayloadOutput, TaskPayload
from tracelake.contracts.operator_protocol import Action, CommitRows
from tracelake.domain.errors import Invalid
from tracelake.hot.commit import HotStore
from tracelake.hot.install import WRITER_ROLE
from tracelake.hot.tickets import Ticket, Tickets
from tracelake.operators import Context
from tracelake.secret import Secret
from tracelake.testing.data_database import role_dsn
from tracelake.testing.operator_process import a_task, an_output
from tracelake.worker.data_commit import DataCommitter


class Wrapper:
    """Commits what the operator has staged, as the worker's wrapper does; ``said`` is what the Dispatcher heard."""

    canceled = paused = False

    def __init__(self, dsn: str, task: TaskPayload, spark: Any = None) -> None:
        self._dsn, self._task, self._spark = dsn, task, spark
        self.said: list[EventIn] = []
        self.wishes: list[CommitRows] = []
        self.ticket: Ticket | None = asyncio.run(self._with_committer(None))

    def call(self, action: Action) -> Any:
        if not isinstance(action, CommitRows):
            raise Invalid("NotHere", f"nobody answers {type(action).__name__}")
        self.wishes.append(action)
        return asyncio.run(self._with_committer(action))

    def report(self, fields: dict[str, Any]) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def spark(self) -> Any:
        return self._spark

    def end(self) -> None:
        """The attempt is over: its ticket is closed."""
        if self.ticket is not None:
            asyncio.run(self._close(self.ticket))
            self.ticket = None

    async def _close(self, ticket: Ticket) -> None:
        store = HotStore(Secret(role_dsn(self._dsn, WRITER_ROLE)))
        try:
            await Tickets(store).close(ticket)
        finally:
            await store.close()

    async def _with_committer(self, wish: CommitRows | None) -> Any:
        async def say(events: Sequence[EventIn]) -> None:
            self.said += events

        committer = DataCommitter(HotStore(Secret(role_dsn(self._dsn, WRITER_ROLE))))
        try:
            if wish is None:
                await committer.begin(self._task, say)
                return await committer.admit(self._task)
            return msgspec.to_builtins(await committer.commit(self._task, wish, say))
        finally:
            await committer.close()


class HotScene:
    """Attempts of one task after another, on one data database."""

    def __init__(self, dsn: str, spark: Any = None) -> None:
        self.dsn = dsn
        self.spark = spark
        self.wrapper: Wrapper | None = None
        self._epoch = 0
        self._begun: list[tuple[Context, Wrapper]] = []

    def begin(
        self,
        *inputs: PayloadInput,
        versions: Sequence[UUID | None] = (None,),
        operator: str = "mine",
        task_id: UUID | None = None,
        **fields: Any,
    ) -> Context:
        """A new attempt with an output for each of the dataset ``versions``, new ones where they are None."""
        self._epoch += 1
        task_id = task_id or uuid4()
        outputs = [
            _output(version, f"postgres_table:staging_{task_id.hex}_1_{self._epoch}_{index}", index)
            for index, version in enumerate(versions)
        ]
        task = a_task(operator, inputs=inputs, outputs=outputs, task_id=task_id)
        task = msgspec.structs.replace(task, epoch=self._epoch, **fields)
        self.wrapper = wrapper = Wrapper(self.dsn, task, self.spark)
        ctx = Context(task, wrapper, data_dsn=None if wrapper.ticket is None else wrapper.ticket.dsn.reveal())
        self._begun.append((ctx, wrapper))
        return ctx

    def end(self, ctx: Context) -> None:
        """As the worker ends an attempt, however it went."""
        ctx.close()
        for begun, wrapper in self._begun:
            if begun is ctx:
                wrapper.end()

    def rows(self, ctx: Context, output: int = 0) -> list[tuple[Any, ...]]:
        """What is committed of an output, ordered by its first column."""
        table = f"d_{ctx.task.outputs[output].dataset_version.hex}"
        query = sql.SQL("TABLE {} ORDER BY 1").format(sql.Identifier("data", table))
        with psycopg.connect(self.dsn) as connection:
            return connection.execute(query).fetchall()

    def staging_tables(self) -> list[str]:
        query = "SELECT tablename FROM pg_tables WHERE schemaname = 'staging' ORDER BY 1"
        with psycopg.connect(self.dsn) as connection:
            return [row[0] for row in connection.execute(query).fetchall()]

    def close(self) -> None:
        for ctx, _ in self._begun:
            self.end(ctx)


def _output(version: UUID | None, staging: str, index: int) -> PayloadOutput:
    output = an_output(index, name=f"result_{index}", storage="postgres", staging=staging)
    return output if version is None else msgspec.structs.replace(output, dataset_version=version)


@pytest.fixture
def hot_scene(data_dsn: str) -> Iterator[HotScene]:
    scene = HotScene(data_dsn)
    yield scene
    scene.close()
