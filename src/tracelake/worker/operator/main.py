"""The life of an operator process: one attempt after another, each told to run by the wrapper.

The main thread runs operators. A reader thread listens all the while, so that a cancel, a pause or a fresh token
arrives in the middle of a computation; when the wrapper is gone, it ends the process, for nobody is left to
report to. Whatever an operator does, raises or leaves behind, the wrapper hears ``Finished`` and why, or sees
the process end.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import tempfile
import threading
import traceback
from contextlib import suppress
from pathlib import Path

import msgspec

from tracelake.contracts.operator_protocol import (
    MAX_RUNS,
    VERSION,
    Cancel,
    Finished,
    FromOperator,
    Pause,
    Ready,
    Reply,
    Run,
    SparkTarget,
    Token,
)
from tracelake.domain.errors import BadRequest, Forbidden, Invalid, TooLarge
from tracelake.operators.context import Context
from tracelake.operators.registry import Registry
from tracelake.worker.operator import left_behind
from tracelake.worker.operator.attempt_link import AttemptLink
from tracelake.worker.operator.attempt_stage import Stage, lead_nowhere
from tracelake.worker.operator.channel import (
    ChannelBroken,
    ChannelClosed,
    close_descriptors,
    decode_to_operator,
    encode,
    read_frame,
    write_frame,
)
from tracelake.worker.operator.failure_text import failure_text, holds_secrets

GONE = 70
"""The exit status of a process whose wrapper is gone in the middle of an attempt."""

_FUTILE = (Invalid, BadRequest, Forbidden, TooLarge)
"""Errors that trying again won't change."""

_log = logging.getLogger(__name__)


def serve(
    channel: socket.socket,
    registry: Registry,
    *,
    work_folder: Path | None = None,
    spark: SparkTarget | None = None,
) -> None:
    """Until the wrapper closes the channel. ``spark`` is connected to before the first attempt asks for it."""
    lead_nowhere()
    stage = Stage(work_folder or Path(tempfile.gettempdir()))
    if spark is not None:
        _warm_up(spark)
    process = _Process(channel)
    process.listen()
    process.send(Ready(VERSION, registry.names))
    runs = 0
    while (job := process.next_run()) is not None:
        run, log, link = job
        runs += 1
        threads = left_behind.thread_idents()
        finished = _attempt(run, log, link, registry, stage)
        if left_behind.children_are_left() or left_behind.threads_are_left(threads) or runs >= MAX_RUNS:
            finished = msgspec.structs.replace(finished, reusable=False)
        if not finished.reusable:
            stage.close()
        elif link.holds_spark:
            # Nobody waits for a session to be closed.
            finished = msgspec.structs.replace(finished, tidying=True)
        process.finish(link, finished)
        link.end_spark()
        if not finished.reusable:
            return
        if finished.tidying:
            process.send(Ready(VERSION, registry.names))
    stage.close()


class _Process:
    """The channel as both threads use it."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._runs: queue.SimpleQueue[tuple[Run, int, AttemptLink] | None] = queue.SimpleQueue()
        self._link: AttemptLink | None = None

    def listen(self) -> None:
        threading.Thread(target=self._read, name="channel", daemon=True).start()

    def next_run(self) -> tuple[Run, int, AttemptLink] | None:
        return self._runs.get()

    def send(self, message: FromOperator) -> None:
        body = encode(message)
        with self._sending, suppress(ChannelClosed):
            write_frame(self._channel, body)

    def finish(self, link: AttemptLink, finished: Finished) -> None:
        link.finish()
        self._link = None
        try:
            self.send(finished)
        except Exception as error:
            # What was reported can't be put into a message: that is the operator's failure as well.
            text = failure_text(error, {})
            self.send(Finished(status="Failed", error_message=text, retryable=False, reusable=False))

    def _read(self) -> None:
        try:
            while True:
                self._take(*read_frame(self._channel))
        except (ChannelClosed, ChannelBroken, OSError):
            if self._link is not None:
                os._exit(GONE)
            self._runs.put(None)

    def _take(self, body: bytes, descriptors: list[int]) -> None:
        link = self._link
        match decode_to_operator(body):
            case Run() as run:
                if link is not None or len(descriptors) != 1:
                    close_descriptors(descriptors)
                    raise ChannelBroken("a run at the wrong time, or without a log")
                self._link = link = AttemptLink(run, self.send)
                self._runs.put((run, descriptors[0], link))
                return
            case Reply() as reply if link is not None:
                link.reply(reply)
            case Cancel() if link is not None:
                link.cancel()
            case Pause(paused) if link is not None:
                link.pause(paused)
            case Token(token) if link is not None:
                link.renew(token)
        close_descriptors(descriptors)


def _attempt(run: Run, log: int, link: AttemptLink, registry: Registry, stage: Stage) -> Finished:
    """One attempt in its own surroundings; never raises."""
    if run.version != VERSION:
        os.close(log)
        why = f"this operator process speaks version {VERSION} of the protocol, its wrapper {run.version}"
        return Finished(status="Failed", error_message=why, reusable=False)
    try:
        with stage.attempt(run.environment, log):
            return _run(run, link, registry)
    except BaseException as error:
        return _failed(error, run, link)


def _run(run: Run, link: AttemptLink, registry: Registry) -> Finished:
    ctx: Context | None = None
    try:
        function = registry.get(run.task.operator)
        ctx = Context(
            run.task,
            link,
            state=run.state,
            data_dsn=run.data_dsn,
            rpc_pool=run.rpc_pool,
            rpc_pools=run.rpc_pools,
        )
        link.on_spark_progress = ctx.spark_progress
        if ctx.has_work:
            function(ctx)
        if link.canceled:
            return Finished(status="Canceled", reusable=False)
        outputs, events = ctx.finish()
    except BaseException as error:
        with suppress(BaseException):
            traceback.print_exc()
        return _failed(error, run, link)
    finally:
        if ctx is not None:
            ctx.close()
    return Finished(
        status="Completed", outputs=outputs, events=events, reusable=not holds_secrets(run.environment)
    )


def _failed(error: BaseException, run: Run, link: AttemptLink) -> Finished:
    """A process in which something went wrong is not used again."""
    return Finished(
        status="Canceled" if link.canceled else "Failed",
        error_message=failure_text(error, run.environment),
        retryable=not isinstance(error, _FUTILE),
        reusable=False,
    )


def _warm_up(spark: SparkTarget) -> None:
    """Only a head start: an attempt that needs Spark connects again, and hears what is wrong."""
    from tracelake.worker.spark import session as spark_session

    try:
        spark_session.open_session(spark)
    except Exception as error:
        _log.warning("no connection to Spark yet: %s", error)
