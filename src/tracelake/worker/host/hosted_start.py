"""The first steps of a process that its keeper has forked, until it is an operator process or a program."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from tracelake.operators.registry import Registry
from tracelake.worker.host import kernel
from tracelake.worker.host.operator_environment import set_environment
from tracelake.worker.host.protocol import Program, Spawn
from tracelake.worker.operator.main import serve

_STDOUT, _STDERR = 1, 2


def become_operator(order: Spawn, channel: int, registry: Registry) -> None:
    """Serves until the wrapper closes the channel. Its orphans become its own children, to be found there. The
    operators' own source is loaded here and not before: it could change whatever it finds, for all that come after
    it in the same process. So nobody else's operators are run there, nor the built-in ones."""
    set_environment(order.folder)
    kernel.adopt_orphans()
    _reseed()
    if order.source is not None:
        registry = Registry.of(order.source)
    serve(socket.socket(fileno=channel), registry, work_folder=Path(order.folder), spark=order.spark)
    os._exit(0)


def become_program(program: Program, log: int) -> None:
    """A program that can't be executed says so in its log and ends with 127, as a shell would have it."""
    os.dup2(log, _STDOUT)
    os.dup2(log, _STDERR)
    try:
        os.chdir(program.folder)
        os.execvpe(program.argv[0], program.argv, program.env)
    except OSError as error:
        os.write(_STDERR, f"can't execute {program.argv[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _reseed() -> None:
    """Copies of one process must not draw the same random numbers; Python's own generator sees to itself."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
