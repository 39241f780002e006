"""Step 5, run: one attempt in an operator process, from its preparation to what must be reported of it.

The operator gets its own variables, its declared secrets and its staging folders, and nothing of the worker's.
Whatever happens, ``run`` answers: a missing secret, a full disk or a process that dies are failures of the attempt,
never of the worker.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from tracelake.contracts.dispatcher_api import MAX_EVENTS, CompleteRequest
from tracelake.contracts.operator_protocol import VERSION, Finished, Run, SparkTarget
from tracelake.domain.errors import Forbidden, TracelakeError, Unavailable
from tracelake.hot.tickets import Ticket
from tracelake.secret import Secret
from tracelake.worker.attempt_objects import AttemptObjects
from tracelake.worker.calls import Calls, Committer
from tracelake.worker.conversation import Conversation, OperatorMisbehaved, Process
from tracelake.worker.dispatcher_client import DispatcherClient
from tracelake.worker.held_task import HeldTask, Stop
from tracelake.worker.host.operator_pool import Use, use_of
from tracelake.worker.host.operator_process import OperatorGone
from tracelake.worker.logs.attempt_log import AttemptLog
from tracelake.worker.logs.redaction import Redaction
from tracelake.worker.outcome import conclude
from tracelake.worker.query_client import QueryClient
from tracelake.worker.rpc_pools import JobPool, RpcPools
from tracelake.worker.secret_provider import MissingSecret, SecretProvider
from tracelake.worker.settings import WorkerSettings
from tracelake.worker.spark.engine import SparkEngine

_NOT_WORTH_A_RETRY = (MissingSecret, Forbidden)
_SHOWN_AFTER = 1.0
"""Attempts that are over by then leave one line in the worker's log, longer ones two."""


