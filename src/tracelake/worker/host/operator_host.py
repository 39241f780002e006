"""The operator host: enters the private view, and in it forks operator processes that are ready at once.

``python -m tracelake.worker.host.operator_host CONTROL LIFELINE`` is started by the wrapper with two descriptors
and almost no environment. It becomes two processes:

    guardian   sets up the view that all processes share, then only waits: when the wrapper has ended or was
               killed, the lifeline ends, and the guardian kills the zygote
    zygote     the private view's init: imports the libraries that operators need and forks processes on request
               (``zygote``), each with a keeper that gives it namespaces and an identity (``keeper``). When it
               ends, the kernel kills every process in the view, whatever its group or session

So nothing that an operator starts outlives its wrapper. Without namespaces the same two processes adopt orphans
and kill them.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from tracelake import kernel
from tracelake.domain.errors import TracelakeError
from tracelake.kernel import kill_children
from tracelake.worker.host import namespaces, zygote
from tracelake.worker.host.host_check import needed_paths
from tracelake.worker.host.keeper import PrivateView
from tracelake.worker.host.private_view import Step, closed_to, plan_view, split, with_targets
from tracelake.worker.host.protocol import HostSetup, Refused, read_to_host, send_packet

_SCRATCH = (namespaces.SHARED_MEMORY, Path("/tmp"), Path("/var/tmp"))
"""Folders that every user may write to: each process gets its own, empty and removed with it. The embedded
database keeps segments in the first.
"""


def main(control_fd: int, lifeline: int) -> int:
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    os.set_inheritable(lifeline, False)
    os.umask(0o022)
    received = read_to_host(control)
    if received is None or not isinstance(received[0], HostSetup):
        return 1
    try:
        zygote_pid = _start(received[0], control, lifeline)
    except BaseException as error:
        with suppress(OSError):
            send_packet(control, _refusal(error))
        return 1
    # The zygote alone holds it from here on, so that its end reaches the wrapper.
    control.close()
    return _guard(zygote_pid, lifeline, alone=received[0].namespaces)


def _start(setup: HostSetup, control: socket.socket, lifeline: int) -> int:
    view = PrivateView(
        namespaces=setup.namespaces,
        object_root=Path(os.path.realpath(setup.object_root)),
        work_folder=Path(os.path.realpath(setup.work_folder)),
        own=[],
    )
    if setup.namespaces:
        common, own = split(_plan(setup))
        view = replace(view, own=own)
        namespaces.enter()
        # Before the steps: what they mount on top may be writable.
        namespaces.forbid_writing()
        namespaces.arrange(common)
    kernel.adopt_orphans()
    kernel.forbid_inspection()
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.close(lifeline)
        zygote.run(setup, view, control)
        status = 0
    except BaseException as error:
        if not isinstance(error, SystemExit):
            with suppress(OSError):
                send_packet(control, _refusal(error))
    finally:
        # Not a return: the guardian's code would run a second time, in this process.
        os._exit(status)


def _plan(setup: HostSetup) -> list[Step]:
    hidden = [Path(path) for path in ([setup.home] if setup.home else []) + setup.hidden]
    secret = with_targets([*hidden, Path(f"/run/user/{os.geteuid()}")])
    return plan_view(
        covered=[path for path in secret if path.is_dir()],
        blanked=[path for path in secret if not path.is_dir()],
        shown=with_targets(needed_paths(setup)),
        closed=closed_to(setup.account),
        scratch={Path(os.path.realpath(path)) for path in _SCRATCH if path.is_dir()},
        writable=with_targets([Path(setup.object_root), Path(setup.work_folder)]),
    )


def _guard(zygote_pid: int, lifeline: int, *, alone: bool) -> int:
    """``alone``: the view has an init, and everything in it ends with that. (Its ``/proc`` covers ours and has
    other numbers, so the guardian couldn't look for children anyway.)"""
    waiting = select.poll()
    waiting.register(lifeline, select.POLLIN)
    waiting.register(os.pidfd_open(zygote_pid), select.POLLIN)
    waiting.poll()
    # Harmless if it has ended by itself: until it is reaped its number belongs to it.
    os.kill(zygote_pid, signal.SIGKILL)
    _, status = os.waitpid(zygote_pid, 0)
    if not alone:
        kill_children()
    return 0 if status == 0 else 1


def _refusal(error: BaseException) -> Refused:
    match error:
        case namespaces.NoNamespaces():
            return Refused(kind="NoNamespaces", message=error.message)
        case TracelakeError():
            return Refused(kind="Unsafe", message=error.message)
        case msgspec.MsgspecError() | OSError():
            return Refused(kind="Broken", message=str(error))
        case _:
            traceback.print_exception(error)
            return Refused(kind="Broken", message=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
