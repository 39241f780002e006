"""The identity that operators run under, and how a process takes it on for good.

Root starts each operator process under an account of its own (``tracelake.sandbox.accounts``), or all of them
under the configured one. Other users can only start them as themselves. Either way nothing of root's power is
left: no capability, none to be gained from a program on disk, no keyring of the session that started the worker.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections import deque

from tracelake import kernel
from tracelake.domain.errors import Invalid
from tracelake.sandbox import accounts
from tracelake.sandbox.accounts import Account, HeldAccount
from tracelake.sandbox.seccomp import refuse_calls

_SHARED = ("nobody", "nfsnobody")


class Accounts:
    """The accounts that the processes of one worker run as. An account serves one process at a time; its next
    process finds nothing of the last one: no process, no folder that both can see, no key."""

    def __init__(self, user: str | None) -> None:
        self._chosen = chosen_account(user) if user is not None and os.geteuid() == 0 else None
        self._held: dict[int, HeldAccount] = {}
        self._free: dict[str, deque[Account]] = {}

    async def take(self, purpose: str) -> Account | None:
        """An account for one process; None stands for the wrapper's own user."""
        if os.geteuid() != 0:
            return None
        if self._chosen is not None and purpose == "operator":
            return self._chosen
        free = self._free.setdefault(purpose, deque())
        if free:
            return free.popleft()
        held = await asyncio.to_thread(accounts.hold_account, purpose)
        self._held[held.uid] = held
        return held.account

    def give_back(self, purpose: str, account: Account | None) -> None:
        """Free an account; only when none of its processes is left."""
        # Neither the chosen account nor one that was released since.
        if account is not None and account.uid in self._held:
            self._free.setdefault(purpose, deque()).append(account)

    def close(self) -> None:
        for held in self._held.values():
            held.release()
        self._held.clear()
        self._free.clear()


def chosen_account(user: str) -> Account:
    """The account named by ``TRACELAKE_OPERATOR_USER``: it must exist, and nothing else may run under it."""
    try:
        entry = accounts.entry_of(user)
    except KeyError:
        raise Invalid(
            "OperatorUserUnknown",
            f"there is no account {user[:40]!r} to run operators as; set TRACELAKE_OPERATOR_USER to one that "
            "exists, or leave it unset",
        ) from None
    if entry.pw_uid == 0:
        raise _unsafe(user, "is root")
    if entry.pw_name in _SHARED or entry.pw_uid == 65534:
        raise _unsafe(user, "is shared: other programs run as it too, and could read and change its files")
    if entry.pw_uid in accounts.uids_of_processes(outside=True):
        raise _unsafe(user, "has running processes, which could read and change what operators have")
    return Account(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid)


def become(account: Account | None) -> None:
    """Take the identity and drop every power, for this process and all its future children. The bounding set goes
    first, while there is the power to drop it."""
    kernel.drop_bounding_set()
    if account is not None:
        # Groups first: the new user has no right to change them.
        os.setgroups([])
        os.setresgid(account.gid, account.gid, account.gid)
        os.setresuid(account.uid, account.uid, account.uid)
    accounts.leave_keyrings(None if account is None else account.uid)
    kernel.drop_capabilities()
    kernel.gain_no_privileges()
    kernel.forbid_inspection()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o022)
    if os.geteuid() == 0:
        raise _unsafe("0", "is root")
    # Last: it needs `gain_no_privileges`, and refuses the calls by which the keyrings were left.
    refuse_calls()


def _unsafe(user: str, why: str) -> Invalid:
    return Invalid(
        "OperatorUserUnsafe",
        f"operators can't run as {user!r}, which {why}; leave TRACELAKE_OPERATOR_USER unset for accounts of their"
        " own, or set it to one that only operators use",
    )
