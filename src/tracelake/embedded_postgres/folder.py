"""A cluster's folder: what lies where, who may read it, and that one launcher at a time uses it.

    lock             held (flock) for as long as a launcher uses the folder; the kernel frees it on death
    passwords.json   0600, one random password per role
    port             the last port, so that a restart keeps its DSN
    server.log       what the server says
    owner            the uid that all of the data was handed to, where root started it
    pgdata/          the data, owned by the server's account

Only ``pgdata`` belongs to the server's account, so a server that root started reads no passwords, and nobody
reaches the data through a folder of mode 0700. Files are replaced by rename: a crash leaves the old or the new
one, and a link planted in ``pgdata`` is never followed.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import tempfile
from pathlib import Path

from tracelake.capped_log import CappedLog
from tracelake.domain.errors import Conflict, Invalid, Unavailable
from tracelake.embedded_postgres.account import Account
from tracelake.trees import remove_if_possible


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
        """Make the folder if need be and take its lock, or say who can't."""
        try:
            make_private(self.path)
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
        """An empty folder to initialize in; those of launchers that died halfway are swept away."""
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

    def replace(self, target: Path, text: str, account: Account | None = None) -> None:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                if account is not None:
                    os.fchown(file.fileno(), account.uid, account.gid)
                os.fsync(file.fileno())
            os.rename(name, target)
        except BaseException:
            os.unlink(name)
            raise

    def password(self, role: str) -> str | None:
        return self._read_passwords().get(role)

    def ensure_password(self, role: str) -> str:
        known = self._read_passwords()
        if role not in known:
            known[role] = secrets.token_urlsafe(32)
            self.replace(self._passwords, json.dumps(known))
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
            self.replace(self._port, f"{port}\n")

    def owner(self) -> int | None:
        try:
            return int(self._owner.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    def remember_owner(self, uid: int) -> None:
        self.replace(self._owner, f"{uid}\n")

    def open_log(self) -> CappedLog:
        """The log, to be handed over open: the server's account may not reach its path.

        Never through a link: root may have been pointed at a folder that somebody else can write.
        """
        return CappedLog(self.log)


def make_private(folder: Path) -> None:
    """The folder and those above it that are missing, for their owner alone; one that was open is closed."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_mode & 0o077 and os.geteuid() in (found.st_uid, 0):
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def unusable(path: Path, error: OSError) -> Unavailable:
    return Unavailable("ClusterFolderUnusable", f"can't keep a Postgres in {path}: {error.strerror or error}")