class Operators(Protocol):
    """Where operator processes come from. Attempts of one ``use`` may run in one process, one after another."""

    @property
    def available(self) -> bool: ...

    async def take(self, use: Use | None = None) -> Process: ...

    async def give_back(self, process: Process, *, reusable: bool) -> None: ...

    async def use_spark(self, target: SparkTarget | None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRunner:
    settings: WorkerSettings
    operators: Operators
    client: DispatcherClient
    secrets: SecretProvider
    committer: Committer | None
    engine: SparkEngine | None
    on_progress: Callable[[HeldTask], None]
    rpc_pools: RpcPools = field(default_factory=RpcPools)
    queries: QueryClient | None = None

    async def run(self, held: HeldTask) -> CompleteRequest | None:
        """What to report, or None when nobody waits for a report."""
        if held.stopped is not None:
            return conclude(held, None, "it wasn't started")
        loop = asyncio.get_running_loop()
        shown = loop.call_later(_SHOWN_AFTER, _log_running, held)
        try:
            return await self._run(held)
        except (TracelakeError, OperatorGone, OSError) as error:
            held.log.warning("attempt_not_started", error=str(error))
            retryable = not isinstance(error, _NOT_WORTH_A_RETRY)
            return held.completion("Failed", f"it could not be started: {error}", retryable=retryable)
        except Exception as error:
            held.log.exception("attempt_broke_the_worker")
            return held.completion("Failed", f"{type(error).__name__} in the worker: {error}")
        finally:
            shown.cancel()

    async def _run(self, held: HeldTask) -> CompleteRequest | None:
        payload = held.payload
        secrets = self.secrets.resolve(payload.secrets)
        pool = self.rpc_pools.for_job(payload.config)
        held.rpc_pool = pool.pool
        loop = asyncio.get_running_loop()
        until = None if held.is_source else loop.time() + payload.timeout_seconds
        timer = None if until is None else loop.call_at(until, held.stop, Stop.TIMED_OUT)
        try:
            calls = Calls(held, self.client, self.committer, until, self.queries)
            await calls.begin()
            target = None
            if self.engine is not None:
                try:
                    held.generation, target = self.engine.generation, self.engine.target
                except Unavailable:
                    # Claimed while Spark died: that is no fault of the task, and another worker's may be well.
                    return held.completion("Released")
            async with self._admitted(held) as ticket:
                return await self._converse(held, calls, secrets, target, pool, ticket)
        finally:
            if timer is not None:
                timer.cancel()

    async def _converse(
        self,
        held: HeldTask,
        calls: Calls,
        secrets: Mapping[str, Secret],
        target: SparkTarget | None,
        pool: JobPool,
        ticket: Ticket | None,
    ) -> CompleteRequest | None:
        hidden = [held.token.reveal(), *(each.reveal() for each in secrets.values()), *pool.secrets()]
        if ticket is not None:
            hidden.append(ticket.password.reveal())
        redaction = Redaction(hidden)
        held.hide = redaction.text
        log = _Log.open(self.settings, held, hidden)
        try:
            run = self._message(held, secrets, target, pool, ticket)
            finished, gone = await self._with_process(held, calls, run, log.write_fd)
            completion = _without(redaction, conclude(held, finished, gone))
            if completion is not None and completion.error_message:
                log.note(completion.error_message)
            elif held.stopped is not None:
                log.note(f"stopped: {held.stopped}")
            return completion
        finally:
            await log.close()

    async def _with_process(
        self, held: HeldTask, calls: Calls, run: Run, log_fd: int
    ) -> tuple[Finished | None, str]:
        """What the operator said in the end, or what happened instead."""
        process = await self.operators.take(use_of(held.payload))
        objects = AttemptObjects(self.settings.object_root, held.payload, process, self.engine)
        calls.reveal = objects.reveal
        finished: Finished | None = None
        gone = "it was not started"
        reusable = held.stopped is not None
        try:
            if held.stopped is None:
                await objects.prepare()
                conversation = Conversation(held, process, calls, on_progress=self.on_progress)
                finished, gone = await self._talk(conversation, run, log_fd)
                if finished is not None:
                    reusable = finished.reusable and conversation.clean and not held.payload.secrets
                    finished, gone = await self._conclude(held, calls, objects, finished)
            return finished, gone
        finally:
            if self.engine is not None and (finished is None or held.stopped is not None):
                await self._interrupt_spark(held)
            await objects.close()
            await self.operators.give_back(process, reusable=reusable)

    async def _talk(self, conversation: Conversation, run: Run, log_fd: int) -> tuple[Finished | None, str]:
        try:
            return await conversation.hold(run, log_fd), ""
        except OperatorGone as error:
            return None, f"the operator process ended before it had finished: {error}"
        except OperatorMisbehaved as error:
            return None, f"the operator process was ended: {error}"

    async def _conclude(
        self, held: HeldTask, calls: Calls, objects: AttemptObjects, finished: Finished
    ) -> tuple[Finished | None, str]:
        """What it said last is told, and what it wrote taken over, before anything of it is reported."""
        if finished.status == "Completed":
            try:
                await objects.take_over(finished.outputs)
            except (TracelakeError, OSError) as error:
                held.log.warning("outputs_not_taken_over", error=str(error))
                return None, f"what it wrote can't be taken over: {error}"
        try:
            await calls.say(finished.events[:-MAX_EVENTS])
        except TracelakeError as error:
            return None, f"its last events were not accepted: {error}"
        return finished, ""

    @asynccontextmanager
    async def _admitted(self, held: HeldTask) -> AsyncIterator[Ticket | None]:
        """With a login in the data database for as long as the attempt runs, if it needs one."""
        ticket = await self.committer.admit(held.payload) if self.committer is not None else None
        try:
            yield ticket
        finally:
            if self.committer is not None and ticket is not None:
                self.committer.dismiss(ticket)

    def _message(
        self,
        held: HeldTask,
        secrets: Mapping[str, Secret],
        target: SparkTarget | None,
        pool: JobPool,
        ticket: Ticket | None,
    ) -> Run:
        settings = self.settings
        return Run(
            version=VERSION,
            task=held.payload,
            environment={
                **{name: value.reveal() for name, value in secrets.items()},
                "TRACE_TASK_CAPABILITY_TOKEN": held.token.reveal(),
                "TRACE_TASK_ID": str(held.task_id),
                "TRACE_ATTEMPT": str(held.attempt),
                "TRACE_LEASE_TOKEN": str(held.lease_token),
                "TRACE_DISPATCHER_URL": settings.internal_url,
            },
            spark=target,
            data_dsn=None if ticket is None else ticket.dsn.reveal(),
            state=held.payload.state,
            rpc_pool=pool.pool,
            rpc_pools=list(pool.known),
        )

    async def _interrupt_spark(self, held: HeldTask) -> None:
        assert self.engine is not None
        await self.engine.interrupt(str(held.task_id), held.attempt, held.payload.epoch or 0)


class _Log:
    """The attempt's log; or nothing, when the disk has no room for one: the work goes on without."""

    def __init__(self, log: AttemptLog | None) -> None:
        self._log = log
        self.write_fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC) if log is None else log.write_fd

    @classmethod
    def open(cls, settings: WorkerSettings, held: HeldTask, redact: Sequence[str]) -> _Log:
        try:
            return cls(AttemptLog.open(settings.log_folder, str(held.task_id), held.attempt, redact))
        except OSError as error:
            held.log.warning("attempt_without_log", error=str(error))
            return cls(None)

    def note(self, text: str) -> None:
        if self._log is not None:
            self._log.note(text)

    async def close(self) -> None:
        if self._log is None:
            os.close(self.write_fd)
        else:
            await self._log.close()


def _without(redaction: Redaction, completion: CompleteRequest | None) -> CompleteRequest | None:
    """A traceback may quote a secret; the task's row is for everybody to read."""
    if completion is None or completion.error_message is None:
        return completion
    return msgspec.structs.replace(completion, error_message=redaction.text(completion.error_message))


def _log_running(held: HeldTask) -> None:
    held.log.info("attempt_running")
