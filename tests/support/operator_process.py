"""An operator process whose wrapper is the test.

The process is a real one, started without this process's environment; its output is in ``log()``, which is
complete once the attempt has finished. There are also predicates with literals that a column can't hold: beyond
its digits, its range or the syntax of an engine. In them ``d`` is a decimal with a scale of 2, ``at`` an
instant.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from tracelake.contracts.dispatcher_api import JobRef, PayloadInput, PayloadOutput, TaskPayload
from tracelake.contracts.operator_protocol import (
    VERSION,
    Call,
    Finished,
    FromOperator,
    Ready,
    Run,
    ToOperator,
)
from tracelake.worker.operator.channel import decode_from_operator, encode, read_frame, write_frame

_PROGRAM = """
import socket, sys
from pathlib import Path
from tracelake.operators.registry import Registry
from tracelake.worker.operator.main import serve
fd, folder, *sources = sys.argv[1:]
serve(socket.socket(fileno=int(fd)), Registry.standard(sources), work_folder=Path(folder))
"""
EXTREME_PREDICATES = (
    *("d = 1e-299", "d > 1e-50", "d <= -1e-50", "d > 1e77", "d <= -1e77", "d <> 1e77"),
    *("d = 1.505", "d <> 1.505", "d < 1.505", "d <= 1.495", "d > 1.495", "d >= 1.505"),
    *("at > '2020-01-01T00:00:00+16:00'", "at < '2024-01-02T00:00:00+23:59'"),
    *("at >= '2024-01-02T00:00:00+05:30:15.5'", "at <> '2024-01-01T00:00:00-23:59:59.999999'"),
    *("at > '0001-01-01T00:00:00+14:00'", "at < '9999-12-31T23:59:59-14:00'"),
    *("at < '0001-01-01T00:00:00+14:00'", "at = '9999-12-31T23:59:59.999999-14:00'"),
)
QUOTED_PREDICATES = (
    *(
        "n = '1'",
        "n <> '1'",
        "n >= ' +2 '",
        "n in ('1', '2')",
        "n not in ('1', 'two')",
        "n = '9223372036854775807'",
    ),
    *("n = '1.0'", "n <> '1.5'", "n < '9223372036854775808'", "n = 'abc'", "n <> ''", "n = 'true'"),
    *("m = '3'", "m > '3'", "m < '3000000000'", "not (n = '1')", "not (n = 'abc')"),
    *(
        "d = '1.5'",
        "d = '1.50'",
        "d >= '15e-1'",
        "d < '1.505'",
        "d = '.0'",
        "d <> '1e400'",
        "d < '1e77'",
        "d > '-1e999'",
    ),
    *(
        "d < 'NaN'",
        "d = 'nan'",
        "d <> 'NaN'",
        "d > '-Infinity'",
        "d >= 'inf'",
        "d = 'abc'",
        "d <> '1e9999999999'",
    ),
    *(
        "f = '1.5'",
        "f >= '15e-1'",
        "f = 'NaN'",
        "f <> 'nan'",
        "f < 'NaN'",
        "f <= 'NaN'",
        "f > 'NaN'",
        "f >= 'NaN'",
    ),
    *(
        "f < 'Infinity'",
        "f > 'inf'",
        "f > '-inf'",
        "f = '-0'",
        "f <> '1e400'",
        "f = 'abc'",
        "f in ('2', 'nan')",
    ),
    *(
        "b = 'true'",
        "b = 't'",
        "b <> ' YES '",
        "b = 'off'",
        "b = '0'",
        "b = 'o'",
        "b < 'on'",
        "b = 'maybe'",
        "b <> '2'",
    ),
    *("s = '1'", "s < '1'"),
)
"""String literals beside columns of numbers and of booleans."""


class OperatorUnderTest:
    def __init__(self, folder: Path, sources: Sequence[str] = ()) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(60)
        with theirs:
            arguments = [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(folder), *sources]
            self.process = subprocess.Popen(arguments, env={}, pass_fds=[theirs.fileno()])
        self._log = bytearray()
        self._reading: threading.Thread | None = None

    def send(self, message: ToOperator) -> None:
        write_frame(self._socket, encode(message))

    def send_bytes(self, content: bytes) -> None:
        self._socket.sendall(content)

    def receive(self) -> FromOperator:
        body, _ = read_frame(self._socket)
        return decode_from_operator(body)

    def ready(self) -> Ready:
        message = self.receive()
        assert isinstance(message, Ready), message
        return message

    def run(self, task: TaskPayload, environment: Mapping[str, str] | None = None, **fields: Any) -> None:
        """Starts an attempt; its log is collected from now on."""
        reading, writing = os.pipe()
        fields = {"version": VERSION, "environment": dict(environment or {}), **fields}
        write_frame(self._socket, encode(Run(task=task, **fields)), [writing])
        os.close(writing)
        self._log.clear()
        self._reading = threading.Thread(target=self._collect, args=(reading,))
        self._reading.start()

    def until_finished(self) -> tuple[Finished, list[FromOperator]]:
        """The end of the attempt, and the messages before it."""
        before: list[FromOperator] = []
        while not isinstance(message := self.receive(), Finished):
            before.append(message)
        return message, before

    def until_call(self) -> Call:
        while not isinstance(message := self.receive(), Call):
            assert not isinstance(message, Finished), message
        return message

    def log(self) -> str:
        assert self._reading is not None
        self._reading.join(60)
        assert not self._reading.is_alive(), "a process still holds the attempt's log"
        return self._log.decode()

    def hang_up(self) -> None:
        self._socket.close()

    def _collect(self, descriptor: int) -> None:
        with open(descriptor, "rb") as log:
            while content := log.read1(65536):
                self._log += content


@contextmanager
def operator_process(folder: Path, *sources: str | Path) -> Iterator[OperatorUnderTest]:
    under_test = OperatorUnderTest(folder, [str(source) for source in sources])
    try:
        yield under_test
    finally:
        under_test.hang_up()
        under_test.process.kill()
        under_test.process.wait()


def a_task(
    operator: str,
    *,
    config: Mapping[str, Any] | None = None,
    inputs: Sequence[PayloadInput] = (),
    outputs: Sequence[PayloadOutput] = (),
    runtime: str = "ecs_python",
    task_id: UUID | None = None,
) -> TaskPayload:
    return TaskPayload(
        task_id=task_id or uuid4(),
        attempt=1,
        epoch=1,
        job=JobRef("dag", "job"),
        operator=operator,
        config=dict(config or {}),
        inputs=list(inputs),
        outputs=list(outputs),
        runtime=runtime,
        timeout_seconds=60,
        heartbeat_timeout_seconds=60,
        update_strategy="replace",
        unique_key=[],
        secrets=[],
    )


def an_input(
    index: int = 0, *, storage: str = "none", dataset: str | None = None, **scope: Any
) -> PayloadInput:
    return PayloadInput(index, uuid4(), uuid4(), 0, dataset, storage, **scope)


def an_output(
    index: int = 0, *, name: str = "result", storage: str = "none", staging: str | None = None
) -> PayloadOutput:
    return PayloadOutput(index, name, uuid4(), uuid4(), storage, 0, None, staging)
