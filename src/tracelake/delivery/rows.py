"""Rows of a buffered dataset as a delivery reads them: in the order of positions, as soon as they are committed.

``RowReader`` reads by the role that can only read. ``RowSignals`` listens to the sink's announcements by one
connection per process; a lost announcement costs time only, since every reader also looks now and then.
``RowPlanner`` decides what becomes a message: it is pure.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg
import msgspec
import structlog

from tracelake.contracts.deliveries import (
    MAX_ERROR_CHARS,
    MAX_MESSAGE_BYTES,
    MAX_PRODUCERS,
    DeliveryConfig,
    FinalityWait,
    GoneRow,
    PlannedRow,
)
from tracelake.domain.backoff import Backoff
from tracelake.domain.buffers import BLOCK_NUMBER
from tracelake.domain.dag.model import DeliveryTime
from tracelake.domain.errors import Unavailable
from tracelake.domain.template import TextTemplate, json_scalar, parse_template, shown
from tracelake.postgres.sessions import KEEPALIVES
from tracelake.settings import Secret

if TYPE_CHECKING:
    import psycopg

CHANNEL = "tracelake_rows"
MAX_PORTION_BYTES = 2 * 1024 * 1024
MAX_AHEAD = 10_000
"""Blocks that a row may be ahead of its chain's head, which is known with a delay."""
_PROBE_SECONDS = 15.0
_RECONNECT_BACKOFF = Backoff(first=0.05, longest=2.0)
_INTERRUPTIONS = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
_READ_SECONDS = 30
#: The default one rounds to 28 digits.
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)
StoredRow = Mapping[str, Any]
"""Values by column. JSON is ``msgspec.Raw``, as the database writes it."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A value that Postgres can hold and Python can't: as the database writes it, and why."""

    text: str
    why: str


class RowReader:
    """One connection, opened when it is needed and again after an error."""

    def __init__(self, dsn: Secret) -> None:
        self._dsn = dsn
        self._connection: psycopg.AsyncConnection[Any] | None = None

    async def after(
        self, dataset_version: UUID, position: int, limit: int, *, producer: str | None = None, upto: int = 0
    ) -> AsyncGenerator[StoredRow]:
        """Rows behind the position, or those of one producer up to another position; the caller may stop at any.
        ``Unavailable`` when they can't be read now."""
        import psycopg
        from psycopg import sql

        table = sql.Identifier("data", f"d_{dataset_version.hex}")
        if producer is None:
            query = sql.SQL("SELECT * FROM {} WHERE position > %s ORDER BY position LIMIT %s").format(table)
            values: list[object] = [position, limit]
        else:
            query = sql.SQL(
                "SELECT * FROM {} WHERE position > %s AND position <= %s AND producer = %s "
                "ORDER BY position LIMIT %s"
            ).format(table)
            values = [position, upto, producer, limit]
        with self._errors():
            connection = await self._open()
            async with connection.cursor(row_factory=psycopg.rows.dict_row) as cursor:
                try:
                    async for row in cursor.stream(query, values):
                        yield row
                except psycopg.errors.UndefinedTable:
                    # The sink makes the table when it begins.
                    return

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def _open(self) -> psycopg.AsyncConnection[Any]:
        import psycopg

        from tracelake.delivery import row_loaders

        if self._connection is None or self._connection.closed:
            self._connection = await psycopg.AsyncConnection.connect(
                self._dsn.reveal(),
                autocommit=True,
                connect_timeout=10,
                application_name="tracelake-delivery",
                options=f"-c statement_timeout={_READ_SECONDS}s -c timezone=UTC",
            )
            row_loaders.register(self._connection)
        return self._connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import psycopg

        try:
            yield
        except (psycopg.Error, OSError) as error:
            connection, self._connection = self._connection, None
            if connection is not None:
                # Not close(): a server that is gone wouldn't answer.
                connection.pgconn.finish()
            raise Unavailable("DataUnavailable", f"the data database failed: {error}") from error


