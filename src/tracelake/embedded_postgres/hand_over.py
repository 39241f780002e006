"""Handing a cluster's data to the account that it runs as from now on: all of it, or again at the next start.

The folder around the data is root's and says in a file, ``owner``, to whom everything below has been handed; it is
written last, so a hand-over that was interrupted is made again. Who owned the data before may still have a folder
of it open, so each folder changes hands before it is listed, no name is followed, and only what belonged to an
earlier account of the cluster, under one name alone, is touched: a link to a file of somebody else's that was put
there doesn't change hands.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from tracelake import accounts
from tracelake.domain.errors import Unavailable
from tracelake.embedded_postgres.account import Account, is_nobody
from tracelake.embedded_postgres.folder import ClusterFolder

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 64
"""Of folders in each other, each of which is held open. Postgres itself makes four."""


def hand_over(folder: ClusterFolder, account: Account) -> None:
    """For root, with the folder's lock held and no server running."""
    if folder.owner() == account.uid == folder.pgdata.lstat().st_uid:
        return
    descriptor = os.open(folder.pgdata, _FOLDER)
    try:
        before = os.fstat(descriptor).st_uid
        _hand_over_folder(descriptor, str(folder.pgdata), account, _may_change(before, account.uid))
    finally:
        os.close(descriptor)
    folder.remember_owner(account.uid)


def _may_change(before: int, after: int) -> Callable[[int], bool]:
    known = {0, before, after}
    return lambda uid: uid in known or is_nobody(uid) or accounts.is_ours(uid)


def _hand_over_folder(
    descriptor: int, path: str, account: Account, may_change: Callable[[int], bool], depth: int = 0
) -> None:
    if depth > _MAX_DEPTH:
        raise _strange(path, "lies too deep")
    _refuse_strange(os.fstat(descriptor), path, may_change)
    os.fchown(descriptor, account.uid, account.gid)
    os.fchmod(descriptor, 0o700)
    with os.scandir(descriptor) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        below = f"{path}/{name}"
        if stat.S_ISDIR(found.st_mode):
            inner = os.open(name, _FOLDER, dir_fd=descriptor)
            try:
                _hand_over_folder(inner, below, account, may_change, depth + 1)
            finally:
                os.close(inner)
            continue
        _refuse_strange(found, below, may_change)
        if not stat.S_ISLNK(found.st_mode) and found.st_nlink != 1:
            raise _strange(below, "has several names")
        os.chown(name, account.uid, account.gid, dir_fd=descriptor, follow_symlinks=False)


def _refuse_strange(found: os.stat_result, path: str, may_change: Callable[[int], bool]) -> None:
    if not may_change(found.st_uid):
        raise _strange(path, f"belongs to uid {found.st_uid}")


def _strange(path: str, why: str) -> Unavailable:
    return Unavailable("ClusterOwnerUnclear", f"{path} {why}: it isn't the cluster's own, remove it")
