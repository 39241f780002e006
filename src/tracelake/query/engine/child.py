"""The confined process of a slot, and in it a process for each query.

What is started is a *template*: an interpreter with everything imported and one connection made, which never sees
SQL or data. For each query it forks (3 ms, while the slot is idle; a connection would cost 17). The fork takes away
from itself what it doesn't need, says ``Ready``, does one query and ends, and with it every descriptor, mapping and
byte of that query: nothing is left for the next caller. If it ends in any other way, the template ends too and
the service starts another. The service knows of a new fork from the template itself, by a pipe that no fork has.

A fork is sound because the template has no threads but its own: the engine gets its threads in the fork. The
protocol's socket is standard output.
"""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import duckdb
import msgspec
import pyarrow as pa

from tracelake.query.engine import attach, lockdown, restrict
from tracelake.query.engine.failures import failure
from tracelake.query.engine.gate import parse
from tracelake.query.engine.limits import MIB, OWN_BYTES, SlotLimits
from tracelake.query.engine.messages import (
    DESCRIPTORS_AT_ONCE,
    HEADER,
    PROOF_BYTES,
    TOLD,
    Asked,
    Attachment,
    Leave,
    Parse,
    Parsed,
    Ready,
    Run,
    Said,
    decode_asked,
    decode_params,
    frame,
)
from tracelake.query.engine.send_rows import send_rows
from tracelake.query.engine.warm_up import WarmUp

_BEYOND_STANDARD = 10
_SERVICE_IS_GONE = 3


class Setup(msgspec.Struct, frozen=True):
    """Given as JSON on the command line. ``libraries``: what the interpreter may load; ``parent``: the service,
    where there is no sandbox that ends with it; 0 in a sandbox."""

    limits: SlotLimits
    folder: str | None
    libraries: list[str]
    parent: int


def main() -> None:
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    if setup.parent:
        restrict.die_with_parent(setup.parent)
    restrict.limit_memory(setup.limits.memory_bytes + OWN_BYTES, max(setup.limits.spill_bytes, MIB))
    os.environ.clear()
    channel = take_channel()
    proofs, rows = _take_handles(channel)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    connection = lockdown.connect(setup.limits, setup.folder)
    warm_up = WarmUp(rows)
    warm_up.do(connection.cursor())
    gc.collect()
    gc.freeze()
    restrict.be_unreadable()
    template, nothing = os.getpid(), os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    while True:
        _nothing_left(channel)
        proof = os.urandom(PROOF_BYTES)
        os.write(proofs, proof)
        child = os.fork()
        if child == 0:
            os.close(proofs)
            _in_fork(partial(_Query(channel, connection, setup, template, proof).serve, warm_up, nothing))
        _, status = os.waitpid(child, 0)
        if status != 0:
            os._exit(os.waitstatus_to_exitcode(status) % 256)


def take_channel() -> socket.socket:
    """Off standard output, where anything might write to it."""
    moved = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, _BEYOND_STANDARD)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
    return socket.socket(fileno=moved)


def _take_handles(channel: socket.socket) -> tuple[int, int]:
    """The pipe by which the template, and no fork of it, speaks to the service; and the file to warm up with."""
    _, received, _, _ = socket.recv_fds(channel, 1, 2)
    if len(received) != 2:
        os._exit(_SERVICE_IS_GONE)
    for descriptor in received:
        os.set_inheritable(descriptor, False)
    proofs, rows = received
    return proofs, rows


def _nothing_left(channel: socket.socket) -> None:
    """The service speaks to a query's process only when it is ready. What is there before was meant for the last
    one, which left it unread: the next must not take it for its own."""
    try:
        left = channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return
    os._exit(1 if left else _SERVICE_IS_GONE)


def _in_fork(serve: Callable[[], None]) -> NoReturn:
    """Threads may still be at work; nobody waits for them."""
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
        setup: Setup,
        template: int,
        proof: bytes,
    ) -> None:
        self._channel = channel
        self._connection = connection
        self._setup = setup
        self._template = template
        self._proof = proof

    def serve(self, warm_up: WarmUp, nothing: int) -> None:
        restrict.die_with_parent(self._template)
        restrict.stay_alone(self._setup.folder)
        # Another connection to the same engine: random numbers would be the template's, the same in every fork.
        self._connection = self._connection.cursor()
        if not self._setup.parent:
            lockdown.use_threads(self._connection, self._setup.limits)
        warm_up.do(self._connection.cursor())
        lockdown.prove_made(self._connection, self._setup.limits, self._setup.folder)
        # From here on, what it complains of may quote the query, and standard error is for the log.
        os.dup2(nothing, 2)
        self._say(Ready(restrict.landlock_version() > 0, self._proof))
        asked = self._hear()
        if not isinstance(asked, Parse):
            raise ValueError("a query begins with its SQL")
        params = decode_params(asked.params)
        try:
            self._say(Parsed(parse(self._connection.cursor(), asked.sql, params).to_json()))
        except Exception as error:
            self._say(failure(error))
            return
        order = self._hear()
        if isinstance(order, Leave):
            return
        if not isinstance(order, Run):
            raise ValueError("what was parsed is run, or left")
        self._run(asked.sql, params, order)

    def _run(self, sql: str, params: object, order: Run) -> None:
        relations = [self._receive(attachment) for attachment in order.relations]
        try:
            self._attach_and_lock(relations)
            # Not by ``execute``, which would have all rows in memory before the first is sent.
            query = self._connection.sql(sql, params=params or None)
            send_rows(self._channel.sendall, query, order)
        except (ConnectionError, EOFError) as error:
            raise EOFError from error
        except Exception as error:
            self._say(failure(error))

    def _attach_and_lock(self, relations: list[attach.Received]) -> None:
        setup, connection = self._setup, self._connection
        if setup.parent:
            # A sandbox shows no files but the interpreter's; without one they are kept out of reach by name here,
            # before there are threads that it wouldn't hold for.
            files = [file for relation in relations for file in relation.files]
            restrict.read_only_these(files, [*setup.libraries, *([setup.folder] if setup.folder else [])])
            lockdown.use_threads(connection, setup.limits)
        attach.attach(connection, relations)
        paths = attach.paths(relations)
        lockdown.lock(connection, paths)
        lockdown.prove_locked(connection, paths, setup.limits, setup.folder)

    def _receive(self, attachment: Attachment) -> attach.Received:
        descriptors: list[int] = []
        total = attachment.files + attachment.tables
        while len(descriptors) < total:
            count = min(DESCRIPTORS_AT_ONCE, total - len(descriptors))
            mark, received, _, _ = socket.recv_fds(self._channel, 1, count)
            if not mark:
                raise EOFError
            if len(received) != count:
                raise ValueError("descriptors were lost on the way")
            descriptors += received
        columns = pa.ipc.read_schema(pa.py_buffer(attachment.columns))
        files, tables = descriptors[: attachment.files], descriptors[attachment.files :]
        return attach.Received(attachment.name, columns, files, tables)

    def _say(self, message: Said) -> None:
        self._channel.sendall(frame(message))

    def _hear(self) -> Asked:
        length, kind = HEADER.unpack(self._read(HEADER.size))
        if kind != TOLD:
            raise ValueError("the service sends messages only")
        return decode_asked(self._read(length))

    def _read(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            chunk = self._channel.recv(size - len(content))
            if not chunk:
                raise EOFError
            content += chunk
        return bytes(content)
