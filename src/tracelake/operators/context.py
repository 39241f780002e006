"""``Context``: everything that an operator gets, and everything it may do.

    ctx.config                      the job's configuration, as the DAG has it
    ctx.source, ctx.source_body()   of a cron, webhook or manual source: the tick, delivery or request; its body
    ctx.blocks, ctx.scope           the blocks to work on, each of them or their bounds; a source has none
    ctx.inputs[0], ctx.inputs["logs"]
                                    .files(), .arrow(), .dataframe(): committed rows only, cut to scope and where
    ctx.outputs[0], ctx.outputs["result"]
                                    .write(table or DataFrame), .announce(cursor=…), .stage(rows)
    ctx.spark                       the attempt's own Spark session (``ecs_spark``)
    ctx.rpc_pool()                  the endpoints of the pool that the config names, for tracelake.evm
    ctx.emit(events…)               send events now, as ctx.outputs[0].event(start=5, end=9); returns once the
                                    platform has accepted them
    ctx.publish(dataset, records)   records for a buffered dataset
    ctx.query("SELECT …")           over the task's inputs, by the Query Service, in the versions it was given
    ctx.commit(…)                   make staged Postgres rows visible now (sources)
    ctx.progress(done=, total=)     for people to see
    ctx.state, ctx.save(state)      a value that later attempts of this task get
    ctx.canceled, ctx.paused        check them in long loops
    ctx.log                         goes to the attempt's log, as print does

An operator ends by returning (all is reported then, at once) or by raising. ``Invalid`` says that trying again
won't help; after anything else the task is retried. Nothing is visible to readers before the attempt's
completion is accepted, and of a superseded attempt it never is.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from tracelake.contracts.dispatcher_api import (
    MAX_EVENTS,
    EventIn,
    OutputIn,
    PayloadSource,
    TaskPayload,
)
from tracelake.contracts.operator_protocol import (
    CommitRows,
    EmitEvents,
    PublishRecords,
    Query,
    ReadSourceBody,
    SaveState,
)
from tracelake.contracts.query_api import QueryRequest, QueryResponse, to_wire
from tracelake.contracts.rpc_pool import PoolConfig
from tracelake.domain.errors import Invalid
from tracelake.operators.inputs import Input, OperatorLink
from tracelake.operators.outputs import Output
from tracelake.operators.progress import AttemptLogger, ProgressReporter
from tracelake.tables.data_database import DataDatabase
from tracelake.tables.scope import ReadScope, scope_of_task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCH_BYTES = 8 * 1024 * 1024
"""Half of the limit of a publish, so that a record larger than this still fits, alone."""


class Context:
    def __init__(
        self,
        task: TaskPayload,
        link: OperatorLink,
        *,
        state: Any = None,
        data_ticket_dsn: str | None = None,
        rpc_pool: PoolConfig | None = None,
        rpc_pools: Sequence[str] = (),
    ) -> None:
        self._link = link
        self._progress = ProgressReporter(link.report)
        self._emitted: set[Any] = set()
        self.task = task
        self.config: Mapping[str, Any] = task.config
        self.scope: ReadScope | None = scope_of_task(task)
        self.state: Any = state
        self._rpc_pool = rpc_pool
        self._rpc_pools = rpc_pools
        self.log = AttemptLogger()
        self._data = DataDatabase(data_ticket_dsn, task.timeout_seconds if self.scope else None)
        self.inputs = ByName("input", [Input(read, link, self._data) for read in task.inputs])
        self.outputs = ByName("output", [Output(output, self.scope, self._data) for output in task.outputs])

    @property
    def blocks(self) -> range:
        """The block numbers of the scope, one by one; empty when a cursor hasn't moved."""
        if self.scope is None:
            raise Invalid("InvalidScope", f"operator {self.task.operator!r} runs as a source, without blocks")
        return range(self.scope.start, self.scope.end + 1)

    @property
    def source(self) -> PayloadSource | None:
        """For a cron, webhook or manual source: the tick, the delivery or the request that the task is for."""
        return self.task.source

    def source_body(self) -> bytes:
        """The body of the delivery that the task is for, as it came, whatever its size."""
        delivery = self.task.source.delivery if self.task.source is not None else None
        if delivery is None:
            raise Invalid("NoDelivery", "the task isn't for a delivery of a webhook")
        if delivery.body is not None:
            return delivery.body.encode()
        if delivery.body_base64 is not None:
            return base64.b64decode(delivery.body_base64)
        return base64.b64decode(self._link.call(ReadSourceBody()))

    @property
    def has_work(self) -> bool:
        """False when the cursor hasn't moved and nothing was invalidated, as after a repeated event: then the
        operator isn't called."""
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
        """The attempt should stop soon; the process is killed a moment later."""
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
            # ``wait`` also ends when the attempt is paused or resumed, so the time is measured here.
            self._link.wait(left)
        return not self._link.canceled

    def emit(self, *events: EventIn | Mapping[str, Any]) -> None:
        """Send events now, as a source does. ``ctx.outputs[0].event(cursor=…)`` makes one."""
        parsed = [_event(event) for event in events]
        for batch in _batches(parsed, MAX_EVENTS):
            self._link.call(EmitEvents(batch))
            self._emitted.update(ref for event in batch for ref in (event.dataset_uuid, event.dataset))

    def publish(
        self, dataset: str, records: Iterable[Mapping[str, Any]], *, schema_hash: str | None = None
    ) -> int:
        """Publish records to a buffered dataset of the job's DAG; returns how many were accepted, durably.
        Publishing a record twice is harmless: the dataset's key makes it one row. ``Conflict`` when its schema
        isn't ``schema_hash``, ``Invalid`` with the record and the field when one doesn't fit."""
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
        """Replace blocks ``start``–``end`` of Postgres outputs by the staged rows; returns how many there were. The
        events are sent before this returns, even if the process dies in between."""
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
        """Show progress on the task's row; call it as often as you like, only the latest counts."""
        named = {"done": done, "total": total, "message": message}
        self._progress.update({key: value for key, value in named.items() if value is not None} | fields)

    def spark_progress(self, fields: Mapping[str, Any]) -> None:
        """For the platform: Spark's own progress, shown beside the operator's."""
        with suppress(ValueError):
            # Too many fields of Spark's are no reason to fail the operator.
            self._progress.update(fields)

    def save(self, state: Any) -> None:
        """Keep a small JSON value (64 KiB) for later attempts of this task, such as how far it came."""
        self._link.call(SaveState(state))
        self.state = state

    def finish(self) -> tuple[list[OutputIn], list[EventIn]]:
        """For the platform: the outputs and events that the completion reports. An operator just returns."""
        self._progress.finish()
        for output in self.outputs:
            if (due := output.commit_due) is not None:
                event = output.scope_event() if self.scope is not None and self.scope.by_cursor else None
                # Before the reports, which refuse rows that are staged and not committed.
                self.commit([output], start=due.start, end=due.end, events=[event] if event else [])
        reported: list[OutputIn] = []
        events: list[EventIn] = []
        for output in self.outputs:
            emitted = bool({output.dataset_uuid, output.dataset} & (self._emitted - {None}))
            files, announced = output.report(emitted)
            reported += files
            events += announced
        if len(reported) > MAX_EVENTS:
            raise Invalid(
                "TooManyOutputs", f"{len(reported)} scopes were written; at most {MAX_EVENTS} at once"
            )
        # A completion takes a limited number of events; the rest are sent before it.
        while len(events) > MAX_EVENTS:
            self.emit(*events[:MAX_EVENTS])
            del events[:MAX_EVENTS]
        return reported, events

    def close(self) -> None:
        """For the platform: release everything, however the attempt ended."""
        for output in self.outputs:
            # Needs the connection that is closed below.
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


