"""``ClusterFolder``: the layout of a cluster's folder, its permissions, and the lock for one launcher at a time.

    lock             held (flock) for as long as a launcher uses the folder; the kernel frees it on death
    passwords.json   0600, one random password per role
    port             the last port, so that a restart keeps its DSN
    server.log       the server's output
    owner            the uid that all of the data was transferred to, where root started it
    pgdata/          the data, owned by the server's account

Only ``pgdata`` belongs to the server's account, so a server that root started reads no passwords, and no other
user reaches the data through a folder of mode 0700. Files are replaced by rename: a crash leaves the old or the
new one, and a link planted in ``pgdata`` is never followed.

A new cluster is created entirely or not at all: ``initdb`` works in a staging folder that is renamed once
everything is in place, so a launcher that is killed halfway leaves no half cluster.

``transfer_data`` gives a cluster's data to the account that it runs as from now on. The file ``owner`` is written
last, so an interrupted transfer is repeated by the next start. The previous owner may still have a folder of the
data open, so each folder changes its owner before it is listed, no name is followed, and only files that belonged
to an earlier account of the cluster, under one name alone, are changed: a link to another user's file keeps its
owner.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from tracelake.domain.errors import Conflict, Invalid, Unavailable
from tracelake.durable_files import replace_private, sync_folder
from tracelake.embedded.postgres import account as named_account
from tracelake.embedded.postgres.account import Account, ServerAccount, is_nobody, with_name
from tracelake.embedded.postgres.server import Binaries, data_argument, environment
from tracelake.program_log import CappedLog
from tracelake.sandbox import accounts
from tracelake.trees import remove_if_possible

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 64
"""Maximum depth of nested folders, each of which is held open. Postgres itself makes four."""


class ClusterFolder:
    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.pgdata = self.path / "pgdata"
        self.log = self.path / "server.log"
        self._passwords = self.path / "passwords.json"
        self._port = self.path / "port"
        self._owner = self.path / "owner"
        self._lock: int | None = None

    def acquire(self) -> None:
        """Create the folder if it is missing and take its lock; raise if that isn't possible."""
        try:
            make_private(self.path)
            # Closed on exec: a child that inherited the lock would hold it after this process has died.
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise unusable(self.path, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise Conflict("ClusterInUse", f"another process runs the Postgres in {self.path}") from None
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def staging(self, account: Account | None) -> Path:
        """An empty folder to initialize in; those of launchers that died halfway are removed."""
        for stale in self.path.glob("pgdata.new-*"):
            remove_if_possible(stale)
        made = Path(tempfile.mkdtemp(prefix="pgdata.new-", dir=self.path))
        if account is not None:
            os.chown(made, account.uid, account.gid)
        return made

    def version(self) -> str | None:
        """The major version that made the data; ``None`` when there is none yet."""
        try:
            return (self.pgdata / "PG_VERSION").read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            if self.pgdata.exists():
                raise Invalid(
                    "NotACluster", f"{self.pgdata} exists and holds no Postgres data: move it away"
                ) from None
            return None

    def password(self, role: str) -> str | None:
        return self._read_passwords().get(role)

    def ensure_password(self, role: str) -> str:
        known = self._read_passwords()
        if role not in known:
            known[role] = secrets.token_urlsafe(32)
            replace_private(self._passwords, json.dumps(known).encode())
        return known[role]

    def _read_passwords(self) -> dict[str, str]:
        try:
            parsed = json.loads(self._passwords.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError:
            raise Invalid("ClusterPasswordsDamaged", f"{self._passwords} isn't readable as JSON") from None
        return {str(role): str(password) for role, password in parsed.items()}

    def remembered_port(self) -> int:
        """The port of the last start; 0 when there was none."""
        try:
            port = int(self._port.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return 0
        return port if 0 < port < 65536 else 0

    def remember_port(self, port: int) -> None:
        if port != self.remembered_port():
            replace_private(self._port, f"{port}\n".encode())

    def owner(self) -> int | None:
        try:
            return int(self._owner.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    def remember_owner(self, uid: int) -> None:
        replace_private(self._owner, f"{uid}\n".encode())

    def open_log(self) -> CappedLog:
        """Open the log for the server, whose account may not reach its path.

        Never through a link: root may have been pointed at a folder that another user can write.
        """
        return CappedLog(self.log)


def make_private(folder: Path) -> None:
    """Create the folder and missing parents for their owner alone; an open folder is closed."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    # By descriptor: the folder that was looked at is the one that is closed.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_mode & 0o077 and os.geteuid() in (found.st_uid, 0):
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def unusable(path: Path, error: OSError) -> Unavailable:
    return Unavailable("ClusterFolderUnusable", f"can't keep a Postgres in {path}: {error.strerror or error}")


def transfer_data(folder: ClusterFolder, account: Account) -> None:
    """Give the data to an account. For root, with the folder's lock held and no server running."""
    # A transfer changes the folder itself first, so its owner alone doesn't show that all was transferred.
    if folder.owner() == account.uid == folder.pgdata.lstat().st_uid:
        return
    descriptor = os.open(folder.pgdata, _FOLDER)
    try:
        before = os.fstat(descriptor).st_uid
        _transfer_folder(descriptor, str(folder.pgdata), account, _may_change(before, account.uid))
    finally:
        os.close(descriptor)
    folder.remember_owner(account.uid)


def _may_change(before: int, after: int) -> Callable[[int], bool]:
    known = {0, before, after}
    return lambda uid: uid in known or is_nobody(uid) or accounts.is_ours(uid)


def _transfer_folder(
    descriptor: int, path: str, account: Account, may_change: Callable[[int], bool], depth: int = 0
) -> None:
    if depth > _MAX_DEPTH:
        raise _strange(path, "lies too deep")
    _refuse_strange(os.fstat(descriptor), path, may_change)
    # Before the listing: afterwards the previous owner can't swap an entry any more.
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
                _transfer_folder(inner, below, account, may_change, depth + 1)
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


def initialize(
    folder: ClusterFolder,
    binaries: Binaries,
    server: ServerAccount | None,
    *,
    superuser: str,
    throwaway: bool,
) -> None:
    account = server.account if server else None
    # Stored first: data whose password was never stored couldn't be opened.
    password = folder.ensure_password(superuser)
    staging = folder.staging(account)
    command = [
        *(str(binaries.initdb), "-D", data_argument(staging), "-U", superuser, "--pwfile=/dev/stdin"),
        # The C locale sorts the same on every machine; other collations change with the C library.
        *("--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"),
        *(["--no-sync"] if throwaway else []),
    ]
    named_account.sweep_named_accounts(folder.path)
    if server is None or server.named:
        _run(command, staging, account, password)
    else:
        with_name(server.account, folder.path, lambda: _run(command, staging, account, password))
    staging.rename(folder.pgdata)
    # initdb synced the content; the new name needs a sync of its own.
    if not throwaway:
        sync_folder(folder.path)


def _run(command: list[str], staging: Path, account: Account | None, password: str) -> None:
    stdin = _pipe_with(password + "\n", account)
    try:
        result = subprocess.run(
            command,
            cwd=staging,
            env=environment(),
            stdin=stdin,
            capture_output=True,
            text=True,
            check=False,
            user=account.uid if account else None,
            group=account.gid if account else None,
            # Without this, root's supplementary groups would stay.
            extra_groups=[] if account else None,
            preexec_fn=accounts.prepared_to_leave_keyrings(account.uid if account else None),
        )
    finally:
        os.close(stdin)
    if result.returncode != 0:
        remove_if_possible(staging)
        output = (result.stderr.strip() or result.stdout.strip())[-4096:]
        raise Unavailable("ClusterInitFailed", f"can't make a Postgres in {staging.parent}: {output}")


def _pipe_with(text: str, account: Account | None) -> int:
    # initdb opens its standard input again by path, which needs permission on the pipe itself.
    reader, writer = os.pipe()
    if account is not None:
        os.fchown(reader, account.uid, account.gid)
    # It fits into the pipe's buffer, so this doesn't wait for a reader.
    os.write(writer, text.encode())
    os.close(writer)
    return reader
