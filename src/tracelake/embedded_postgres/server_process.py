"""The server as a child process that ends with us.

The kernel's parent-death signal is sent when the *thread* that forked ends, not only when its process
does. So a thread of its own forks the server and then waits for it: it lives exactly as long as the
server may, whichever thread asked for the start.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from tracelake import keyrings
from tracelake.domain.errors import Unavailable
from tracelake.embedded_postgres import parent_death
from tracelake.embedded_postgres.account import Account
from tracelake.embedded_postgres.binaries import Binaries

# The server resolves its data folder once more after it was started, by path. Through this link the path
# leads to the folder that it already stands in, whether or not its account may enter the folders above.
_CWD_LINK = Path("/proc/self/cwd")


def data_argument(pgdata: Path) -> str:
    return str(_CWD_LINK if _CWD_LINK.exists() else pgdata)


def environment() -> dict[str, str]:
    """Nothing of ours: neither secrets nor ``PG*`` variables reach the server."""
    return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}


def before_exec(account: Account | None) -> Callable[[], None]:
    """What the child does once it has changed its user: it ends with us, and leaves our keyrings."""
    steps = [parent_death.arm(), keyrings.prepared(account.uid if account else None)]

    def in_child() -> None:
        for step in steps:
            if step is not None:
                step()

    return in_child


class ServerProcess:
    """One run of ``postgres``; ``start`` returns once it was forked, not once it is ready."""

    def __init__(self, binaries: Binaries, pgdata: Path, account: Account | None, log: int) -> None:
        self._binaries = binaries
        self._pgdata = pgdata
        self._account = account
        self._log = log
        self._forked = threading.Event()
        self._exited = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: Exception | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="embedded-postgres", daemon=True).start()
        self._forked.wait()
        if self._failure is not None:
            raise Unavailable(
                "ClusterStartFailed", f"can't execute {self._binaries.postgres}: {self._failure}"
            ) from self._failure

    def _run(self) -> None:
        try:
            self._process = self._fork()
        except (OSError, subprocess.SubprocessError) as error:
            self._failure = error
            self._exited.set()
            return
        finally:
            self._forked.set()
        self._process.wait()
        self._exited.set()

    def _fork(self) -> subprocess.Popen[bytes]:
        account = self._account
        return subprocess.Popen(
            [self._binaries.postgres, "-D", data_argument(self._pgdata)],
            cwd=self._pgdata,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
            # A session of its own: Ctrl-C on the terminal is for us, who end the server last.
            start_new_session=True,
            preexec_fn=before_exec(account),
        )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return not self._exited.is_set()

    def wait(self, timeout: float) -> bool:
        """Whether it has ended within ``timeout`` seconds."""
        return self._exited.wait(timeout)

    def stop(self, timeout: float) -> None:
        """Fast shutdown; after ``timeout`` an immediate one; a server that answers neither is killed."""
        for sign, patience in ((signal.SIGINT, timeout), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0)):
            if self.running and self._process is not None:
                self._process.send_signal(sign)
            if self.wait(patience):
                return