class RowSignals:
    """Sets the events of those who follow a dataset."""

    def __init__(self, dsn: Secret) -> None:
        self._dsn = dsn
        self._followers: dict[str, set[asyncio.Event]] = {}
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="row-signals")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def follow(self, dataset_version: UUID, event: asyncio.Event) -> Callable[[], None]:
        """Returns what ends it."""
        name = str(dataset_version)
        self._followers.setdefault(name, set()).add(event)
        return lambda: self._followers[name].discard(event)

    async def _run(self) -> None:
        reconnects = _RECONNECT_BACKOFF.counter()
        while True:
            try:
                connection: asyncpg.Connection[Any] = await asyncpg.connect(
                    self._dsn.reveal(),
                    timeout=10,
                    server_settings={**KEEPALIVES, "application_name": "tracelake-delivery-signals"},
                )
                try:
                    await self._listen(connection)
                    reconnects.succeeded()
                    await self._probe(connection)
                finally:
                    # A close in order would wait for a server that may be gone.
                    connection.terminate()
            except _INTERRUPTIONS as error:
                _log.warning("row_signals_interrupted", error=type(error).__name__)
            await asyncio.sleep(reconnects.failed())

    async def _listen(self, connection: asyncpg.Connection[Any]) -> None:
        def receive(_connection: object, _pid: int, _channel: str, payload: object) -> None:
            for event in self._followers.get(str(payload), ()):
                event.set()

        self._over.clear()
        connection.add_termination_listener(lambda _connection: self._over.set())
        await connection.add_listener(CHANNEL, receive)
        # Announcements that were made while nobody listened are lost, so everyone looks once.
        for events in self._followers.values():
            for event in events:
                event.set()

    async def _probe(self, connection: asyncpg.Connection[Any]) -> None:
        """A half-open connection receives nothing and reports nothing; a statement now and then detects it."""
        while not connection.is_closed():
            with suppress(TimeoutError):
                async with asyncio.timeout(_PROBE_SECONDS):
                    await self._over.wait()
            if not connection.is_closed():
                await connection.execute("SELECT", timeout=_PROBE_SECONDS)


@dataclass(frozen=True, slots=True)
class ChainBlocks:
    """The last final block and the head, as far as they are known, of the chains behind each producer."""

    finalized: Mapping[str, int] = field(default_factory=dict)
    heads: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class RowPortion:
    """What becomes of the rows up to a position. ``waits``: rows of these producers are left out, since one isn't
    final yet; they are read again, from the positions there."""

    upto: int
    waits: dict[str, FinalityWait] = field(default_factory=dict)
    rows: list[PlannedRow] = field(default_factory=list)
    gone: list[GoneRow] = field(default_factory=list)
    size: int = 0
    count: int = 0

    @property
    def is_full(self) -> bool:
        return self.size >= MAX_PORTION_BYTES


