"""Step 5, run: one attempt in an operator process, from its preparation to the report of its end.

The operator gets its own variables, its declared secrets and its staging folders, and nothing of the worker's.
``run`` always returns a report: a missing secret, a full disk or a process that dies fails the attempt, never the
worker.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from tracelake.contracts.dispatcher_api import MAX_EVENTS, CompleteRequest
from tracelake.contracts.operator_protocol import VERSION, Finished, Run, SparkTarget
from tracelake.domain.errors import Forbidden, TracelakeError, Unavailable
from tracelake.hot.tickets import Ticket
from tracelake.leases.dispatcher_client import DispatcherClient
from tracelake.leases.held_task import HeldTask, Stop
from tracelake.leases.report import conclude
from tracelake.settings import Secret
from tracelake.tokens.named_secrets import MissingSecret, SecretProvider
from tracelake.worker.attempt_log import AttemptLog, Redaction
from tracelake.worker.calls import Calls, Committer, QueryClient
from tracelake.worker.host.operator_pool import ProcessKey, process_key
from tracelake.worker.host.operator_process import OperatorGone
from tracelake.worker.operator_session import AttemptProcess, OperatorSession, ProtocolViolation
from tracelake.worker.rpc_pools import JobPool, RpcPools
from tracelake.worker.settings import WorkerSettings
from tracelake.worker.spark.engine import SparkEngine
from tracelake.worker.staging import AttemptObjects

_NOT_WORTH_A_RETRY = (MissingSecret, Forbidden)
_SHOWN_AFTER = 1.0
"""An attempt that ends sooner leaves one line in the worker's log, a longer one two."""


class Operators(Protocol):
    """Provides operator processes. Attempts of one ``use`` may share a process, one after another."""

    @property
    def available(self) -> bool: ...

    async def take(self, use: ProcessKey | None = None) -> AttemptProcess: ...

    async def give_back(self, process: AttemptProcess, *, reusable: bool) -> None: ...

    async def use_spark(self, target: SparkTarget | None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRunner:
    settings: WorkerSettings
    object_root: Path
    operators: Operators
    client: DispatcherClient
    secrets: SecretProvider
    committer: Committer | None
    engine: SparkEngine | None
    on_progress: Callable[[HeldTask], None]
    rpc_pools: RpcPools = field(default_factory=RpcPools)
    queries: QueryClient | None = None

    async def run(self, held: HeldTask) -> CompleteRequest | None:
        """Run the attempt; the result is its report, or None when no report is expected."""
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
            held.log.exception("attempt_internal_error")
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
                    # Claimed while Spark died: not the task's fault, and another worker's Spark may be healthy.
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
        """The operator's result, or a text that says what happened instead."""
        process = await self.operators.take(process_key(held.payload))
        objects = AttemptObjects(self.object_root, held.payload, process, self.engine)
        calls.reveal = objects.reveal
        finished: Finished | None = None
        gone = "it was not started"
        # Stopped before it began: the process has run nothing of this attempt.
        reusable = held.stopped is not None
        try:
            if held.stopped is None:
                await objects.prepare()
                conversation = OperatorSession(held, process, calls, on_progress=self.on_progress)
                finished, gone = await self._talk(conversation, run, log_fd)
                if finished is not None:
                    # Secrets stay in a process' memory, so one that was given any isn't used again.
                    reusable = finished.reusable and conversation.clean and not held.payload.secrets
                    finished, gone = await self._conclude(held, calls, objects, finished)
            return finished, gone
        finally:
            # Work on Spark doesn't end with the process that has asked for it.
            if self.engine is not None and (finished is None or held.stopped is not None):
                await self._interrupt_spark(held)
            # Before the process is returned: its next attempt must not find the files of this one.
            await objects.close()
            await self.operators.give_back(process, reusable=reusable)

    async def _talk(
        self, conversation: OperatorSession, run: Run, log_fd: int
    ) -> tuple[Finished | None, str]:
        try:
            return await conversation.hold(run, log_fd), ""
        except OperatorGone as error:
            return None, f"the operator process ended before it had finished: {error}"
        except ProtocolViolation as error:
            return None, f"the operator process was ended: {error}"

    async def _conclude(
        self, held: HeldTask, calls: Calls, objects: AttemptObjects, finished: Finished
    ) -> tuple[Finished | None, str]:
        """Send the last events and take over the written files before the attempt is reported."""
        if finished.status == "Completed":
            try:
                await objects.take_over(finished.outputs)
            except (TracelakeError, OSError) as error:
                held.log.warning("outputs_not_taken_over", error=str(error))
                return None, f"taking ownership of its output files failed: {error}"
        try:
            # The completion itself carries the last ones.
            await calls.send(finished.events[:-MAX_EVENTS])
        except TracelakeError as error:
            return None, f"its last events were not accepted: {error}"
        return finished, ""

    @asynccontextmanager
    async def _admitted(self, held: HeldTask) -> AsyncIterator[Ticket | None]:
        """Hold a login in the data database for as long as the attempt runs, if it needs one."""
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
            data_ticket_dsn=None if ticket is None else ticket.dsn.reveal(),
            state=held.payload.state,
            rpc_pool=pool.pool,
            rpc_pools=list(pool.known),
        )

    async def _interrupt_spark(self, held: HeldTask) -> None:
        assert self.engine is not None
        await self.engine.interrupt(str(held.task_id), held.attempt, held.payload.epoch or 0)


class _Log:
    """The attempt's log, or none when the disk is full: the work goes on without it."""

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
    """Redact the error message: a traceback may quote a secret, and every user may read the task's row."""
    if completion is None or completion.error_message is None:
        return completion
    return msgspec.structs.replace(completion, error_message=redaction.text(completion.error_message))


def _log_running(held: HeldTask) -> None:
    held.log.info("attempt_running")
