"""The confined process of a slot, and in it one process for each query.

The service starts a *template*: an interpreter with everything imported and one connection made, which never sees
SQL or data. For each query it forks (3 ms, while the slot is idle; a connection would cost 17). The fork gives up
the rights it doesn't need, sends ``SlotReady``, runs one query and ends, and with it every descriptor, mapping and
byte of that query: nothing is left for the next caller. If it ends in any other way, the template ends too and the
service starts another. The template announces each fork to the service by a pipe that no fork has.

A fork is safe because the template has no threads but its own: the engine gets its threads in the fork. The
protocol's socket is standard output. Rows are sent as they come, in frames of bounded size; the socket's buffer is
all that lies between engine and service, so the engine waits while the service doesn't read. A failure is reported
without paths and traces: the caller sees it.

Before any caller's query, template and fork run a query of our own (``WarmUp``): the template to fill caches and
load code, the fork to own the pages that a query writes to. Otherwise most of a small query's time would go there.
"""

from __future__ import annotations

import fcntl
import gc
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NoReturn, TypeAlias

import duckdb
import msgspec
import pyarrow as pa

from tracelake import kernel
from tracelake.domain.errors import Invalid, TracelakeError
from tracelake.query.engine import attach, bignum, lockdown, restrict
from tracelake.query.engine.attach import WARM_UP_SCHEMA
from tracelake.query.engine.column_types import (
    MOST_COLUMNS,
    carried,
    column_types,
    must_be_checked,
    no_such_value,
    quoted,
    shape_problem,
    unfit,
    weight,
)
from tracelake.query.engine.digit_sums import with_digit_sums
from tracelake.query.engine.gate import parse
from tracelake.query.engine.hex_literals import with_bytes
from tracelake.query.engine.messages import (
    DESCRIPTORS_AT_ONCE,
    HEADER,
    MESSAGE,
    PROOF_BYTES,
    ROWS,
    ROWS_FRAME_BYTES,
    Attachment,
    FromSlot,
    Leave,
    Parse,
    Parsed,
    QueryFailed,
    QueryFinished,
    RelationUse,
    RunQuery,
    SlotReady,
    Started,
    ToSlot,
    decode_params,
    decode_to_slot,
    frame,
)
from tracelake.query.engine.pushdown import StatementParams
from tracelake.query.engine.restrict import MIB, OWN_BYTES, SlotLimits
from tracelake.query.engine.tree_edits import bindable

SendFrame: TypeAlias = Callable[[bytes | pa.Buffer], object]
#: Descriptors below are left free for standard streams.
_FIRST_DESCRIPTOR = 10
_SERVICE_IS_GONE = 3
_WARM_UP_NAME = "tracelake_warm_up"
_WARM_UP_ORDER = RunQuery([], 100, 65536, 65536)
_WARM_UP_SQL = (
    "SELECT block_number, count(*) AS n, max(address) AS address, sum(amount) AS amount FROM tracelake_warm_up "
    "WHERE block_number BETWEEN ? AND 20 AND address LIKE 'x%' GROUP BY block_number ORDER BY n DESC LIMIT 10"
)
_ROWS_AT_ONCE = 8192
_LONGEST_MESSAGE = 4000
_DESCRIPTOR = re.compile(r"/proc/(?:self|\d+)/fd/\d+")
_OWN_NAME = re.compile(r"tracelake_\d+_(?:columns|mapped|digits|rows_\d+)")
_SPILL = re.compile(r"(?:/[\w.-]+)+/duckdb_temp\S*")
_OUT_OF_MEMORY = "Out of Memory Error"
# A function that allocates by itself (``reservoir_quantile``) reports an internal error when it gets no memory.
_UNALLOCATED = re.compile(r"INTERNAL Error: .*(?:allocation failure|bad[ _]alloc)", re.IGNORECASE)
_BROKEN = (duckdb.InternalException, duckdb.FatalException)


class SlotSetup(msgspec.Struct, frozen=True):
    """Passed as JSON on the command line. ``folder``: where the engine may spill; ``libraries``: folders that the
    interpreter may load from; ``parent``: the service's process, or 0 in a sandbox, which ends with the service."""

    limits: SlotLimits
    folder: str | None
    libraries: list[str]
    parent: int


