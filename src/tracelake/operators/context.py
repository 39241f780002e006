"""``Context``: everything that an operator is given, and everything it may do.

    ctx.config                      the job's configuration, as the DAG has it
    ctx.blocks, ctx.scope           the blocks to work on, each of them or their bounds; a source has none
    ctx.inputs[0], ctx.inputs["logs"]
                                    .files(), .arrow(), .dataframe(): what is committed only, cut to scope and where
    ctx.outputs[0], ctx.outputs["result"]
                                    .write(table or DataFrame), .announce(cursor=…), .stage(rows)
    ctx.spark                       the attempt's own Spark session (``ecs_spark``)
    ctx.rpc_pool()                  the endpoints of the pool that the config names, for tracelake.evm
    ctx.emit(events…)               tell the platform now; returns once it has accepted them
    ctx.publish(dataset, records)   records for a buffered dataset
    ctx.query("SELECT …")           over the task's inputs, by the Query Service, in the versions it was given
    ctx.commit(…)                   make staged Postgres rows visible now (sources)
    ctx.progress(done=, total=)     for people to see
    ctx.state, ctx.save(state)      what a later attempt of this task finds
    ctx.canceled, ctx.paused        look at them in long loops
    ctx.log                         goes to the attempt's log, as print does

An operator ends by returning (all is reported then, at once) or by raising. ``Invalid`` says that trying again
won't help; after anything else the task is retried. Nothing is visible to readers before the attempt's
completion is accepted, and of a superseded attempt it never is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from tracelake.contracts.dispatcher_api import MAX_EVENTS, EventIn, OutputIn, TaskPayload
from tracelake.contracts.operator_protocol import CommitRows, EmitEvents, PublishRecords, Query, SaveState
from tracelake.contracts.query_api import QueryRequest, QueryResponse, to_wire
from tracelake.contracts.rpc_pool import PoolConfig
from tracelake.domain.errors import Invalid
from tracelake.operators.attempt_logger import AttemptLogger
from tracelake.operators.by_name import ByName
from tracelake.operators.data_database import DataDatabase
from tracelake.operators.inputs import Input
from tracelake.operators.link import Link
from tracelake.operators.missing_pool import missing_pool
from tracelake.operators.outputs import Output
from tracelake.operators.progress import Progress
from tracelake.operators.record_batches import record_batches
from tracelake.operators.scope import Scope, scope_of_task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Context:
    def __init__(
        self,
        task: TaskPayload,
        link: Link,
        *,
        state: Any = None,
        data_dsn: str | None = None,
        rpc_pool: PoolConfig | None = None,
        rpc_pools: Sequence[str] = (),
    ) -> None:
        self._link = link
        self._progress = Progress(link.report)
        self._emitted: set[Any] = set()
        self.task = task
        self.config: Mapping[str, Any] = task.config
        self.scope: Scope | None = scope_of_task(task)
        self.state: Any = state
        self._rpc_pool = rpc_pool
        self._rpc_pools = rpc_pools
        self.log = AttemptLogger()
        self._data = DataDatabase(data_dsn, task.timeout_seconds if self.scope else None)
        self.inputs = ByName("input", [Input(read, link, self._data) for read in task.inputs])
        self.outputs = ByName("output", [Output(output, self.scope, self._data) for output in task.outputs])

    @property
    def blocks(self) -> range:
        """The block numbers of the scope, one by one; empty when a cursor hasn't moved."""
        if self.scope is None:
            raise Invalid("InvalidScope", f"operator {self.task.operator!r} runs as a source, without blocks")
        return range(self.scope.start, self.scope.end + 1)

    @property
    def has_work(self) -> bool:
        """False when the cursor hasn't moved and nothing was taken back, as after an event that came twice: then
        there is nothing to run an operator for."""
        if self.scope is None or self.scope.blocks is not None:
            return True
        return any(read.invalidation is not None for read in self.task.inputs)

    @property
    def spark(self) -> SparkSession:
        return self._link.spark()

    def rpc_pool(self) -> PoolConfig:
        """The endpoints of the pool that the job's config names."""
        if self._rpc_pool is None:
            raise missing_pool(self.config.get("rpc_pool"), self._rpc_pools)
        return self._rpc_pool

    @property
    def canceled(self) -> bool:
        """The attempt is to stop soon; the process is killed a moment later."""
        return self._link.canceled

    @property
    def paused(self) -> bool:
        """A source produces nothing new while this holds."""
        return self._link.paused

    def wait_while_paused(self) -> bool:
        """False when the attempt is canceled and should return."""
        while self._link.paused and not self._link.canceled:
            self._link.wait(60)
        return not self._link.canceled

    def sleep(self, seconds: float) -> bool:
        """Like ``time.sleep``, but ends early when the attempt is canceled, and then returns False."""
        until = time.monotonic() + seconds
        while not self._link.canceled and (left := until - time.monotonic()) > 0:
            self._link.wait(left)
        return not self._link.canceled

    def emit(self, *events: EventIn | Mapping[str, Any]) -> None:
        """Send events now: what a source does. ``ctx.outputs[0].event(cursor=…)`` makes one."""
        parsed = [_event(event) for event in events]
        for batch in _batches(parsed, MAX_EVENTS):
            self._link.call(EmitEvents(batch))
            self._emitted.update(ref for event in batch for ref in (event.dataset_uuid, event.dataset))

    def publish(
        self, dataset: str, records: Iterable[Mapping[str, Any]], *, schema_hash: str | None = None
    ) -> int:
        """Hand records to a buffered dataset of the job's DAG, and return how many were accepted, durably. They
        may be handed in twice: the dataset's key decides. ``Conflict`` when its schema isn't ``schema_hash``,
        ``Invalid`` with the record and the field when one doesn't fit."""
        accepted = 0
        for batch in record_batches(records):
            wish = PublishRecords(dataset=dataset, records=batch, schema_hash=schema_hash)
            accepted += int(self._link.call(wish)["accepted"])
        return accepted

    def query(
        self,
        sql: str,
        params: Sequence[Any] | Mapping[str, Any] | None = None,
        *,
        limit: int | None = None,
    ) -> QueryResponse:
        """For small answers: each input is a table under its published name, or ``input_0`` and so on, and isn't
        cut to the scope. ``ctx.inputs[0].arrow()`` reads a scope, whatever its size."""
        wish = Query(QueryRequest(sql=sql, params=to_wire(params), limit=limit))
        return msgspec.convert(self._link.call(wish), QueryResponse)

    def commit(
        self,
        outputs: Sequence[Output],
        *,
        start: int,
        end: int,
        events: Iterable[EventIn | Mapping[str, Any]] = (),
    ) -> int:
        """Replace blocks ``start``–``end`` of Postgres outputs by what was staged, and answer with how many rows
        that were; the events are sent before this returns, also if the process dies in between."""
        staged = [rows for output in outputs if (rows := output.finish_staging()) is not None]
        after = [_event(event) for event in events]
        indexes = [output.index for output in outputs]
        wish = CommitRows(outputs=indexes, start=start, end=end, events=after, staged=staged)
        done = msgspec.convert(self._link.call(wish), list[OutputIn])
        for output, committed in zip(outputs, done, strict=True):
            output.committed(committed)
        return sum(committed.row_count or 0 for committed in done)

    def progress(
        self, *, done: int | None = None, total: int | None = None, message: str | None = None, **fields: Any
    ) -> None:
        """Shown on the task's row; call it as often as you like, only the latest counts."""
        named = {"done": done, "total": total, "message": message}
        self._progress.update({key: value for key, value in named.items() if value is not None} | fields)

    def spark_progress(self, fields: Mapping[str, Any]) -> None:
        """For the platform: what Spark says about itself stands beside what the operator says."""
        with suppress(ValueError):
            self._progress.update(fields)

    def save(self, state: Any) -> None:
        """Keep a small JSON value (64 KiB) for later attempts of this task, such as how far it came."""
        self._link.call(SaveState(state))
        self.state = state

    def finish(self) -> tuple[list[OutputIn], list[EventIn]]:
        """What the completion reports. For the platform; an operator just returns."""
        self._progress.finish()
        for output in self.outputs:
            if (due := output.commit_due) is not None:
                event = output.scope_event() if self.scope is not None and self.scope.by_cursor else None
                self.commit([output], start=due.start, end=due.end, events=[event] if event else [])
        reported: list[OutputIn] = []
        events: list[EventIn] = []
        for output in self.outputs:
            said = bool({output.dataset_uuid, output.dataset} & (self._emitted - {None}))
            files, announced = output.report(said)
            reported += files
            events += announced
        if len(reported) > MAX_EVENTS:
            raise Invalid(
                "TooManyOutputs", f"{len(reported)} scopes were written; at most {MAX_EVENTS} at once"
            )
        while len(events) > MAX_EVENTS:
            self.emit(*events[:MAX_EVENTS])
            del events[:MAX_EVENTS]
        return reported, events

    def close(self) -> None:
        """For the platform: nothing is held any more, whatever became of the attempt."""
        for output in self.outputs:
            output.drop_staging()
        self._data.close()


def _event(event: EventIn | Mapping[str, Any]) -> EventIn:
    if isinstance(event, EventIn):
        return event
    try:
        return msgspec.convert(dict(event), EventIn)
    except msgspec.ValidationError as error:
        raise Invalid("InvalidEvent", f"not an event: {error}") from None


def _batches(events: Sequence[EventIn], size: int) -> Iterable[list[EventIn]]:
    remaining = iter(events)
    while batch := list(islice(remaining, size)):
        yield batch