class RowPlanner:
    """A delivery's definition, applied to one row after the other."""

    def __init__(self, config: DeliveryConfig) -> None:
        self._config = config
        spec = config.spec
        self._names = config.schema.names
        self._keys = config.schema.unique
        self._template: TextTemplate | None = parse_template(spec.template) if spec.template else None

    def add(self, portion: RowPortion, row: StoredRow, chains: ChainBlocks) -> bool:
        """Plan the row, or leave it to wait with those of its producer behind it. False when nothing may go on."""
        producer: str = row["producer"]
        block = self._unfinal_block(row, chains)
        beyond = _beyond(row, block, chains) if block is not None else None
        if block is not None and beyond is None and producer not in portion.waits:
            if len(portion.waits) >= MAX_PRODUCERS:
                return False
            portion.waits[producer] = FinalityWait(producer, row["position"] - 1, block)
        # A retraction waits for nothing: what it retracts was sent, or never will be.
        if producer not in portion.waits or row["retracted_at"] is not None:
            self._plan(portion, row, beyond)
        portion.upto = row["position"]
        portion.count += 1
        return True

    def _plan(self, portion: RowPortion, row: StoredRow, beyond: str | None) -> None:
        values = {name: row[name] for name in self._names if name in row}
        record = self._record_id(values)
        planned = self._message(record, values, row, beyond)
        if planned is not None:
            portion.rows.append(planned)
            # As it is sent: a character may have four bytes, and quotes within JSON are escaped once more.
            portion.size += len(msgspec.json.encode(planned))
        else:
            portion.gone.append(GoneRow(record, row["revision"], row["made_at_revision"]))

    def _message(
        self, record: str, values: dict[str, Any], row: StoredRow, beyond: str | None
    ) -> PlannedRow | None:
        """None for a row that doesn't hold. One that can't be judged or sent is a dead letter with its reason:
        those behind it mustn't wait for it."""
        if row["retracted_at"] is not None:
            return None
        where = self._config.spec.where
        try:
            for name, value in values.items():
                if isinstance(value, Unreadable):
                    raise ValueError(f"its {name} can't be read: {value.why}")
            if where is not None and not where.matches(_Compared(values)):
                return None
            return self._planned(record, values, row, beyond)
        except Exception as error:
            refused = f"the row can't be made a message: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
            return self._dead(record, row, "".join(c if c.isprintable() else " " for c in refused))

    def _dead(self, record: str, row: StoredRow, refused: str) -> PlannedRow:
        revision, made_at = row["revision"], row["made_at_revision"]
        return PlannedRow(record, revision, made_at, record, "", row["written_at"], None, refused)

    def _planned(self, record: str, values: dict[str, Any], row: StoredRow, beyond: str | None) -> PlannedRow:
        encoded = msgspec.json.encode(_plain(values))
        if len(encoded) > MAX_MESSAGE_BYTES:
            # Before its text is made: what that costs grows with the row.
            size = f"{len(encoded):,} bytes as JSON; a message may have {MAX_MESSAGE_BYTES:,}"
            return self._dead(record, row, f"the row has {size}")
        key = self._config.spec.key
        order = record if key is None else f"{key}={_key_value(values.get(key))}"[:4000]
        return PlannedRow(
            record,
            row["revision"],
            row["made_at_revision"],
            order,
            encoded.decode(),
            row["written_at"],
            self._template.render(values) if self._template is not None else None,
            beyond,
        )

    def _record_id(self, values: StoredRow) -> str:
        """The same for every revision of a record, and different in every delivery."""
        key = [str(self._config.delivery_id), *(_key_value(values[name]) for name in self._keys)]
        digest = hashlib.sha256(msgspec.json.encode(key)).hexdigest()
        return f"rec_{digest[:32]}"

    def _unfinal_block(self, row: StoredRow, chains: ChainBlocks) -> int | None:
        """The block that the row waits for; None when it waits for none."""
        if self._config.spec.when is not DeliveryTime.FINALIZED or row["retracted_at"] is not None:
            return None
        block: int | None = row.get(BLOCK_NUMBER) if BLOCK_NUMBER in self._names else None
        block = row["scope_end"] if block is None else block
        # A producer without a chain upstream makes rows that no reorg can touch.
        final = chains.finalized.get(row["producer"])
        return None if block is None or final is None or block <= final else block


def _beyond(row: StoredRow, block: int, chains: ChainBlocks) -> str | None:
    """Why no chain can have reached the row's block, for which its producer's rows would wait for ever."""
    head = chains.heads.get(row["producer"])
    # A follower that begins anew reports low heads at first; the row's own task has read up to its scope's end.
    if head is None or block <= max(head, row["scope_end"] or 0) + MAX_AHEAD:
        return None
    return f"its block {block} is far above {head}, the head of the chain behind {row['producer']}"


class _Compared(Mapping[str, Any]):
    """A row for a condition: JSON that is one text, number or truth value is compared as that."""

    def __init__(self, values: StoredRow) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        return json_scalar(value) if isinstance(value, msgspec.Raw) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _key_value(value: Any) -> str:
    if isinstance(value, Unreadable):
        return value.text
    # 1 and 1.0 are one key in the database.
    return str(value.normalize(_EXACT)) if isinstance(value, Decimal) else shown(value)


def _plain(values: StoredRow) -> dict[str, Any]:
    """Bytes as they are published: 0x and hex digits. Decimals, times and uuids are texts."""
    return {name: f"0x{value.hex()}" if isinstance(value, bytes) else value for name, value in values.items()}
