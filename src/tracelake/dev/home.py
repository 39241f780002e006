"""A home: the folder in which one installation on one machine keeps everything it has.

home/
  postgres/state, postgres/data   embedded clusters
  keys/                           signing keys of task tokens
  installation.json               which installation this home belongs to (tokens/home_copies.py)
  secrets.json                    the first user's token and the queue's password, 0600
  data_secrets.json               the passwords of the data database's roles that write, 0600
  reading_secrets.json            the password of the one that reads, 0600
  query_secrets.json              the passwords of the Query Service's roles in the state database, 0600
  worker_tokens                   one token per line, read again when it changes
  objects/                        Parquet and artifacts
  logs/                           one file per process; tasks/ has one per attempt
  work/                           what workers need while they run
  VERSION                         the newest program that ran a stack here
  lock                            held by the stack that runs here, with its process id
  dev.json, dispatcher.json       how to reach what runs here, while it does
  dispatchers/                    the same of each Dispatcher that runs here, and who is alive
  query.json                      the same of the Query Service
  sink.pid, worker-*.pid          the processes that take work here, while they do

It is for its owner alone, mode 0700, and closed if it was open before. One that belongs to somebody else is
refused, also by root.
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
from tracelake.tokens.home_copies import WORKER_TOKENS_FILE, HomeCopies, HomeSecrets, QuerySecrets
from tracelake.tokens.private_files import create_private, read_private
from tracelake.tokens.user_tokens import new_token
from tracelake.tokens.worker_tokens import create_token_file

# Closing one of these would lock the machine's other users and programs out of their own things.
_EVERYBODYS = frozenset(
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
QUEUE_ROLE = "tracelake_queue"
"""What workers log in to the queue's database as; it may do nothing else."""

_DATA_SECRETS = "data_secrets.json"
_READING_SECRETS = "reading_secrets.json"


class DataSecrets(msgspec.Struct, frozen=True):
    writer_password: str

    def __repr__(self) -> str:
        return "DataSecrets(…)"


class ReadingSecrets(msgspec.Struct, frozen=True):
    """A file of its own: homes that are older than the role get one too."""

    reader_password: str

    def __repr__(self) -> str:
        return "ReadingSecrets(…)"


Secrets = TypeVar("Secrets", HomeSecrets, DataSecrets, ReadingSecrets, QuerySecrets)


class Home:
    """Made on first use; an existing folder will do, whatever its mode."""

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
        """Before anybody is started who reads there: operators don't run as those who could make it. They are shown
        what is in it, so its own mode lets them in; the home's keeps everybody else out."""
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
        """One stack at a time; the kernel frees the lock of one that was killed."""
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
            _sign(lock)
            yield
        finally:
            os.close(lock)

    def write(self, path: Path, content: bytes, *, replace: bool = True) -> None:
        """Whole or not at all, for the owner alone; one that is there stays without ``replace``."""
        with _writing(path):
            if replace:
                new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
                create_private(new, content)
                new.replace(path)
            elif not path.exists():
                create_private(path, content)

    def secrets(self) -> HomeSecrets:
        """Made at first start, the same ever after."""
        return self._kept("secrets.json", lambda: HomeSecrets(new_token()[0], secrets.token_urlsafe(24)))

    def data_secrets(self) -> DataSecrets:
        return self._kept(_DATA_SECRETS, lambda: DataSecrets(secrets.token_urlsafe(24)))

    def reading_secrets(self) -> ReadingSecrets:
        return self._kept(_READING_SECRETS, lambda: ReadingSecrets(secrets.token_urlsafe(24)))

    def keep_data_secrets(self, writer_password: str, reader_password: str) -> None:
        """The data database's own: a copy that differs follows it."""
        for name, mine, theirs in (
            (_DATA_SECRETS, self.data_secrets(), DataSecrets(writer_password)),
            (_READING_SECRETS, self.reading_secrets(), ReadingSecrets(reader_password)),
        ):
            if mine != theirs:
                self.write(self.folder / name, msgspec.json.encode(theirs))

    def forget_data_secrets(self) -> None:
        """New ones are made when they are asked for."""
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
        try:
            return msgspec.json.decode(read_private(path), type=type(made))
        except msgspec.DecodeError as error:
            raise Invalid("HomeDamaged", f"{path} can't be read: {error}") from None


def make_home(folder: Path) -> Path:
    """The folder, there and for its owner alone."""
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
            f"the home {home} belongs to uid {found.st_uid}, who could read and replace what is kept in it,"
            f" and this is uid {os.geteuid()}: run as its owner, or choose a folder of your own with --home",
        )
    if found.st_mode & 0o077:
        _close(home, found)
    return home


def _close(home: Path, found: os.stat_result) -> None:
    """Others could read what is kept in it, or put something of theirs in its place."""
    mode = f"{stat.S_IMODE(found.st_mode):o}"
    if found.st_mode & stat.S_ISVTX or str(home.resolve()) in _EVERYBODYS or _is_login_folder(home):
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
    with suppress(RuntimeError, OSError):
        return folder.samefile(Path.home())
    return False


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """A full disk says neither what was written nor what to do."""
    try:
        yield
    except OSError as error:
        raise Unavailable(
            "HomeUnusable", f"can't write {path}: {error.strerror}; make room for it, or choose another home"
        ) from None


def _sign(lock: int) -> None:
    """For whoever finds the home in use; that it is doesn't depend on it."""
    with suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _holder(lock: int) -> str:
    with suppress(OSError):
        if (said := os.pread(lock, 20, 0).strip()).isdigit():
            return f" (process {said.decode()})"
    return ""
