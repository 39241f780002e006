"""Runs a program as a user without rights, even if root's interpreter is in a folder that is closed to others.

``python -m tests.support.unprivileged FOLDER PROGRAM…``; the program may write in ``FOLDER``. A caller without
rights stays the same user.
"""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path

from tracelake import kernel
from tracelake.sandbox.accounts import Account
from tracelake.worker.host import namespaces
from tracelake.worker.host.private_view import closed_to, interpreter_paths, plan_view, with_targets


def main(folder: Path, argv: list[str]) -> None:
    account = _other_user() if os.geteuid() == 0 else None
    if account is not None:
        os.chown(folder, account.uid, account.gid)
        shown = with_targets([*interpreter_paths(), folder, Path.cwd()])
        steps = plan_view(covered=[], blanked=[], shown=shown, closed=closed_to(account))
        _enter_mounts()
        namespaces.arrange(steps)
        os.setgroups([])
        os.setresgid(account.gid, account.gid, account.gid)
        os.setresuid(account.uid, account.uid, account.uid)
    environment = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    os.execve(argv[0], argv, environment)


def _enter_mounts() -> None:
    """Private mounts and nothing more."""
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)


def _other_user() -> Account:
    """Who is in the machine's list of accounts, as people are."""
    entry = pwd.getpwnam("nobody")
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
