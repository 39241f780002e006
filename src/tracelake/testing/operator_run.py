"""``run_operator``: one attempt of an operator in the caller's process, with tables in memory as its inputs.

The operator gets the real ``Context``: inputs are written as Parquet into a temporary folder and read from there,
outputs are written as Parquet and read back, so types, scopes and refusals are those of a worker. A stand-in takes
the place of the worker: it records events, published records, progress and saved state. Code runs unconfined in
this process; accounts, sandboxes and hot tables in Postgres take a stack (``tracelake dev``).
"""

from __future__ import annotations

import io
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
from msgspec import UNSET

from tracelake.contracts.dispatcher_api import (
    EventIn,
    InputFile,
    JobRef,
    OutputIn,
    PayloadInput,
    PayloadOutput,
    PayloadSource,
    TaskPayload,
)
from tracelake.contracts.operator_protocol import (
    Action,
    EmitEvents,
    ListFiles,
    PublishRecords,
    Query,
    ReadSourceBody,
    SaveState,
)
from tracelake.contracts.query_api import QueryRequest, QueryResponse
from tracelake.contracts.rpc_pool import EndpointConfig, PoolConfig
from tracelake.contracts.sources import MAX_INLINE_BODY
from tracelake.domain.errors import Invalid
from tracelake.domain.runtimes import ECS_PYTHON, ECS_SPARK
from tracelake.operators.context import Context
from tracelake.operators.registry import Operator, Registry, declared_name

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

_POOL = "testing"
_STORAGES = ("parquet", "none")


@dataclass(frozen=True, slots=True)
class OperatorRun:
    """The result of an attempt that ended well. ``outputs`` has the rows of each Parquet output that was written;
    ``events`` are those that were sent on the way, and then those of the completion."""

    outputs: Mapping[str, pa.Table]
    events: Sequence[EventIn]
    published: Mapping[str, list[dict[str, Any]]]
    """Records by buffered dataset."""
    progress: Mapping[str, Any]
    state: Any
    """As the operator saved it last."""
    log: str
    """Everything that was printed or logged by ``ctx.log``."""


def run_operator(
    operator: Operator | str,
    *,
    config: Mapping[str, Any] | None = None,
    blocks: range | None = None,
    inputs: Mapping[str, pa.Table] | None = None,
    outputs: Sequence[str] | Mapping[str, str] = ("result",),
    state: Any = None,
    rpc_pool: PoolConfig | str | None = None,
    query: Callable[[QueryRequest], QueryResponse] | None = None,
    spark: SparkSession | None = None,
    stop_after_events: int | None = None,
    source: PayloadSource | Mapping[str, Any] | None = None,
) -> OperatorRun:
    """Run an operator, given as a function or by its name; errors that it raises are raised here.

    ``blocks`` is the scope of the task, each input's as well; ``None`` runs the operator as a source. ``outputs``
    are names of Parquet outputs, or names with their storage, ``parquet`` or ``none``. ``rpc_pool`` may be the URL
    of a single endpoint. ``query`` answers ``ctx.query``. ``stop_after_events`` cancels a source that runs for ever
    once it has sent that many events. ``source`` is what a task of a cron, webhook or manual source is for, in the
    form of its payload: ``{"kind": "cron", "tick": 1795034400}``, ``{"kind": "webhook", "delivery": {"body": …}}``
    with text or bytes, or ``{"kind": "manual", "request": {"start": 5, "end": 9}}``; fields that a stack would fill
    in may be left out."""
    function = Registry.standard().get(operator) if isinstance(operator, str) else operator
    name = operator if isinstance(operator, str) else declared_name(operator) or operator.__name__
    if blocks is not None and (blocks.step != 1 or not blocks):
        raise ValueError(f"blocks must be a range of at least one block with a step of 1, not {blocks!r}")
    if source is not None and (blocks is not None or inputs):
        raise ValueError("a source has neither blocks nor inputs")
    asked, body = _payload_source(source)
    storages = dict(outputs) if isinstance(outputs, Mapping) else dict.fromkeys(outputs, "parquet")
    if wrong := set(storages.values()) - set(_STORAGES):
        raise ValueError(f"outputs can be {' or '.join(_STORAGES)} here, not {', '.join(sorted(wrong))}")
    with tempfile.TemporaryDirectory(prefix="tracelake-testing-") as folder:
        files = [
            _write_input(Path(folder), index, table, blocks)
            for index, table in enumerate((inputs or {}).values())
        ]
        settings = dict(config or {})
        if rpc_pool is not None:
            settings.setdefault("rpc_pool", _POOL)
        task = TaskPayload(
            task_id=uuid4(),
            attempt=1,
            epoch=1,
            job=JobRef("testing", name),
            operator=name,
            config=settings,
            inputs=_payload_inputs(list(inputs or {}), blocks),
            outputs=[
                PayloadOutput(index, each, uuid4(), uuid4(), storage, 0, None, f"file://{folder}/out{index}/")
                for index, (each, storage) in enumerate(storages.items())
            ],
            runtime=ECS_PYTHON if spark is None else ECS_SPARK,
            timeout_seconds=3600,
            heartbeat_timeout_seconds=120,
            update_strategy="replace",
            unique_key=[],
            secrets=[],
            source=asked,
        )
        link = _RecordingLink(files, spark, query, stop_after_events, body)
        context = Context(task, link, state=state, rpc_pool=_pool(rpc_pool))
        return _run(function, context, link)


