"""The Tracelake client for functions: one file, the standard library alone.

    from tracelake_function import Task

    def handler(event, context):
        task = Task(event)
        task.emit(start=task.start, end=task.end)

A function that returns without a word is completed by its runtime, and its outputs are announced with the
task's own scope; an exception fails the attempt, and the platform decides about another. So ``complete`` and
``fail`` are for functions that want to say more, or say it earlier. Every call is made for this attempt and
fenced: once another attempt has been claimed, ``TaskError`` with status 409 is all there is to hear.
"""

from __future__ import annotations

import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Task", "TaskError"]

_TRIES = 6
_TIMEOUT_SECONDS = 35.0


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
        self._lease_token: str = event["lease_token"]
        self._token: str = event["capability_token"]
        self._url = (url or os.environ["TRACE_DISPATCHER_URL"]).rstrip("/")
        # A proxy of the machine's is no way to the Dispatcher.
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

    def emit(
        self,
        *,
        cursor: int | None = None,
        start: int | None = None,
        end: int | None = None,
        output: int = 0,
    ) -> dict[str, Any]:
        """Say that an output reaches up to ``cursor``, or holds the blocks ``start`` to ``end``."""
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
        said = {name: value for name, value in scope.items() if value is not None}
        return {
            "dataset_uuid": named["dataset_uuid"],
            "dataset_version": named["dataset_version"],
            **said,
        }

    def publish(
        self, dataset: str, records: Iterable[Mapping[str, Any]], schema_hash: str | None = None
    ) -> dict[str, Any]:
        """Hand records to a buffered dataset."""
        body: dict[str, Any] = {"dataset": dataset, "records": list(records)}
        if schema_hash is not None:
            body["schema_hash"] = schema_hash
        return self._call("buffer-publish", body)

    def query(self, sql: str, params: list[Any] | None = None, limit: int | None = None) -> dict[str, Any]:
        """One SELECT over the task's own datasets: ``{columns, rows, row_count, truncated}``."""
        asked = {"sql": sql, "params": params, "limit": limit}
        body = {name: value for name, value in asked.items() if value is not None}
        return self._call("query", body, fenced=False)

    def heartbeat(self) -> dict[str, Any]:
        """Hold the lease for another while; ``cancel`` in the answer means: stop."""
        answer = self._call("heartbeat", {})
        self._token = answer.get("capability_token") or self._token
        return answer

    def complete(
        self,
        events: Iterable[Mapping[str, Any]] | None = None,
        outputs: Iterable[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """Done. Without ``events`` the outputs that are nothing but events are announced with this scope."""
        said = self.own_scope() if events is None else list(events)
        return self._call("complete", {"status": "Completed", "events": said, "outputs": list(outputs)})

    def fail(self, message: str, *, retryable: bool = True) -> dict[str, Any]:
        return self._call("complete", {"status": "Failed", "error_message": message, "retryable": retryable})

    def own_scope(self) -> list[dict[str, Any]]:
        """One event for each output without storage, with the scope that the task was given."""
        scope = self.scope
        said = {"start": scope["start"], "end": scope["end"]} if "start" in scope else {}
        if scope.get("upto", -1) >= 0:
            said = {"cursor": scope["upto"]}
        free = [index for index, output in enumerate(self.outputs) if output["storage"] == "none"]
        return [self.event(**said, output=index) for index in free] if said else []

    def _call(self, name: str, body: Mapping[str, Any], *, fenced: bool = True) -> dict[str, Any]:
        fence = {"task_id": self.task_id, "attempt": self.attempt, "lease_token": self._lease_token}
        request = urllib.request.Request(  # the address is the platform's own
            f"{self._url}/v1/task/{name}",
            data=json.dumps({**(fence if fenced else {}), **body}).encode(),
            headers={"Content-Type": "application/json", "X-Trace-Task-Capability": self._token},
            method="POST",
        )
        for attempt in range(_TRIES):
            try:
                with self._opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
                    read: dict[str, Any] = json.load(answer)
                    return read
            except urllib.error.HTTPError as refused:
                with refused:
                    error = _refusal(name, refused.code, refused.read())
                if error.status < 500:
                    raise error from None
            except OSError as lost:
                error = TaskError(503, "Unreachable", f"/v1/task/{name}: {lost}")
            # Every call may be repeated: the platform takes the second for the first.
            time.sleep(0.1 * 2**attempt * random.uniform(0.5, 1.5))
        raise error


def _refusal(name: str, status: int, body: bytes) -> TaskError:
    try:
        problem = json.loads(body)
        reason, message = str(problem["reason"]), str(problem.get("detail") or problem.get("title"))
    except (ValueError, KeyError, TypeError, AttributeError):
        reason, message = f"Status{status}", body[:500].decode("utf-8", "replace") or "no explanation"
    if status == 404 and name in ("query", "buffer-publish"):
        served = "queries" if name == "query" else "buffered datasets"
        return TaskError(404, "NotServed", f"this installation doesn't serve {served} to tasks")
    return TaskError(status, reason, message)
