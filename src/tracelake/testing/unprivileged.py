"""Run a program as a user without power, also where root's interpreter lies in a folder that is closed to others.

``python -m tracelake.testing.unprivileged FOLDER PROGRAM…``; the program may write in ``FOLDER``. Who has no power
to begin with stays who they are.
"""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path

from tracelake.accounts import Account
from tracelake.worker.host import namespaces
from tracelake.worker.host.private_view import closed_to, interpreter_paths, plan_view, with_targets


def main(folder: Path, argv: list[str]) -> None:
    account = _somebody() if os.geteuid() == 0 else None
    if account is not None:
        os.chown(folder, account.uid, account.gid)
        shown = with_targets([*interpreter_paths(), folder, Path.cwd()])
        steps = plan_view(covered=[], blanked=[], shown=shown, closed=closed_to(account))
        namespaces.enter_mounts()
        namespaces.arrange(steps)
        os.setgroups([])
        os.setresgid(account.gid, account.gid, account.gid)
        os.setresuid(account.uid, account.uid, account.uid)
    environment = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    os.execve(argv[0], argv, environment)


def _somebody() -> Account:
    """Who is in the machine's list of accounts, as people are."""
    entry = pwd.getpwnam("nobody")
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
