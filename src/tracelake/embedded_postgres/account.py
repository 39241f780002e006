"""The account that the server runs as: one of its own for each cluster, and never ``nobody``.

Anybody but root starts it as themselves. Postgres refuses to run as root, so root starts it as somebody else: as
the user who made the data (a folder that a user made stays that user's), as the account that
``TRACELAKE_POSTGRES_USER`` names, and else as a uid that only this cluster has (``tracelake.accounts``). ``nobody``
would do for Postgres, but every other program that runs as ``nobody`` could walk into the data through
``/proc/PID/cwd`` and rewrite ``pg_hba.conf``.
"""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from tracelake import accounts
from tracelake.accounts import Account, HeldAccount
from tracelake.domain.errors import Invalid, Unavailable

__all__ = ["USER_VARIABLE", "Account", "ServerAccount", "is_nobody", "server_account"]

USER_VARIABLE = "TRACELAKE_POSTGRES_USER"
_OVERFLOW_UID = 65_534
"""What the kernel shows for whoever has no number here, and ``nobody`` on most systems."""


@dataclass(frozen=True, slots=True)
class ServerAccount:
    """Whom to become before the server is executed. ``named`` says whether the machine knows it by a name, and
    ``takes_over`` whether data of earlier accounts of ours is handed to it; ``held`` lasts for this run alone."""

    account: Account
    named: bool
    takes_over: bool
    held: HeldAccount | None = None

    def release(self) -> None:
        if self.held is not None:
            self.held.release()


def server_account(folder: Path, pgdata: Path, *, lasting: bool = True) -> ServerAccount | None:
    """``None`` to stay who we are. ``lasting`` reserves the number for as long as the folder exists; otherwise it
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
