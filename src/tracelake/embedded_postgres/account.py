"""The account that the server runs as.

Postgres refuses to run as root, so root starts it as somebody else: as the owner of the data when there
is some already (a folder that a user made stays that user's), and as ``nobody`` otherwise. Anybody else
starts it as themselves.
"""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from tracelake.domain.errors import Unavailable

_UNPRIVILEGED = "nobody"


@dataclass(frozen=True, slots=True)
class Account:
    name: str
    uid: int
    gid: int


def server_account(data: Path) -> Account | None:
    """Whom to become before the server is executed; ``None`` to stay who we are."""
    if os.geteuid() != 0:
        return None
    try:
        owner = data.stat()
    except FileNotFoundError:
        return _unprivileged()
    if owner.st_uid == 0:
        return _unprivileged()
    return Account(name=str(owner.st_uid), uid=owner.st_uid, gid=owner.st_gid)


def _unprivileged() -> Account:
    try:
        entry = pwd.getpwnam(_UNPRIVILEGED)
    except KeyError:
        raise Unavailable(
            "NoUnprivilegedAccount",
            f"Postgres doesn't run as root, and there is no account {_UNPRIVILEGED!r} to run it as",
        ) from None
    return Account(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid)