def main() -> None:
    setup = msgspec.json.decode(sys.argv[1], type=SlotSetup)
    if setup.parent:
        kernel.die_with_parent(setup.parent)
    restrict.limit_memory(setup.limits.memory_bytes + OWN_BYTES, max(setup.limits.spill_bytes, MIB))
    # The libraries have read their settings when they were loaded; a query needs none.
    os.environ.clear()
    channel = take_channel()
    proofs, turns, rows = _take_handles(channel)
    restrict.raise_descriptor_limit()
    connection = lockdown.connect(setup.limits, setup.folder)
    warm_up = WarmUp(rows)
    warm_up.do(connection.cursor())
    # A collection in a fork would write to, and so copy, the pages of all these objects.
    gc.collect()
    gc.freeze()
    # A fork has the template's user: one that a query has broken into could otherwise trace the template.
    kernel.forbid_inspection()
    template, nothing = os.getpid(), os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    while True:
        _nothing_left(channel)
        proof = os.urandom(PROOF_BYTES)
        # Before the fork: the service then finds the proof as
        # soon as the new process reports that it is ready.
        os.write(proofs, proof)
        child = os.fork()
        if child == 0:
            # A process that ran a caller's SQL could otherwise announce itself as the next one.
            os.close(proofs)
            os.close(turns)
            _in_fork(partial(_Query(channel, connection, setup, template, proof).serve, warm_up, nothing))
        _, status = os.waitpid(child, 0)
        if status != 0:
            # Only a regular end shows that the fork was still ours.
            os._exit(os.waitstatus_to_exitcode(status) % 256)
        if not os.read(turns, 1):
            os._exit(_SERVICE_IS_GONE)


def take_channel() -> socket.socket:
    """Moves the socket off standard output, where any library might write to it."""
    moved = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
    return socket.socket(fileno=moved)


def _take_handles(channel: socket.socket) -> tuple[int, int, int]:
    """The pipes between the template, and no fork of it, and the service: proofs to it, turns from it; and the file
    to warm up with."""
    _, received, _, _ = socket.recv_fds(channel, 1, 3)
    if len(received) != 3:
        os._exit(_SERVICE_IS_GONE)
    for descriptor in received:
        os.set_inheritable(descriptor, False)
    proofs, turns, rows = received
    return proofs, turns, rows


def _nothing_left(channel: socket.socket) -> None:
    """Ends the template if unread input is left: it was meant for the previous query, and the next one must not
    take it for its own. Called at the service's turn, when it has sent everything to the previous query, and it
    sends to the next one only after its ``SlotReady``."""
    try:
        left = channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return
    os._exit(1 if left else _SERVICE_IS_GONE)


def _in_fork(serve: Callable[[], None]) -> NoReturn:
    """Ends the process with ``_exit``, which doesn't wait for the engine's threads."""
    status = 1
    try:
        serve()
        status = 0
    except EOFError:
        status = _SERVICE_IS_GONE
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(status)


