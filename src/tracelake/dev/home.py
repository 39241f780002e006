"""A home: the folder in which one installation on one machine keeps everything it has.

home/
  postgres/state, postgres/data   embedded clusters
  keys/                           signing keys of task tokens
  secrets.json                    the first user's token and the queue's password, 0600
  data_secrets.json               the passwords of the data database's roles that write, 0600
  reading_secrets.json            the password of the one that reads, 0600
  worker_tokens                   one token per line, read again when it changes
  objects/                        Parquet and artifacts
  logs/                           one file per process; tasks/ has one per attempt
  work/                           what workers need while they run
  lock                            held by the stack that runs here
  dev.json, dispatcher.json       how to reach what runs here, while it does
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from tracelake.domain.errors import Conflict, Invalid, Unavailable
from tracelake.tokens.private_files import create_private, read_private
from tracelake.tokens.user_tokens import new_token
from tracelake.tokens.worker_tokens import create_token_file

STATE_DATABASE = "tracelake_state"
QUEUE_DATABASE = "tracelake_queue"
DATA_DATABASE = "tracelake_data"
QUEUE_ROLE = "tracelake_queue"
"""What workers log in to the queue's database as; it may do nothing else."""


class HomeSecrets(msgspec.Struct, frozen=True):
    user_token: str
    queue_password: str

    def __repr__(self) -> str:
        return "HomeSecrets(…)"


class DataSecrets(msgspec.Struct, frozen=True):
    staging_password: str
    writer_password: str

    def __repr__(self) -> str:
        return "DataSecrets(…)"


class ReadingSecrets(msgspec.Struct, frozen=True):
    """A file of its own: homes that are older than the role get one too."""

    reader_password: str

    def __repr__(self) -> str:
        return "ReadingSecrets(…)"


Secrets = TypeVar("Secrets", HomeSecrets, DataSecrets, ReadingSecrets)


class Home:
    """Made on first use; an existing empty folder will do, whatever its mode."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(
                "HomeUnusable", f"can't make the home {self.folder}: {error.strerror}"
            ) from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise Unavailable("HomeUnusable", f"can't write in the home {self.folder}")

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

    @property
    def worker_tokens(self) -> Path:
        path = self.folder / "worker_tokens"
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
                raise Conflict("HomeInUse", f"a stack runs on {self.folder} already") from None
            yield
        finally:
            os.close(lock)

    def secrets(self) -> HomeSecrets:
        """Made at first start, the same ever after."""
        return self._kept("secrets.json", lambda: HomeSecrets(new_token()[0], secrets.token_urlsafe(24)))

    def data_secrets(self) -> DataSecrets:
        made = secrets.token_urlsafe
        return self._kept("data_secrets.json", lambda: DataSecrets(made(24), made(24)))

    def reading_secrets(self) -> ReadingSecrets:
        return self._kept("reading_secrets.json", lambda: ReadingSecrets(secrets.token_urlsafe(24)))

    def _kept(self, name: str, make: Callable[[], Secrets]) -> Secrets:
        path = self.folder / name
        made = make()
        if not path.exists():
            create_private(path, msgspec.json.encode(made))
        try:
            return msgspec.json.decode(read_private(path), type=type(made))
        except msgspec.DecodeError as error:
            raise Invalid("HomeDamaged", f"{path} can't be read: {error}") from None
