"""A home: the folder in which an installation stores everything that it has on one machine.

home/
  postgres/state, postgres/data   embedded clusters
  keys/                           signing keys of task tokens
  installation.json               the installation that this home belongs to (tokens/home_copies.py)
  secrets.json                    the first user's token and the queue's password, 0600
  data_secrets.json               the passwords of the data database's roles that write, 0600
  reading_secrets.json            the password of the role that reads, 0600
  query_secrets.json              the passwords of the Query Service's roles in the state database, 0600
  worker_tokens                   one token per line, read again when it changes
  objects/                        Parquet and artifacts
  logs/                           one file per process; tasks/ has one per attempt
  work/                           folders of running workers
  VERSION                         the newest program that ran a stack here (dev/home_checks.py)
  lock                            held by the stack that runs here, with its process id
  dev.json, dispatcher.json       addresses of the running stack (dev/handle.py)
  dispatchers/                    the same of each running Dispatcher
  query.json                      the same of the Query Service
  sink.pid, delivery.pid, worker-*.pid   ids of the processes that take work here

Only its owner may enter it: it has mode 0700, and an open one is closed. A home of another user is refused, also by
root.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from tracelake.domain.errors import Conflict, Invalid, Unavailable
from tracelake.durable_files import create_private, replace_private
from tracelake.tokens.home_copies import WORKER_TOKENS_FILE, HomeCopies, HomeSecrets, QuerySecrets
from tracelake.tokens.opaque_tokens import create_token_file, new_user_token
from tracelake.tokens.private_files import read_private

# Shared folders: closing one would lock other users and programs out of their files.
_SHARED_FOLDERS = frozenset(
    (
        *("/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64"),
        *("/media", "/mnt", "/opt", "/proc", "/run", "/sbin", "/srv", "/sys"),
        *("/tmp", "/usr", "/usr/bin", "/usr/lib", "/usr/local", "/usr/share", "/var", "/var/cache"),
        *("/var/lib", "/var/log", "/var/run", "/var/spool", "/var/tmp"),
    )
)
STATE_DATABASE = "tracelake_state"
QUEUE_DATABASE = "tracelake_queue"
DATA_DATABASE = "tracelake_data"
_DATA_SECRETS = "data_secrets.json"
_READING_SECRETS = "reading_secrets.json"


class DataSecrets(msgspec.Struct, frozen=True):
    writer_password: str

    def __repr__(self) -> str:
        return "DataSecrets(…)"


class ReadingSecrets(msgspec.Struct, frozen=True):
    """In a file of its own, since homes that are older than the role get one too."""

    reader_password: str

    def __repr__(self) -> str:
        return "ReadingSecrets(…)"


Secrets = TypeVar("Secrets", HomeSecrets, DataSecrets, ReadingSecrets, QuerySecrets)


class Home:
    """Created on first use; an existing folder is closed to others."""

    def __init__(self, folder: Path) -> None:
        self.folder = make_home(folder)
        self.copies = HomeCopies(self.folder)

    @property
    def state_cluster(self) -> Path:
        return self.folder / "postgres" / "state"

    @property
    def data_cluster(self) -> Path:
        return self.folder / "postgres" / "data"

    @property
    def keys(self) -> Path:
        return self.folder / "keys"

    @property
    def objects(self) -> Path:
        return self.folder / "objects"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def make_objects(self) -> None:
        """Create the folder of objects before any process that reads there: operators run under accounts that
        couldn't create it. Parts of it are mounted for them, so its own mode lets them in; the home's mode keeps
        others out."""
        with _writing(self.objects):
            self.objects.mkdir(mode=0o755, exist_ok=True)

    @property
    def worker_tokens(self) -> Path:
        path = self.folder / WORKER_TOKENS_FILE
        with _writing(path):
            if not path.exists():
                self.copies.disown_worker_tokens()
            create_token_file(path)
        return path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the home's lock: one stack at a time. The kernel frees the lock of a killed one."""
        try:
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Unavailable("HomeUnusable", f"can't lock {self.folder}: {error.strerror}") from None
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Conflict(
                    "HomeInUse",
                    f"a stack runs on {self.folder} already{_holder(lock)}; choose another with --home",
                ) from None
            # Only the holder signs: the id of a refused stack would mislead the next one.
            _sign(lock)
            yield
        finally:
            os.close(lock)

    def write(self, path: Path, content: bytes, *, replace: bool = True) -> None:
        """Write a file atomically, for the owner alone; without ``replace``, an existing one stays."""
        with _writing(path):
            if replace:
                replace_private(path, content)
            elif not path.exists():
                create_private(path, content)

    def secrets(self) -> HomeSecrets:
        """Generated at the first start, and the same from then on."""
        return self._kept("secrets.json", lambda: HomeSecrets(new_user_token()[0], secrets.token_urlsafe(24)))

    def data_secrets(self) -> DataSecrets:
        return self._kept(_DATA_SECRETS, lambda: DataSecrets(secrets.token_urlsafe(24)))

    def reading_secrets(self) -> ReadingSecrets:
        return self._kept(_READING_SECRETS, lambda: ReadingSecrets(secrets.token_urlsafe(24)))

    def keep_data_secrets(self, writer_password: str, reader_password: str) -> None:
        """Replace the home's copies of the passwords where they differ from the data database's."""
        for name, mine, theirs in (
            (_DATA_SECRETS, self.data_secrets(), DataSecrets(writer_password)),
            (_READING_SECRETS, self.reading_secrets(), ReadingSecrets(reader_password)),
        ):
            if mine != theirs:
                self.write(self.folder / name, msgspec.json.encode(theirs))

    def forget_data_secrets(self) -> None:
        """Delete the passwords; new ones are generated on demand."""
        for name in (_DATA_SECRETS, _READING_SECRETS):
            with _writing(self.folder / name):
                (self.folder / name).unlink(missing_ok=True)

    def query_secrets(self) -> QuerySecrets:
        made = secrets.token_urlsafe
        return self._kept("query_secrets.json", lambda: QuerySecrets(made(24), made(24)))

    def _kept(self, name: str, make: Callable[[], Secrets]) -> Secrets:
        path = self.folder / name
        made = make()
        self.write(path, msgspec.json.encode(made), replace=False)
        # Another process may have been first: its secrets count, so the file is read in any case.
        try:
            return msgspec.json.decode(read_private(path), type=type(made))
        except msgspec.DecodeError as error:
            raise Invalid("HomeDamaged", f"{path} can't be read: {error}") from None


