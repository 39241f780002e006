"""The life of an operator process: it runs one attempt after another, as the wrapper orders.

The main thread runs operators. A reader thread receives messages all the while, so that a cancel, a pause or a
fresh token arrives in the middle of a computation; when the wrapper is gone, it ends the process, since nothing
can be reported any more. However an operator ends, the wrapper receives ``Finished`` and a reason, or sees the
process end.

An exception becomes one short text for the task's row. It may have no message, one of megabytes or one with
characters that no database accepts, and its ``__str__`` may itself raise. Values of the attempt's secrets are
removed.

A process with leftovers of an operator, children or threads that run code, isn't used again: they would write
into the next attempt's log and hold its memory. Threads of Spark's client and idle pool threads don't count; they
do nothing by themselves.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
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
from tracelake.domain.errors import BadRequest, Forbidden, Invalid, TooLarge, TracelakeError
from tracelake.operators.context import Context
from tracelake.operators.registry import Registry, declared_spec
from tracelake.worker.operator.attempt import AttemptLink, AttemptSetup, lead_nowhere
from tracelake.worker.operator.channel import (
    ChannelBroken,
    ChannelClosed,
    close_descriptors,
    decode_to_operator,
    encode,
    read_frame,
    write_frame,
)

GONE = 70
"""The exit status of a process whose wrapper is gone in the middle of an attempt."""
_FUTILE = (Invalid, BadRequest, Forbidden, TooLarge)
"""Errors that a retry won't change."""
MAX_FAILURE_BYTES = 4096
_SHORTEST_SECRET = 4
_HARMLESS = frozenset(
    {"threading", "queue", "concurrent", "multiprocessing", "weakref", "grpc", "pyspark", "tracelake"}
)

_log = logging.getLogger(__name__)


def serve(
    channel: socket.socket,
    registry: Registry,
    *,
    work_folder: Path | None = None,
    spark: SparkTarget | None = None,
) -> None:
    """Serve until the wrapper closes the channel. Connects to ``spark`` before the first attempt asks for it."""
    lead_nowhere()
    stage = AttemptSetup(work_folder or Path(tempfile.gettempdir()))
    if spark is not None:
        _warm_up(spark)
    process = _Process(channel)
    process.listen()
    process.send(Ready(VERSION, registry.names))
    runs = 0
    while (job := process.next_run()) is not None:
        run, log, link = job
        runs += 1
        threads = thread_idents()
        finished = _attempt(run, log, link, registry, stage)
        if children_are_left() or threads_are_left(threads) or runs >= MAX_RUNS:
            finished = msgspec.structs.replace(finished, reusable=False)
        if not finished.reusable:
            stage.close()
        elif link.holds_spark:
            # In the background: no caller waits for a session to be closed.
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
            # A result that can't be put into a message is the operator's failure too.
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


def _attempt(run: Run, log: int, link: AttemptLink, registry: Registry, stage: AttemptSetup) -> Finished:
    """Run one attempt in its own surroundings; never raises."""
    if run.version != VERSION:
        os.close(log)
        why = f"this operator process uses version {VERSION} of the protocol, its wrapper {run.version}"
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
            data_ticket_dsn=run.data_ticket_dsn,
            rpc_pool=run.rpc_pool,
            rpc_pools=run.rpc_pools,
        )
        link.on_spark_progress = ctx.spark_progress
        if (spec := declared_spec(function)) is not None:
            spec.check(run.task.config)
        if ctx.has_work:
            function(ctx)
        if link.canceled:
            return Finished(status="Canceled", reusable=False)
        outputs, events = ctx.finish()
    except BaseException as error:
        # Printing may fail too: it calls methods of the operator's own exception.
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
    """A process in which something went wrong isn't used again."""
    return Finished(
        status="Canceled" if link.canceled else "Failed",
        error_message=failure_text(error, run.environment),
        retryable=not isinstance(error, _FUTILE),
        reusable=False,
    )


def _warm_up(spark: SparkTarget) -> None:
    """Only a head start: an attempt that needs Spark connects again, and gets the error."""
    from tracelake.worker.spark import session as spark_session

    try:
        spark_session.open_session(spark)
    except Exception as error:
        _log.warning("no connection to Spark yet: %s", error)


def failure_text(error: BaseException, environment: Mapping[str, str]) -> str:
    name = error.reason if isinstance(error, TracelakeError) else type(error).__name__
    if isinstance(error, SystemExit):
        return f"SystemExit: the operator called exit({error.code!r}) instead of returning"[
            :MAX_FAILURE_BYTES
        ]
    try:
        message = str(error).strip()
    except Exception as worse:
        message = f"(its message can't be shown: {type(worse).__name__})"
    text = f"{name}: {message}" if message else f"{name} without a message"
    for value in _secrets(environment):
        text = text.replace(value, "…")
    return _bounded(text)


def holds_secrets(environment: Mapping[str, str]) -> bool:
    """Whether the attempt was given more than the platform's own variables."""
    return any(not name.startswith("TRACE_") for name in environment)


def _secrets(environment: Mapping[str, str]) -> list[str]:
    """The longest first, since one may be part of another."""
    values = {
        value
        for name, value in environment.items()
        if (not name.startswith("TRACE_") or name.endswith("_TOKEN")) and len(value) >= _SHORTEST_SECRET
    }
    return sorted(values, key=len, reverse=True)


def _bounded(text: str) -> str:
    encoded = text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace")
    if len(encoded) <= MAX_FAILURE_BYTES:
        return encoded.decode()
    # The ellipsis has three bytes.
    return encoded[: MAX_FAILURE_BYTES - 3].decode("utf-8", "ignore") + "…"


def children_are_left() -> bool:
    """Whether there are children, or adopted grandchildren. Ended ones are reaped."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def threads_are_left(before: set[int]) -> bool:
    """Whether there are more threads than before the attempt."""
    # It only waits now, but will run the operator's code later.
    if any(isinstance(thread, threading.Timer) for thread in threading.enumerate()):
        return True
    return any(
        _runs_foreign_code(ident) for ident in thread_idents() - before if ident != threading.get_ident()
    )


def thread_idents() -> set[int]:
    """The identities of all threads that run Python."""
    # Also those that `threading` doesn't know.
    return set(sys._current_frames())


def _runs_foreign_code(ident: int) -> bool:
    frame = sys._current_frames().get(ident)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _HARMLESS:
            return True
        frame = frame.f_back
    return False
