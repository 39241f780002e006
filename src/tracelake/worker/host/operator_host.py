"""The operator host: enters the private view, and in it forks operator processes that are ready at once.

``python -m tracelake.worker.host.operator_host CONTROL LIFELINE`` is started by the wrapper with two descriptors
and next to no environment. It becomes two processes:

    guardian   keeps the power that the mounts needed and uses it no more; when the wrapper is gone, by its own
               will or killed, the lifeline ends, and the guardian kills the zygote
    zygote     the private view's init: takes the operators' identity, imports what they will need, forks them on
               request (``zygote``). When it ends, the kernel kills every process in the view, whatever group or
               session it has fled to

So nothing that an operator starts outlives its wrapper. Without namespaces the same two processes do it by hand:
both adopt orphans and kill whom they adopt.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import msgspec

from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.worker.host import kernel, namespaces, zygote
from tracelake.worker.host.identity import Account, operator_account
from tracelake.worker.host.operator_environment import needed_paths
from tracelake.worker.host.private_view import Step, closed_to, plan_view, with_targets
from tracelake.worker.host.process_tree import kill_children
from tracelake.worker.host.protocol import Refused, Setup, read_to_host, send_packet

_SHARED_MEMORY = Path("/dev/shm")
"""The embedded database keeps segments here, under the user that operators may have too."""


def main(control_fd: int, lifeline: int) -> int:
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    os.set_inheritable(lifeline, False)
    os.umask(0o022)
    received = read_to_host(control)
    if received is None or not isinstance(received[0], Setup):
        return 1
    try:
        zygote_pid = _start(received[0], control, lifeline)
    except BaseException as error:
        with suppress(OSError):
            send_packet(control, _refusal(error))
        return 1
    control.close()
    return _guard(zygote_pid, lifeline, alone=received[0].namespaces)


def _start(setup: Setup, control: socket.socket, lifeline: int) -> int:
    account = operator_account(setup.user)
    _make_work_folder(Path(setup.work_folder), account)
    if setup.namespaces:
        steps = _view(setup, account)
        namespaces.enter()
        namespaces.arrange(steps)
    kernel.adopt_orphans()
    kernel.forbid_inspection()
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.close(lifeline)
        zygote.run(setup, account, control)
        status = 0
    except BaseException as error:
        with suppress(OSError):
            send_packet(control, _refusal(error))
    finally:
        os._exit(status)


def _view(setup: Setup, account: Account | None) -> list[Step]:
    hidden = [Path(path) for path in ([setup.home] if setup.home else []) + setup.hidden]
    secret = with_targets(hidden)
    return plan_view(
        covered=[path for path in secret if path.is_dir()],
        blanked=[path for path in secret if not path.is_dir()],
        shown=with_targets(needed_paths(setup)),
        closed=closed_to(account),
        scratch=[_SHARED_MEMORY] if _SHARED_MEMORY.is_dir() else [],
    )


def _make_work_folder(folder: Path, account: Account | None) -> None:
    """The operators' own, and nobody else's."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if account is not None:
            os.chown(folder, account.uid, account.gid, follow_symlinks=False)
        folder.chmod(0o700)
    except OSError as error:
        raise Unavailable(
            "WorkFolderUnusable", f"can't make the work folder {folder}: {error.strerror}"
        ) from None


def _guard(zygote_pid: int, lifeline: int, *, alone: bool) -> int:
    """``alone``: the view has an init, whose end is everybody's. (Its ``/proc`` is ours too and has other
    numbers, so we couldn't look for children if we wanted.)"""
    waiting = select.poll()
    waiting.register(lifeline, select.POLLIN)
    waiting.register(os.pidfd_open(zygote_pid), select.POLLIN)
    waiting.poll()
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
