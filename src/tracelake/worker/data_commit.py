"""Commits Postgres outputs: operators stage rows, and only the wrapper makes them visible.

``begin`` is an attempt's first act: it writes the fence for every Postgres output, and sends the pending events
of an earlier attempt's commits if that attempt read the same inputs. Rows made from inputs that were invalidated
since are made again, and must not be announced before. ``commit`` makes staged rows visible and returns once the
Dispatcher has accepted the resulting events, so that a producer never runs ahead of its own events. Operators
reach the data database with a ticket, a login that ``admit`` opens and ``dismiss`` closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

import structlog

from tracelake.contracts.dispatcher_api import EventIn, OutputIn, PayloadOutput, TaskPayload
from tracelake.contracts.operator_protocol import CommitRows
from tracelake.contracts.staging import is_staging_table
from tracelake.domain.block_range import MAX_BLOCK, BlockRange
from tracelake.domain.dag.model import Storage, UpdateStrategy
from tracelake.domain.errors import Invalid, TracelakeError
from tracelake.domain.table_layout import PLAIN
from tracelake.hot.commit import HotStore, StagedOutput, Writer
from tracelake.hot.tickets import Ticket, TicketHolder, Tickets

_RENEW_SECONDS = 60.0

_log = structlog.get_logger(__name__)

SendEvents = Callable[[Sequence[EventIn]], Awaitable[object]]
"""Sends events under the current attempt's fence; returns once they are accepted."""


class DataCommitter:
    def __init__(self, store: HotStore, address: str | None = None) -> None:
        """``address`` is where operators reach the data database, if that differs from ``store``'s address."""
        self._store = store
        self._tickets = Tickets(store, address)
        self._open: set[Ticket] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def begin(self, task: TaskPayload, send: SendEvents) -> None:
        outputs = hot_outputs(task)
        if not outputs:
            return
        writer, span = _writer(task), _span(task)
        for output in outputs:
            await self._store.begin(writer, output.dataset_version, span)
        # After the fence, since no earlier attempt can add an event from here on.
        await self._send_pending(writer, send)

    async def commit(self, task: TaskPayload, wish: CommitRows, send: SendEvents) -> list[OutputIn]:
        """Commit staged rows; the result is what a completion reports of them."""
        chosen = [_output(task, index) for index in wish.outputs]
        if wish.end < wish.start:
            raise Invalid("InvalidScope", f"blocks {wish.start} to {wish.end} are no range")
        writer = _writer(task)
        rows = await self._store.commit(
            writer,
            [_staged(task, output, wish) for output in chosen],
            BlockRange(wish.start, wish.end),
            wish.events,
        )
        await self._send_pending(writer, send)
        return [
            OutputIn(
                output_index=output.output_index,
                dataset_uuid=output.dataset_uuid,
                dataset_version=output.dataset_version,
                row_count=count,
                start=wish.start,
                end=wish.end,
            )
            for output, count in zip(chosen, rows, strict=True)
        ]

    async def admit(self, task: TaskPayload) -> Ticket | None:
        """The attempt's ticket; None for an attempt that doesn't use the data database."""
        outputs = hot_outputs(task)
        reads = hot_versions(task)
        if not outputs and not reads:
            return None
        holder = TicketHolder(
            task_id=task.task_id,
            attempt=task.attempt,
            epoch=task.epoch if outputs else None,
            reads=tuple(reads),
        )
        ticket = await self._tickets.open(holder)
        self._open.add(ticket)
        return ticket

    def dismiss(self, ticket: Ticket) -> None:
        """Close the ticket of an attempt that has ended, in the background; tickets that stay open are swept
        later."""
        self._open.discard(ticket)
        closing = asyncio.create_task(self._close(ticket))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def keep_tickets(self) -> None:
        """Run for ever: renew the tickets of running attempts, sweep those that are no longer renewed."""
        while True:
            try:
                await self._tickets.renew(list(self._open))
                await self._tickets.sweep()
            except Exception as error:
                # The next round tries again, long before a ticket runs out.
                _log.warning("tickets_not_renewed", error=str(error) or type(error).__name__)
            await asyncio.sleep(_RENEW_SECONDS)

    async def close(self) -> None:
        # These still use the store's connections.
        await asyncio.gather(*self._closing)
        await self._store.close()

    async def _close(self, ticket: Ticket) -> None:
        try:
            await self._tickets.close(ticket)
        except TracelakeError as error:
            _log.warning("ticket_not_closed", login=ticket.login, error=error.message)

    async def _send_pending(self, writer: Writer, send: SendEvents) -> None:
        while pending := await self._store.pending_events(writer.task_id):
            for entry in pending:
                if entry.inputs == writer.inputs:
                    await send(entry.events)
                await self._store.mark_delivered(entry.outbox_id)


def hot_outputs(task: TaskPayload) -> list[PayloadOutput]:
    return [output for output in task.outputs if output.storage == Storage.POSTGRES]


def hot_versions(task: TaskPayload) -> list[UUID]:
    """The tables that an attempt may read: those of its inputs and of its own outputs."""
    read = [each.dataset_version for each in task.inputs if each.storage == Storage.POSTGRES]
    beside_files = [each.hot.dataset_version for each in task.inputs if each.hot is not None]
    written = [output.dataset_version for output in hot_outputs(task)]
    return sorted({*read, *beside_files, *written})


def _writer(task: TaskPayload) -> Writer:
    if task.epoch is None:
        raise Invalid("NoEpoch", "an attempt without an epoch can't write to the data database")
    revisions = {str(read.dataset_version): read.revision for read in task.inputs}
    return Writer(task_id=task.task_id, epoch=task.epoch, inputs=revisions)


def _span(task: TaskPayload) -> BlockRange:
    """The blocks that a task may write: its own for a partition task, all for a source or a cursor task, which is
    its dataset's only writer."""
    scope = next((read for read in task.inputs if isinstance(read.start, int)), None)
    if scope is None or not (isinstance(scope.start, int) and isinstance(scope.end, int)):
        return BlockRange(0, MAX_BLOCK)
    return BlockRange(scope.start, scope.end)


def _output(task: TaskPayload, index: int) -> PayloadOutput:
    found = next((output for output in task.outputs if output.output_index == index), None)
    if found is None or found.storage != Storage.POSTGRES or found.staging is None:
        raise Invalid("NotAPostgresOutput", f"output {index} isn't a Postgres output of this task")
    return found


def _staged(task: TaskPayload, output: PayloadOutput, wish: CommitRows) -> StagedOutput:
    appends = task.update_strategy == UpdateStrategy.APPEND
    given = next((rows for rows in wish.staged if rows.output_index == output.output_index), None)
    for table in given.tables if given is not None else ():
        if not _is_its_own(task, output, table.name):
            raise Invalid("NotItsStaging", f"{table.name!r} isn't a staging table of this attempt")
    return StagedOutput(
        dataset_version=output.dataset_version,
        output_index=output.output_index,
        tables=tuple((table.name, table.rows) for table in given.tables) if given is not None else (),
        layout=given.layout if given is not None else PLAIN,
        kept=given is not None and given.kept,
        appends=appends,
        unique_key=tuple(task.unique_key) if appends else (),
    )


def _is_its_own(task: TaskPayload, output: PayloadOutput, name: str) -> bool:
    """Whether a table was made for this attempt and output: the operator chooses which tables to commit."""
    return is_staging_table(name, task.task_id, output.output_index, task.epoch)