class HasName(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=HasName)


class ByName(Generic[T]):
    """The inputs or outputs of a task: by position, or by the name that the DAG gives them."""

    def __init__(self, kind: str, items: Sequence[T]) -> None:
        self._kind = kind
        self._items = tuple(items)

    def __getitem__(self, key: int | str) -> T:
        if isinstance(key, int):
            if not 0 <= key < len(self._items):
                raise Invalid(f"Unknown{self._kind.title()}", f"the task has no {self._kind} {key}")
            return self._items[key]
        found = [item for item in self._items if item.name == key]
        if len(found) != 1:
            names = ", ".join(item.name for item in self._items) or "none"
            why = (
                f"no {self._kind} {key!r}" if not found else f"several {self._kind}s {key!r}: use their index"
            )
            raise Invalid(f"Unknown{self._kind.title()}", f"the task has {why}; it has {names}")
        return found[0]

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"[{', '.join(item.name for item in self._items)}]"


def missing_pool(named: object, known: Sequence[str]) -> Invalid:
    """The error of an operator without an RPC pool, with a remedy. ``named`` is the pool in the job's config,
    ``known`` are the worker's pools."""
    if named is None:
        return Invalid(
            "RpcPoolMissing", "the job's config names no RPC pool: add rpc_pool, as in rpc_pool: main"
        )
    if not isinstance(named, str):
        return Invalid("RpcPoolMissing", f"rpc_pool in the job's config is the name of a pool, not {named!r}")
    if not known:
        remedy = "write rpc.toml into its home, or set TRACELAKE_RPC_POOLS to its path"
        return Invalid("RpcPoolMissing", f"there is no RPC pool {named!r}: the worker has no pools; {remedy}")
    return Invalid(
        "RpcPoolMissing",
        f"there is no RPC pool {named!r}: configured pools: {', '.join(sorted(known))}; "
        f"add [pools.{named}] to its rpc.toml, or name another in the job's config",
    )


def record_batches(records: Iterable[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Records as JSON values, in batches that fit one publish. Bytes become ``0x…``; dates, times, decimals and
    uuids become text."""
    batch: list[dict[str, Any]] = []
    size = 0
    for number, record in enumerate(records):
        plain = _plain(record, number)
        more = len(msgspec.json.encode(plain))
        if batch and size + more > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(plain)
        size += more
    if batch:
        yield batch


def _plain(record: Mapping[str, Any], number: int) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = msgspec.to_builtins(_hex(dict(record)))
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid("InvalidRecord", f"record {number} can't be sent as JSON: {error}") from None
    return plain


def _hex(value: Any) -> Any:
    match value:
        case bytes() | bytearray() | memoryview():
            return "0x" + bytes(value).hex()
        case dict():
            return {name: _hex(each) for name, each in value.items()}
        case list() | tuple():
            return [_hex(each) for each in value]
        case _:
            return value
