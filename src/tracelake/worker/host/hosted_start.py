"""The first steps of a process that the zygote has forked, until it is an operator process or a program."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from tracelake.operators.registry import Registry
from tracelake.worker.host import kernel
from tracelake.worker.host.protocol import Program, Spawn
from tracelake.worker.operator.main import serve

_STDIN, _STDOUT, _STDERR = 0, 1, 2


def become_operator(order: Spawn, channel: int, parent: int, registry: Registry) -> None:
    """Serves until the wrapper closes the channel. Its orphans become its own children, to be found there."""
    _stand_alone(parent)
    kernel.adopt_orphans()
    _reseed()
    serve(socket.socket(fileno=channel), registry, work_folder=Path.cwd(), spark=order.spark)
    os._exit(0)


def become_program(program: Program, log: int, parent: int) -> None:
    """A program that can't be executed says so in its log and ends with 127, as a shell would have it."""
    _stand_alone(parent)
    os.dup2(log, _STDOUT)
    os.dup2(log, _STDERR)
    try:
        os.chdir(program.cwd)
        os.execvpe(program.argv[0], program.argv, program.env)
    except OSError as error:
        os.write(_STDERR, f"can't execute {program.argv[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _stand_alone(parent: int) -> None:
    os.setsid()
    kernel.die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def _reseed() -> None:
    """Copies of one process must not draw the same random numbers; Python's own generator sees to itself."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