def make_home(folder: Path) -> Path:
    """Create the folder if it is missing, and close it to everyone but its owner."""
    home = folder.absolute()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise Unavailable(
            "HomeUnusable", f"can't make the home {home}: {why}; choose another with --home"
        ) from None
    if not os.access(home, os.R_OK | os.W_OK | os.X_OK):
        raise Unavailable(
            "HomeUnusable",
            f"can't write in the home {home}: change its permissions, or choose another with --home",
        )
    found = home.stat()
    if found.st_uid != os.geteuid():
        raise Unavailable(
            "HomeForeign",
            f"the home {home} belongs to uid {found.st_uid}, who could read and replace its files,"
            f" and this is uid {os.geteuid()}: run as its owner, or choose a folder of your own with --home",
        )
    if found.st_mode & 0o077:
        _close(home, found)
    return home


def _close(home: Path, found: os.stat_result) -> None:
    """Others could read the home's files, or replace them."""
    mode = f"{stat.S_IMODE(found.st_mode):o}"
    # A folder with the sticky bit is shared on purpose, as /tmp is.
    if found.st_mode & stat.S_ISVTX or str(home.resolve()) in _SHARED_FOLDERS or _is_login_folder(home):
        raise Unavailable(
            "HomeShared",
            f"{home} (mode {mode}) is used by others, and a home is for its owner alone: "
            f"choose a folder in it with --home, such as {home / '.tracelake'}",
        )
    try:
        home.chmod(0o700)
    except OSError:
        raise Unavailable(
            "HomeShared",
            f"the home {home} belongs to uid {found.st_uid} and has mode {mode}, so that others get in: "
            f"choose a folder of your own with --home, such as {home / '.tracelake'}",
        ) from None


def _is_login_folder(folder: Path) -> bool:
    # Path.home() raises RuntimeError for a user without a login folder.
    with suppress(RuntimeError, OSError):
        return folder.samefile(Path.home())
    return False


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` into one that names the file and a remedy."""
    try:
        yield
    except OSError as error:
        raise Unavailable(
            "HomeUnusable", f"can't write {path}: {error.strerror}; make room for it, or choose another home"
        ) from None


def _sign(lock: int) -> None:
    """Write our process id into the lock file, for the error of a second stack; the lock doesn't depend on it."""
    with suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _holder(lock: int) -> str:
    with suppress(OSError):
        if (pid := os.pread(lock, 20, 0).strip()).isdigit():
            return f" (process {pid.decode()})"
    return ""
