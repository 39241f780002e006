"""The account that an embedded server runs as: one of its own for each cluster, and never ``nobody``.

A user other than root starts the server as themselves. Postgres refuses to run as root, so root starts it as
another account: as the user who made the data (a folder that a user made stays that user's), as the account that
``TRACELAKE_POSTGRES_USER`` names, and otherwise as a uid that only this cluster has
(``tracelake.sandbox.accounts``). ``nobody`` would work for Postgres, but every other program that runs as
``nobody`` could enter the data through ``/proc/PID/cwd`` and rewrite ``pg_hba.conf``.

``initdb`` looks up its user and refuses to run without a name; the server itself doesn't. So a thread gets mounts
of its own, in which ``/etc/passwd`` has root and that account, and starts ``initdb`` there. The mounts end with
the thread, and no other process sees them.
"""

from __future__ import annotations

import os
import pwd
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tracelake import kernel
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.sandbox import accounts
from tracelake.sandbox.accounts import Account, HeldAccount, group_text, passwd_text
from tracelake.trees import remove_if_possible

USER_VARIABLE = "TRACELAKE_POSTGRES_USER"
_OVERFLOW_UID = 65_534
"""The uid that the kernel shows for users without one here; ``nobody`` on most systems."""
Result = TypeVar("Result")
# A name service of the machine would be asked before the file.
_NAME_SERVICES = (Path("/run/nscd/socket"), Path("/var/run/nscd/socket"))


__all__ = ["USER_VARIABLE", "Account", "ServerAccount", "is_nobody", "server_account"]


@dataclass(frozen=True, slots=True)
class ServerAccount:
    """The account to switch to before the server is executed. ``named``: the machine has a name for it.
    ``takes_over``: data of our earlier accounts is transferred to it. ``held`` lasts for this run alone."""

    account: Account
    named: bool
    takes_over: bool
    held: HeldAccount | None = None

    def release(self) -> None:
        if self.held is not None:
            self.held.release()


def server_account(folder: Path, pgdata: Path, *, lasting: bool = True) -> ServerAccount | None:
    """``None`` to stay the same user. ``lasting`` reserves the uid for as long as the folder exists; otherwise it
    is held until it is released, or this process ends."""
    if os.geteuid() != 0:
        return None
    if folder.exists() and is_nobody(folder.stat().st_uid):
        raise Unavailable(
            "ClusterOfNobody",
            f"{folder} belongs to nobody, and so to every program that runs as nobody: give it to root "
            f"(chown -R root {folder}), or start as a user of its own",
        )
    owner = _owner(pgdata)
    if owner is not None and not (owner.uid == 0 or is_nobody(owner.uid) or accounts.is_ours(owner.uid)):
        return ServerAccount(owner, named=True, takes_over=False)
    if name := os.environ.get(USER_VARIABLE, ""):
        return ServerAccount(_chosen(name), named=True, takes_over=True)
    try:
        if lasting:
            account = accounts.reserve_account("postgres", folder)
            return ServerAccount(account, named=False, takes_over=True)
        held = accounts.hold_account("postgres")
        return ServerAccount(held.account, named=False, takes_over=True, held=held)
    except Unavailable as error:
        raise Unavailable(error.reason, f"{error.message}; {way_out()}") from None


def way_out() -> str:
    return (
        "start as an ordinary user instead of root, or name an existing account that runs nothing else "
        f"(neither root nor nobody) by {USER_VARIABLE}"
    )


def is_nobody(uid: int) -> bool:
    try:
        return uid in (_OVERFLOW_UID, pwd.getpwnam("nobody").pw_uid)
    except KeyError:
        return uid == _OVERFLOW_UID


def _owner(pgdata: Path) -> Account | None:
    try:
        # Not stat: the target of a planted link must not choose the account.
        found = pgdata.lstat()
    except FileNotFoundError:
        return None
    return Account(name=str(found.st_uid), uid=found.st_uid, gid=found.st_gid)


def _chosen(name: str) -> Account:
    try:
        entry = accounts.entry_of(name)
    except KeyError:
        raise Invalid(
            "NoSuchAccount", f"{USER_VARIABLE} names {name[:40]!r}, which this machine doesn't have"
        ) from None
    if entry.pw_uid == 0 or is_nobody(entry.pw_uid):
        raise Invalid(
            "UnsuitableAccount", f"{USER_VARIABLE} must name an account of its own, not {entry.pw_name}"
        )
    return Account(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid)


def with_name(account: Account, scratch: Path, work: Callable[[], Result]) -> Result:
    """Run ``work`` where ``account`` has a name; its children inherit that. For root."""
    results: list[Result] = []
    failures: list[BaseException] = []

    def in_thread() -> None:
        # Mounts stay with a thread until it ends, so this one is never used again.
        try:
            with tempfile.TemporaryDirectory(prefix="names-", dir=scratch) as folder:
                _show_names(account, Path(folder))
                results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=in_thread, name="embedded-postgres-initdb")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def check_naming(account: Account) -> None:
    """Raise where a new cluster couldn't be created."""
    with_name(account, Path(tempfile.gettempdir()), lambda: None)


def sweep_named_accounts(scratch: Path) -> None:
    """Remove the files of launchers that were killed."""
    for stale in scratch.glob("names-*"):
        remove_if_possible(stale)


def _show_names(account: Account, folder: Path) -> None:
    files = {
        "passwd": passwd_text([account]),
        "group": group_text([account]),
        "nsswitch.conf": "passwd: files\ngroup: files\n",
    }
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
        # Otherwise the mounts below would spread to every process of the machine.
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        for name, text in files.items():
            shown = folder / name
            shown.write_text(text, encoding="ascii")
            # initdb runs as the account, whatever the umask of root is.
            shown.chmod(0o644)
            # A bind mount needs an existing file to cover.
            if Path("/etc", name).exists():
                kernel.mount(str(shown), f"/etc/{name}", None, kernel.MS_BIND)
        for socket in _NAME_SERVICES:
            if socket.exists():
                kernel.mount("/dev/null", str(socket), None, kernel.MS_BIND)
    except OSError as error:
        raise Unavailable(
            "NoAccountForPostgres",
            f"a new Postgres can't be given a user of its own here ({error.strerror}): {way_out()}",
        ) from None
