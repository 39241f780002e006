"""Machine accounts that only Tracelake uses: uids without a name, one for each thing that is kept apart.

Postgres refuses to run as root, and root must not run operators, Spark or functions. A shared account such as
``nobody`` would join them: processes of one user can open each other's files through ``/proc``, read each other's
environment and send each other signals. So root gives each Postgres cluster, each worker's operators, its Spark
server and each sandbox a uid of its own, from a range that neither Debian nor systemd uses.

    hold      for as long as a process lives: a lock that the kernel frees, however the process ends
    reserve   for as long as a folder exists: its files keep their owner while nothing runs

Numbers in use by an account, a group or a running process of the machine are skipped. The gid is the same number
as the uid. A program that insists on a name gets one by ``passwd_text`` in a view of its own.

Kernel keyrings are inherited, and no namespace separates them. A session's keyring is shared by all processes
started in it, whatever user they have become since; a user's keyring is found by every process that ever runs
under that uid. Root's may hold keys of file systems and tickets. So a process that must not share them leaves the
first and empties the second. Where the kernel has no keyrings, or forbids their use (as containers often do),
there is nothing to do.
"""

from __future__ import annotations

import fcntl
import grp
import os
import pwd
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tracelake import kernel
from tracelake.domain.errors import Unavailable
from tracelake.settings import whole_number

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
    """The account with this name or number; ``KeyError`` when the machine has none."""
    uid = whole_number(user, 0, _LAST_UID)
    return pwd.getpwnam(user) if uid is None else pwd.getpwuid(uid)


class HeldAccount:
    """An account that is given to no other caller until ``release``."""

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
    """Hold a free account; for root. ``purpose`` becomes part of the account's name: ``operators``, ``spark``,
    ``function``."""
    for uid, descriptor in _free_numbers():
        # An old reservation would count again if its folder came back.
        os.ftruncate(descriptor, 0)
        return HeldAccount(_account(purpose, uid), descriptor)
    raise _none_left()


def reserve_account(purpose: str, folder: Path) -> Account:
    """The account of ``folder``, the same each time, until the folder is removed; for root."""
    place = os.path.abspath(folder)
    for uid in range(FIRST_UID, LAST_UID + 1):
        if _reserved_for(uid) == place:
            return _account(purpose, uid)
    for uid, descriptor in _free_numbers():
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, os.fsencode(place), 0)
            # On disk before the first file has this owner: after a crash no other folder may get the number.
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return _account(purpose, uid)
    raise _none_left()


def is_ours(uid: int) -> bool:
    return FIRST_UID <= uid <= LAST_UID


def passwd_text(accounts: Iterable[Account]) -> str:
    """An ``/etc/passwd`` in which these accounts have names, for programs that look themselves up."""
    return "".join(
        f"{name}:x:{uid}:{gid}:{name}:/:/usr/sbin/nologin\n"
        for name, uid, gid in [("root", 0, 0), *((each.name, each.uid, each.gid) for each in accounts)]
    )


def group_text(accounts: Iterable[Account]) -> str:
    return "".join(f"{name}:x:{gid}:\n" for name, gid in [("root", 0), *((a.name, a.gid) for a in accounts)])


def _account(purpose: str, uid: int) -> Account:
    return Account(name=f"tracelake-{purpose}", uid=uid, gid=uid)


def _free_numbers() -> Iterable[tuple[int, int]]:
    """Free numbers, each with its lock held. The caller closes the lock of the one it uses; the others are closed
    here."""
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
        # Checked under the lock: another process may have reserved the number since.
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
    """The uids of all processes that ``/proc`` shows; ``outside`` leaves out those in a process namespace of
    their own, such as operators."""
    found: set[int] = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                # The owner of an undumpable process shows as root; its status has the real uid.
                with open(f"/proc/{entry.name}/status", encoding="ascii", errors="replace") as status:
                    fields = dict(
                        line.split(":", 1) for line in status if line.startswith(("Uid:", "NSpid:"))
                    )
                if not (outside and len(fields.get("NSpid", "").split()) > 1):
                    found.update(int(number) for number in fields.get("Uid", "").split())
            except (OSError, ValueError):
                continue
    return found


def _none_left() -> Unavailable:
    count = LAST_UID - FIRST_UID + 1
    return Unavailable(
        "AccountsTaken", f"all {count} accounts of Tracelake ({FIRST_UID} to {LAST_UID}) are taken"
    )


def leave_keyrings(uid: int | None) -> None:
    """Leave the session's keyring, after the identity was taken. ``uid``'s own keyrings are emptied if the uid is
    one of ours, since another process used it before; other users may keep something there."""
    prepared_to_leave_keyrings(uid)()


def prepared_to_leave_keyrings(uid: int | None) -> Callable[[], None]:
    """The same as a function that only makes system calls, for use between fork and exec."""
    return kernel.leaving_keyrings(empty=uid is not None and is_ours(uid))
