"""What a crashed launcher or server left behind in a data folder, and putting it in order.

Every Postgres process stands in its data folder, so the kernel can be asked who uses it; a pid file only
says who did once. With the folder's lock held no launcher is alive, which leaves three cases:

- a server that is still shutting down because its launcher died: it's waited for, never signalled, since
  it may also be one that somebody runs by hand;
- processes whose server was killed: they serve nobody, keep its shared memory and forbid a new start
  (one in a long query for as long as that runs), so they're ended;
- a pid file whose pid is gone, or belongs to another program by now: it's removed.

Where there is no ``/proc``, Postgres' own checks of the pid file stand alone.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tracelake.domain.errors import Conflict

_PROC = Path("/proc")
_POLL = 0.02
_QUIT_PATIENCE = 2.0


def clear(pgdata: Path, patience: float) -> None:
    """Leave no process and no stale pid file; a server that outstays ``patience`` is a conflict."""
    if not _PROC.joinpath("self", "cwd").exists() or not pgdata.exists():
        return
    deadline = time.monotonic() + patience
    while server := next((pid for pid in _using(pgdata) if not _is_subprocess(pid)), None):
        if time.monotonic() > deadline:
            raise Conflict("ClusterInUse", f"a Postgres that isn't ours (pid {server}) runs in {pgdata}")
        time.sleep(_POLL)
    end_orphans(pgdata)
    (pgdata / "postmaster.pid").unlink(missing_ok=True)


def end_orphans(pgdata: Path) -> None:
    """End what a killed server left running; only to be called when that server is gone."""
    started = time.monotonic()
    while orphans := [pid for pid in _using(pgdata) if _is_subprocess(pid)]:
        patient = time.monotonic() - started < _QUIT_PATIENCE
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGQUIT if patient else signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_POLL)


def _using(pgdata: Path) -> list[int]:
    try:
        folder = pgdata.stat()
    except FileNotFoundError:
        return []
    found = []
    for entry in os.scandir(_PROC):
        if not entry.name.isdigit():
            continue
        try:
            here = os.path.samestat(os.stat(f"{entry.path}/cwd"), folder)
            if here and Path(os.readlink(f"{entry.path}/exe")).name.startswith("postgres"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _is_subprocess(pid: int) -> bool:
    # Postgres titles its subprocesses "postgres: …"; the server itself keeps its command line.
    try:
        return _PROC.joinpath(str(pid), "cmdline").read_bytes().startswith(b"postgres: ")
    except OSError:
        return True
