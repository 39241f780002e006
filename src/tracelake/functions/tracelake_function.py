"""The Tracelake client for functions: one file, the standard library alone.

    from tracelake_function import Task

    def handler(event, context):
        task = Task(event)
        found = task.query(f"SELECT * FROM transfers WHERE {task.window()} AND value > ?", [10**21])
        task.publish("alerts", [dict(zip(found["columns"], row)) for row in found["rows"]])

A function that returns without a value is completed by its runtime, and its outputs are announced with the
task's own scope; an exception fails the attempt, and the platform decides about a retry. So ``complete`` and
``fail`` are for functions that want to report more, or earlier. Every call is made for this attempt and fenced:
once another attempt has been claimed, every call raises ``TaskError`` with status 409.
"""

from __future__ import annotations

import base64
import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from datetime import time as time_of_day
from decimal import Decimal
from typing import Any
from uuid import UUID

__all__ = ["Task", "TaskError"]

_TRIES = 6
_TIMEOUT_SECONDS = 35.0
_QUERY_SECONDS = 300.0
_BATCH_BYTES = 8 * 1024 * 1024
"""A publish may be larger, but not by much: further records go with the next one."""


class TaskError(Exception):
    """The platform refused a call: ``status`` as in HTTP, ``reason`` a stable word, the text for people."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.status = status
        self.reason = reason


class Task:
    """One attempt of a task, as its event describes it."""

    def __init__(self, event: Mapping[str, Any], url: str | None = None) -> None:
        self.task_id: str = event["task_id"]
        self.attempt: int = event["attempt"]
        self.job: Mapping[str, str] = event["job"]
        self.config: Mapping[str, Any] = event.get("config") or {}
        self.inputs: list[Mapping[str, Any]] = event["inputs"]
        self.outputs: list[Mapping[str, Any]] = event["outputs"]
        self.source: Mapping[str, Any] | None = event.get("source")
        self._lease_token: str = event["lease_token"]
        self._token: str = event["capability_token"]
        self._url = (url or os.environ["TRACE_DISPATCHER_URL"]).rstrip("/")
        # The machine's proxy doesn't lead to the Dispatcher.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __repr__(self) -> str:
        return f"Task({self.task_id}, attempt {self.attempt})"

    @property
    def scope(self) -> Mapping[str, int]:
        """``start`` and ``end`` of a PerPartition task, ``after`` and ``upto`` of a PerUpdate one."""
        read = next((entry for entry in self.inputs if entry.get("trigger", True)), {})
        names = ("start", "end") if "start" in read else ("after", "upto")
        return {name: read[name] for name in names if name in read}

    @property
    def start(self) -> int:
        return self.scope["start"]

    @property
    def end(self) -> int:
        return self.scope["end"]

    @property
    def after(self) -> int:
        return self.scope["after"]

    @property
    def upto(self) -> int:
        return self.scope["upto"]

    def source_body(self) -> bytes:
        """The body of the webhook's delivery that the task is for, as it came, whatever its size."""
        delivery = (self.source or {}).get("delivery")
        if delivery is None:
            raise TaskError(404, "NoDelivery", "the task isn't for a delivery of a webhook")
        if delivery.get("body") is not None:
            text: str = delivery["body"]
            return text.encode()
        if delivery.get("body_base64") is not None:
            return base64.b64decode(delivery["body_base64"])
        return self._get("source-body", _TIMEOUT_SECONDS)

    def emit(
        self,
        *,
        cursor: int | None = None,
        start: int | None = None,
        end: int | None = None,
        output: int = 0,
    ) -> dict[str, Any]:
        """Announce that an output reaches up to ``cursor``, or holds the blocks ``start`` to ``end``."""
        return self.emit_all([self.event(cursor=cursor, start=start, end=end, output=output)])

    def emit_all(self, events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        return self._call("events", {"events": list(events)})

    def event(
        self,
        *,
        cursor: int | None = None,
        start: int | None = None,
        end: int | None = None,
        output: int = 0,
    ) -> dict[str, Any]:
        """One event for ``emit_all`` or ``complete``."""
        named = self.outputs[output]
        scope = {"cursor": cursor, "start": start, "end": end}
        fields = {name: value for name, value in scope.items() if value is not None}
        return {
            "dataset_uuid": named["dataset_uuid"],
            "dataset_version": named["dataset_version"],
            **fields,
        }

    def table(self, index: int = 0) -> str:
        """The name of an input in a query: its published name, or ``input_0`` and so on."""
        return self.inputs[index].get("dataset") or f"input_{index}"

    def window(self, index: int = 0) -> str:
        """A SQL condition for the rows of an input that this task covers: its scope, and the ``where`` of its
        edge.

        ``(block_number > 5 AND block_number <= 9 AND (severity = 'critical'))``; ``(TRUE)`` for an input that is
        read as a whole.
        """
        read = self.inputs[index]
        column = read.get("cursor_column") or "block_number"
        terms = [
            f"{column} {sign} {read[name]:d}"
            for name, sign in (("start", ">="), ("end", "<="), ("after", ">"), ("upto", "<="))
            if read.get(name) is not None
        ]
        if read.get("where"):
            terms.append(f"({read['where']})")
        return f"({' AND '.join(terms) or 'TRUE'})"

    def query(
        self,
        sql: str,
        params: Sequence[Any] | Mapping[str, Any] | None = None,
        limit: int | None = None,
        *,
        export: bool = False,
    ) -> dict[str, Any]:
        """One SELECT over the task's own inputs: ``{columns, types, rows, row_count, truncated}``.

        Each is a table under ``table(index)``, in the version that the task was given. ``params`` are a list for
        ``?``, or a mapping for ``$name``; ``bytes`` are compared with binary columns, which come back as "0x…".
        ``export`` puts all rows into a Parquet file instead and answers with its ``query_id``, for ``exported``.
        """
        asked = {"sql": sql, "params": _params(params), "limit": limit, "export": export or None}
        body = {name: value for name, value in asked.items() if value is not None}
        return self._call("query", body, fenced=False, seconds=_QUERY_SECONDS)

    def exported(self, query_id: str) -> bytes:
        """The Parquet file of a query with ``export``, for as long as this attempt lasts."""
        return self._get(f"exports?query_id={query_id}", _QUERY_SECONDS)

    def _get(self, name: str, seconds: float) -> bytes:
        request = urllib.request.Request(  # the address is the platform's own
            f"{self._url}/v1/task/{name}", headers={"X-Trace-Task-Capability": self._token}
        )
        try:
            with self._opener.open(request, timeout=seconds) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as refused:
            with refused:
                raise _refusal(refused.code, refused.read()) from None
        except OSError as lost:
            raise TaskError(503, "Unreachable", f"/v1/task/{name}: {lost}") from None

    def publish(
        self, dataset: str, records: Iterable[Mapping[str, Any]], schema_hash: str | None = None
    ) -> dict[str, Any]:
        """Send records to a buffered dataset; ``{accepted, batch_id}``, without a batch for no records.

        They may be sent twice: the dataset's key decides. With a ``schema_hash`` they are refused (409
        ``SchemaMismatch``) when the dataset's schema isn't that one.
        """
        body: dict[str, Any] = {"dataset": dataset}
        if schema_hash is not None:
            body["schema_hash"] = schema_hash
        done: dict[str, Any] = {"accepted": 0, "batch_id": None}
        for batch in _batches(records):
            answer = self._call("buffer-publish", {**body, "records": batch})
            done = {**answer, "accepted": done["accepted"] + answer["accepted"]}
        return done

    def heartbeat(self) -> dict[str, Any]:
        """Extend the lease; ``cancel`` in the answer means: stop."""
        answer = self._call("heartbeat", {})
        self._token = answer.get("capability_token") or self._token
        return answer

    def complete(
        self,
        events: Iterable[Mapping[str, Any]] | None = None,
        outputs: Iterable[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """Complete the task. Without ``events``, outputs that consist of events alone are announced with this
        scope."""
        announced = self.own_scope() if events is None else list(events)
        return self._call("complete", {"status": "Completed", "events": announced, "outputs": list(outputs)})

    def fail(self, message: str, *, retryable: bool = True) -> dict[str, Any]:
        return self._call("complete", {"status": "Failed", "error_message": message, "retryable": retryable})

    def own_scope(self) -> list[dict[str, Any]]:
        """One event for each output without storage, with the task's own scope."""
        scope = self.scope
        fields = {"start": scope["start"], "end": scope["end"]} if "start" in scope else {}
        if scope.get("upto", -1) >= 0:
            fields = {"cursor": scope["upto"]}
        free = [index for index, output in enumerate(self.outputs) if output["storage"] == "none"]
        return [self.event(**fields, output=index) for index in free] if fields else []

    def _call(
        self, name: str, body: Mapping[str, Any], *, fenced: bool = True, seconds: float = _TIMEOUT_SECONDS
    ) -> dict[str, Any]:
        fence = {"task_id": self.task_id, "attempt": self.attempt, "lease_token": self._lease_token}
        request = urllib.request.Request(  # the address is the platform's own
            f"{self._url}/v1/task/{name}",
            data=_json({**(fence if fenced else {}), **body}),
            headers={"Content-Type": "application/json", "X-Trace-Task-Capability": self._token},
            method="POST",
        )
        for attempt in range(_TRIES):
            try:
                with self._opener.open(request, timeout=seconds) as answer:
                    read: dict[str, Any] = json.load(answer)
                    return read
            except urllib.error.HTTPError as refused:
                with refused:
                    error = _refusal(refused.code, refused.read())
                if error.status < 500:
                    raise error from None
            except OSError as lost:
                error = TaskError(503, "Unreachable", f"/v1/task/{name}: {lost}")
            # Every call may be repeated: the platform recognizes the second as the first.
            time.sleep(0.1 * 2**attempt * random.uniform(0.5, 1.5))
        raise error


def _refusal(status: int, body: bytes) -> TaskError:
    try:
        problem = json.loads(body)
        reason, message = str(problem["reason"]), str(problem.get("detail") or problem.get("title"))
    except (ValueError, KeyError, TypeError, AttributeError):
        reason, message = f"Status{status}", body[:500].decode("utf-8", "replace") or "no explanation"
    return TaskError(status, reason, message)


def _batches(records: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    batch: list[Mapping[str, Any]] = []
    size = 0
    for record in records:
        more = len(_json(record))
        if batch and size + more > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += more
    if batch:
        yield batch


def _params(params: Any) -> Any:
    """Bytes are marked: as text they would be compared with text."""
    if isinstance(params, Mapping):
        return {name: _params(value) for name, value in params.items()}
    if isinstance(params, (list, tuple)):
        return [_params(value) for value in params]
    return {"blob": _wire_value(params)} if isinstance(params, (bytes, bytearray, memoryview)) else params


def _json(value: Any) -> bytes:
    return json.dumps(value, default=_wire_value, allow_nan=False).encode()


def _wire_value(value: Any) -> Any:
    """Values that JSON can't represent: numbers and times as text, bytes as ``0x…``."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "0x" + bytes(value).hex()
    if isinstance(value, (date, time_of_day)):
        return value.isoformat()
    if isinstance(value, (Decimal, UUID)):
        return str(value)
    raise TypeError(f"a {type(value).__name__} can't be sent: {value!r:.100}")