class _Query:
    def __init__(
        self,
        channel: socket.socket,
        connection: duckdb.DuckDBPyConnection,
        setup: SlotSetup,
        template: int,
        proof: bytes,
    ) -> None:
        self._channel = channel
        self._connection = connection
        self._setup = setup
        self._template = template
        self._proof = proof
        self._uses: Mapping[str, RelationUse] = {}

    def serve(self, warm_up: WarmUp, nothing: int) -> None:
        kernel.die_with_parent(self._template)
        restrict.drop_rights(self._setup.folder)
        # A new connection to the same engine: on the template's, random numbers would be the same in every fork.
        self._connection = self._connection.cursor()
        # A plain process gets its threads later: Landlock holds only for threads that start after it.
        if not self._setup.parent:
            lockdown.use_threads(self._connection, self._setup.limits)
        warm_up.do(self._connection.cursor())
        lockdown.check_connection_settings(self._connection, self._setup.limits, self._setup.folder)
        # From here on error output may quote the query, and the service logs standard error.
        os.dup2(nothing, 2)
        self._send(SlotReady(kernel.landlock_version() > 0, self._proof))
        request = self._receive()
        if not isinstance(request, Parse):
            raise ValueError("a query begins with its SQL")
        params = decode_params(request.params)
        try:
            parsed = parse(self._connection.cursor(), request.sql, params)
            self._send(Parsed(parsed.to_json()))
        except Exception as error:
            self._send(failure(error))
            return
        order = self._receive()
        if isinstance(order, Leave):
            return
        if not isinstance(order, RunQuery):
            raise ValueError("a parsed query is run or left")
        self._uses = parsed.relations
        self._run(request.sql, params, order)

    def _run(self, sql: str, params: StatementParams, order: RunQuery) -> None:
        relations = [self._receive_relation(attachment) for attachment in order.relations]
        try:
            columns = {relation.name: relation.columns for relation in relations}
            wide = bignum.may_be_used(sql, params, columns, self._uses)
            views = self._attach_and_lock(relations, exact_casts=wide)
            # Not ``execute``: it would hold all rows in memory before the first is sent.
            statement = self._statement(sql, params, views, exact_casts=wide)
            query = self._connection.sql(statement, params=bindable(params) or None)
            send_rows(self._channel.sendall, query, order)
        except (ConnectionError, EOFError) as error:
            # The service is gone, so there is no receiver for a failure.
            raise EOFError from error
        except Exception as error:
            self._send(failure(error))

    def _statement(
        self, sql: str, params: StatementParams, views: Sequence[attach.AttachedView], *, exact_casts: bool
    ) -> str:
        """The SQL to run: as it was written, unless the engine would read a value of it as another one."""
        try:
            statement = with_bytes(self._connection, sql, params)
            if not exact_casts:
                return statement
            statement = bignum.with_exact_casts(self._connection, statement, params)
            return with_digit_sums(self._connection, statement, params, views)
        except RecursionError:
            raise Invalid("QueryTooDeep", "the query is too large or nested too deeply") from None

    def _attach_and_lock(
        self, relations: list[attach.ReceivedRelation], *, exact_casts: bool
    ) -> list[attach.AttachedView]:
        setup, connection = self._setup, self._connection
        if setup.parent:
            # A sandbox shows only the interpreter's files. Without one, Landlock keeps the others out of reach; it
            # holds only for threads that are started afterwards.
            files = [file for relation in relations for file in relation.files]
            restrict.restrict_reads(files, [*setup.libraries, *([setup.folder] if setup.folder else [])])
            lockdown.use_threads(connection, setup.limits)
        views = attach.attach(connection, relations)
        if exact_casts:
            lockdown.without_rewriter(connection)
        paths = attach.paths(relations)
        lockdown.lock(connection, paths)
        lockdown.check_query_settings(connection, paths, setup.limits, setup.folder)
        return views

    def _receive_relation(self, attachment: Attachment) -> attach.ReceivedRelation:
        descriptors: list[int] = []
        total = attachment.files + attachment.tables
        while len(descriptors) < total:
            count = min(DESCRIPTORS_AT_ONCE, total - len(descriptors))
            # One byte at a time: the kernel delivers descriptors
            # together with the byte that they were sent with.
            mark, received, _, _ = socket.recv_fds(self._channel, 1, count)
            if not mark:
                raise EOFError
            if len(received) != count:
                raise ValueError("descriptors were lost on the way")
            descriptors += received
        columns = pa.ipc.read_schema(pa.py_buffer(attachment.columns))
        files, tables = descriptors[: attachment.files], descriptors[attachment.files :]
        return attach.ReceivedRelation(attachment.name, columns, files, tables)

    def _send(self, message: FromSlot) -> None:
        self._channel.sendall(frame(message))

    def _receive(self) -> ToSlot:
        length, kind = HEADER.unpack(self._read(HEADER.size))
        if kind != MESSAGE:
            raise ValueError("the service sends messages only")
        return decode_to_slot(self._read(length))

    def _read(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            chunk = self._channel.recv(size - len(content))
            if not chunk:
                raise EOFError
            content += chunk
        return bytes(content)


class WarmUp:
    """A query of our own. ``file`` is a descriptor of ``attach.sealed_file``; it stays open, so that its number
    never becomes another file's."""

    def __init__(self, file: int) -> None:
        self._relation = attach.ReceivedRelation(_WARM_UP_NAME, WARM_UP_SCHEMA, [file], [])

    def do(self, connection: duckdb.DuckDBPyConnection) -> None:
        parse(connection.cursor(), _WARM_UP_SQL, [5])
        attach.attach(connection, [self._relation])
        send_rows(len, connection.sql(_WARM_UP_SQL, params=[5]), _WARM_UP_ORDER)
        connection.execute(attach.SQL.drop_view.format(name=quoted(_WARM_UP_NAME)))


def send_rows(send: SendFrame, query: duckdb.DuckDBPyRelation, order: RunQuery) -> None:
    if len(query.columns) > MOST_COLUMNS:
        raise _too_wide(f"the result has {len(query.columns)} columns; the maximum is {MOST_COLUMNS}")
    types = column_types(query)
    try:
        rows = carried(query, order.form, hugeint_as_text=order.hugeint_as_text)
        # One row more than asked for shows whether the result was cut.
        reader: pa.RecordBatchReader = rows.to_arrow_reader(max(1, min(_ROWS_AT_ONCE, order.max_rows + 1)))
        if problem := shape_problem(reader.schema):
            raise _too_wide(problem)
        send(frame(Started(reader.schema.serialize().to_pybytes(), types)))
        batches = _checked(reader) if must_be_checked(types, order.form) else reader
        finished = _send_all(send, batches, order)
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        raise unfit(error) or error from None
    send(frame(finished))


def _checked(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Refuses invalid values here, as the query's fault: the service would treat them as a broken engine."""
    for batch in batches:
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise no_such_value(str(error)) from None
        yield batch


def _too_wide(problem: str) -> Invalid:
    return Invalid("ResultTooWide", f"{problem}: select only the columns that you need")


def _send_all(send: SendFrame, batches: Iterable[pa.RecordBatch], order: RunQuery) -> QueryFinished:
    """``row_bytes`` limits the weight of each piece, ``max_bytes`` the bytes of all of them."""
    rows = size = 0
    max_rows, row_bytes = order.max_rows, min(order.row_bytes, order.max_bytes)
    for batch in batches:
        left = max_rows - rows
        for part, heavy in _cut(batch.slice(0, left), min(ROWS_FRAME_BYTES, row_bytes // 2)):
            body = _as_stream(part) if heavy <= row_bytes else None
            if body is None or body.size > row_bytes or size + body.size > order.max_bytes:
                if rows == 0 and part.num_rows == 1:
                    raise Invalid("ResultTooLarge", f"a single row has more than {row_bytes} bytes")
                return QueryFinished(rows, truncated=True)
            send(HEADER.pack(body.size, ROWS))
            send(body)
            size += body.size
            rows += part.num_rows
        if batch.num_rows > left:
            return QueryFinished(rows, truncated=True)
    return QueryFinished(rows, truncated=False)


def _cut(batch: pa.RecordBatch, size: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Pieces of the batch and their weights: none above ``size``, unless it is a single row."""
    if batch.num_rows == 0:
        return
    heavy = weight(batch)
    if batch.num_rows == 1 or heavy <= size:
        yield batch, heavy
        return
    half = batch.num_rows // 2
    yield from _cut(batch.slice(0, half), size)
    yield from _cut(batch.slice(half), size)


def _as_stream(batch: pa.RecordBatch) -> pa.Buffer:
    """A whole stream with its schema and dictionaries, so that it can be read by itself."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def failure(error: Exception) -> QueryFailed:
    text = str(error)
    if isinstance(error, TracelakeError):
        return QueryFailed(error.status, error.reason, scrub(error.message))
    if (
        isinstance(error, duckdb.OutOfMemoryException | MemoryError | pa.ArrowMemoryError)
        or _OUT_OF_MEMORY in text
        or (isinstance(error, _BROKEN) and _UNALLOCATED.match(text))
    ):
        return QueryFailed(
            Invalid.status, "QueryOutOfMemory", "the query needs more memory than one query may use"
        )
    if isinstance(error, _BROKEN) or not isinstance(error, duckdb.Error | pa.ArrowException | OSError):
        return QueryFailed(Invalid.status, "QueryCrashed", "the query crashed the engine process")
    return QueryFailed(Invalid.status, "QueryFailed", scrub(text))


def scrub(text: str) -> str:
    """The text without the names of files, descriptors and our own views, and of bounded length."""
    for name in _files():
        text = text.replace(name, "(file)")
    text = _DESCRIPTOR.sub("(file)", text)
    text = _SPILL.sub("(spilled)", text)
    text = _OWN_NAME.sub("(rows)", text)
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}…"


def _files() -> list[str]:
    """The files behind our descriptors, longest name first so that none is replaced within another."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            # The descriptor of this very listing is in it, and closed by now.
            continue
        if target.startswith("/") and not target.startswith("/dev/"):
            found.append(target)
    return sorted(found, key=len, reverse=True)
