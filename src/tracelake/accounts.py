"""Users of the machine that only Tracelake runs as: numbers without a name, one for each thing that is kept apart.

Postgres refuses to run as root, and root must not run operators, Spark or functions. A shared account such as
``nobody`` would join what was meant to be kept apart: processes of one user can open each other's files through
``/proc``, read each other's environment and send each other signals. So root gives each Postgres cluster, each
worker's operators, its Spark server and each sandbox a uid of its own, from a range that neither Debian nor systemd
hands out.

    hold      for as long as a process lives: a lock that the kernel frees, however the process ends
    reserve   for as long as a folder exists: its files keep their owner while nothing runs

Numbers in use by an account, a group or a running process of the machine are passed over. The gid is the same
number as the uid. Where a program insists on a name, it gets one by ``passwd_text`` in a view of its own.
"""

from __future__ import annotations

import fcntl
import grp
import os
import pwd
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tracelake.domain.errors import Unavailable
from tracelake.environment_settings import whole_number

FIRST_UID = 60_600
"""Between the users of systemd-homed and those of ``DynamicUser``."""
LAST_UID = 61_183
_LAST_UID = 2**32 - 2
_FOLDER = Path("/var/lib/tracelake/accounts")


@dataclass(frozen=True, slots=True)
class Account:
    name: str
    uid: int
    gid: int


def entry_of(user: str) -> pwd.struct_passwd:
    """By a name or a number, as people write either; ``KeyError`` when the machine has no such account."""
    uid = whole_number(user, 0, _LAST_UID)
    return pwd.getpwnam(user) if uid is None else pwd.getpwuid(uid)


class HeldAccount:
    """An account that nobody else is given until ``release``."""

    def __init__(self, account: Account, descriptor: int) -> None:
        self.account = account
        self._descriptor = descriptor

    @property
    def uid(self) -> int:
        return self.account.uid

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __repr__(self) -> str:
        return f"HeldAccount({self.account.name}, {self.account.uid})"


def hold_account(purpose: str) -> HeldAccount:
    """For root. ``purpose`` becomes part of the account's name: ``operators``, ``spark``, ``function``."""
    for uid, descriptor in _free_numbers():
        os.ftruncate(descriptor, 0)
        return HeldAccount(_account(purpose, uid), descriptor)
    raise _none_left()


def reserve_account(purpose: str, folder: Path) -> Account:
    """For root: the account of ``folder``, the same each time, until the folder is removed."""
    place = os.path.abspath(folder)
    for uid in range(FIRST_UID, LAST_UID + 1):
        if _reserved_for(uid) == place:
            return _account(purpose, uid)
    for uid, descriptor in _free_numbers():
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, os.fsencode(place), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return _account(purpose, uid)
    raise _none_left()


def is_ours(uid: int) -> bool:
    return FIRST_UID <= uid <= LAST_UID


def passwd_text(accounts: Iterable[Account]) -> str:
    """An ``/etc/passwd`` in which these have names, for programs that look themselves up."""
    return "".join(
        f"{name}:x:{uid}:{gid}:{name}:/:/usr/sbin/nologin\n"
        for name, uid, gid in [("root", 0, 0), *((each.name, each.uid, each.gid) for each in accounts)]
    )


def group_text(accounts: Iterable[Account]) -> str:
    return "".join(f"{name}:x:{gid}:\n" for name, gid in [("root", 0), *((a.name, a.gid) for a in accounts)])


def _account(purpose: str, uid: int) -> Account:
    return Account(name=f"tracelake-{purpose}", uid=uid, gid=uid)


def _free_numbers() -> Iterable[tuple[int, int]]:
    """Each with its lock held; whoever takes one closes it, and those passed over are closed here."""
    folder = _folder()
    running = uids_of_processes()
    for uid in range(FIRST_UID, LAST_UID + 1):
        if uid in running or _is_known(uid):
            continue
        descriptor = os.open(folder / str(uid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        # Looked at under the lock: another process may have reserved the number since.
        if _reserved_for(uid) is not None:
            os.close(descriptor)
            continue
        yield uid, descriptor


def _reserved_for(uid: int) -> str | None:
    try:
        place = os.fsdecode((_folder() / str(uid)).read_bytes())
    except FileNotFoundError:
        return None
    return place if place and os.path.isdir(place) else None


def _folder() -> Path:
    try:
        _FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = _FOLDER.lstat()
    except OSError as error:
        raise Unavailable(
            "AccountsUnavailable", f"can't keep accounts in {_FOLDER}: {error.strerror or error}"
        ) from None
    if _FOLDER.is_symlink() or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise Unavailable("AccountsUnavailable", f"{_FOLDER} is open to others; remove it")
    return _FOLDER


def _is_known(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
        return True
    except KeyError:
        pass
    try:
        grp.getgrgid(uid)
        return True
    except KeyError:
        return False


def uids_of_processes(*, outside: bool = False) -> set[int]:
    """Whom anything on the machine runs as, as far as ``/proc`` shows it; ``outside`` leaves out what runs in a
    process namespace of its own, as operators do."""
    found: set[int] = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                # The owner of a process that can't be dumped shows as root; its status says who it is.
                with open(f"/proc/{entry.name}/status", encoding="ascii", errors="replace") as status:
                    told = dict(line.split(":", 1) for line in status if line.startswith(("Uid:", "NSpid:")))
                if not (outside and len(told.get("NSpid", "").split()) > 1):
                    found.update(int(number) for number in told.get("Uid", "").split())
            except (OSError, ValueError):
                continue
    return found


def _none_left() -> Unavailable:
    count = LAST_UID - FIRST_UID + 1
    return Unavailable(
        "AccountsTaken", f"all {count} accounts of Tracelake ({FIRST_UID} to {LAST_UID}) are taken"
    )
