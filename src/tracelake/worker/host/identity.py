"""Whom operators run as, and how a process becomes that for good.

Root starts them as ``nobody``, or as the account that it is told. Anybody else can only start them as
themselves. Either way nothing of root's power is left: no capability, none to be had from a program on disk.
"""

from __future__ import annotations

import os
import pwd
import resource
from dataclasses import dataclass

from tracelake.domain.errors import Invalid
from tracelake.worker.host import kernel

DEFAULT_USER = "nobody"


@dataclass(frozen=True, slots=True)
class Account:
    name: str
    uid: int
    gid: int


def operator_account(user: str) -> Account | None:
    """Whom to become; None to stay who we are."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
    except (KeyError, OverflowError):
        raise Invalid(
            "OperatorUserUnknown",
            f"there is no account {user!r} to run operators as; set TRACELAKE_OPERATOR_USER to one that exists",
        ) from None
    if entry.pw_uid == 0:
        raise Invalid(
            "OperatorUserUnsafe",
            f"operators can't run as {user!r}, which is root; set TRACELAKE_OPERATOR_USER to another account",
        )
    return Account(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid)


def become(account: Account | None) -> None:
    """Take the identity and drop every power, for this process and all that it will ever start.

    The bounding set goes first, while there is the power to.
    """
    kernel.drop_bounding_set()
    if account is not None:
        os.setgroups([])
        os.setresgid(account.gid, account.gid, account.gid)
        os.setresuid(account.uid, account.uid, account.uid)
    kernel.drop_capabilities()
    kernel.gain_no_privileges()
    kernel.forbid_inspection()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o022)
    if os.geteuid() == 0:
        raise Invalid("OperatorUserUnsafe", "operators would run as root")