def _run(function: Operator, context: Context, link: _RecordingLink) -> OperatorRun:
    log = io.StringIO()
    try:
        with redirect_stdout(log), redirect_stderr(log):
            function(context)
            # As on a worker, nothing is reported of an attempt that was canceled.
            written, events = ([], []) if link.canceled else context.finish()
        # Read before the temporary folder is removed.
        tables = _read_outputs(context, written)
    except BaseException as error:
        error.add_note(f"the operator's log:\n{log.getvalue()}" if log.getvalue() else "the log is empty")
        raise
    finally:
        context.close()
    return OperatorRun(
        outputs=tables,
        events=[*link.events, *events],
        published=link.published,
        progress=link.progress,
        state=context.state,
        log=log.getvalue(),
    )


def _payload_source(
    given: PayloadSource | Mapping[str, Any] | None,
) -> tuple[PayloadSource | None, bytes | None]:
    """With the body of a delivery, for ``ctx.source_body()``."""
    if given is None or isinstance(given, PayloadSource):
        return given, None
    fields, body = dict(given), None
    now = datetime.now(UTC)
    if isinstance(request := fields.get("request"), Mapping):
        fields["request"] = {"number": 1, "requested_at": now, **request}
    if isinstance(delivery := fields.get("delivery"), Mapping):
        sent = dict(delivery)
        if "body_base64" not in sent:
            text = sent.pop("body", "")
            body = text if isinstance(text, bytes) else str(text).encode()
            sent.update(_sent_body(body))
        fields["delivery"] = {"number": 1, "id": "msg_1", "received_at": now, "bytes": 0, **sent}
    try:
        source = msgspec.convert(fields, PayloadSource)
    except msgspec.ValidationError as error:
        raise ValueError(f"source is not one of a payload: {error}") from None
    about = {"cron": source.tick, "webhook": source.delivery, "manual": source.request}
    if [kind for kind, value in about.items() if value is not None] != [source.kind]:
        raise ValueError("source has a tick for kind cron, a delivery for webhook, a request for manual")
    return source, body


def _sent_body(body: bytes) -> dict[str, Any]:
    """As the Dispatcher has it in a payload: a large body isn't there."""
    size = {"bytes": len(body)}
    if len(body) > MAX_INLINE_BODY:
        return size
    try:
        return {**size, "body": body.decode()}
    except UnicodeDecodeError:
        return {**size, "body_base64": b64encode(body).decode()}


def _payload_inputs(names: Sequence[str], blocks: range | None) -> list[PayloadInput]:
    """A task with blocks has an input that triggered it; it needn't have rows."""
    start, end = (UNSET, UNSET) if blocks is None else (blocks.start, blocks.stop - 1)
    if not names and blocks is not None:
        return [PayloadInput(0, uuid4(), uuid4(), 0, None, "none", start=start, end=end)]
    triggers = [blocks is not None and index == 0 for index in range(len(names))]
    return [
        PayloadInput(index, uuid4(), uuid4(), 0, name, "parquet", triggers[index], start=start, end=end)
        for index, name in enumerate(names)
    ]


def _write_input(folder: Path, index: int, table: pa.Table, blocks: range | None) -> InputFile:
    import pyarrow.parquet as pq

    path = folder / f"input{index}.parquet"
    pq.write_table(table, path)
    start, end = (0, 2**63 - 1) if blocks is None else (blocks.start, blocks.stop - 1)
    return InputFile(f"file://{path}", table.num_rows, path.stat().st_size, start, end)


def _read_outputs(context: Context, written: Sequence[OutputIn]) -> dict[str, pa.Table]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    found: dict[str, list[pa.Table]] = {}
    for output in written:
        files = output.manifest.files if output.manifest is not None else ()
        parts = found.setdefault(context.outputs[output.output_index].name, [])
        parts += [pq.read_table(file.location.removeprefix("file://")) for file in files]
    return {name: pa.concat_tables(parts) if parts else pa.table({}) for name, parts in found.items()}


def _pool(given: PoolConfig | str | None) -> PoolConfig | None:
    if not isinstance(given, str):
        return given
    return PoolConfig(name=_POOL, endpoints=(EndpointConfig(name="one", url=given),))


@dataclass
class _RecordingLink:
    """Stands in for the worker of an operator."""

    files: list[InputFile]
    session: SparkSession | None
    query: Callable[[QueryRequest], QueryResponse] | None
    stop_after_events: int | None
    body: bytes | None = None
    events: list[EventIn] = field(default_factory=list)
    published: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    paused: bool = False

    @property
    def canceled(self) -> bool:
        return self.stop_after_events is not None and len(self.events) >= self.stop_after_events

    def call(self, action: Action) -> Any:
        match action:
            case ListFiles(index):
                return [msgspec.to_builtins(self.files[index])]
            case EmitEvents(events):
                self.events += events
            case PublishRecords(dataset=dataset, records=records):
                self.published.setdefault(dataset, []).extend(records)
                return {"accepted": len(records)}
            case ReadSourceBody() if self.body is not None:
                return b64encode(self.body).decode()
            case SaveState():
                return None
            case Query(request) if self.query is not None:
                return msgspec.to_builtins(self.query(request))
            case Query():
                raise Invalid("NoQueryService", "ctx.query is answered by run_operator(…, query=…) in tests")
            case _:
                raise Invalid("NoDataDatabase", "rows of Postgres outputs are committed by a stack only")
        return None

    def report(self, fields: dict[str, Any]) -> None:
        self.progress = dict(fields)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def spark(self) -> SparkSession:
        if self.session is None:
            raise Invalid("NoSpark", "give run_operator a Spark session: spark=…")
        return self.session
