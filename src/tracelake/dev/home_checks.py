"""Checks that this program can run a stack on a home, before it changes anything there.

The file ``VERSION`` names the newest program that ran a stack on the home. A home of an older program is adopted,
also one from before there was such a file: databases are migrated when they are opened. A home of a newer program
is refused, because that program may store things in ways that this one doesn't know. Versions with the same first
two numbers can read each other's homes.

``tracelake dev`` refuses to start with too little disk space, and ``tracelake doctor`` warns earlier. The doctor
runs where no extra is installed, so this module imports none.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tracelake import __version__
from tracelake.domain.errors import Conflict, Invalid, Unavailable

if TYPE_CHECKING:
    from tracelake.dev.home import Home

VERSION_FILE = "VERSION"
_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(\.[0-9A-Za-z.+-]{1,100})?", re.ASCII)
MIB = 1024 * 1024
GIB = 1024 * MIB
NEW_HOME_BYTES = 256 * MIB
KNOWN_HOME_BYTES = 32 * MIB
SCARCE_BYTES = 5 * GIB
"""A stack starts with less, but its tables soon need this much."""


def read_version(folder: Path) -> str | None:
    path = folder / VERSION_FILE
    try:
        version = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Invalid("HomeDamaged", f"can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        version = ""
    if _VERSION.fullmatch(version) is None:
        raise Invalid("HomeDamaged", f"{path} doesn't name a version of Tracelake: is {folder} a home?")
    return version


def refuse_newer(folder: Path, made_by: str | None, program: str = __version__) -> None:
    if made_by is not None and _series(made_by) > _series(program):
        raise Conflict(
            "HomeIsNewer",
            f"the home {folder} was used by Tracelake {made_by}, and this is {program}: "
            "upgrade this program, or choose another home with --home",
        )


def is_older(made_by: str | None, program: str = __version__) -> bool:
    """Whether the version in the home is to be replaced by the program's."""
    return made_by is None or _series(made_by) < _series(program)


def _series(version: str) -> tuple[int, int]:
    found = _VERSION.fullmatch(version)
    assert found is not None
    return int(found[1]), int(found[2])


def needed_bytes(state_cluster: Path) -> int:
    """Free bytes that a start needs; a new home has its databases still to be created."""
    return KNOWN_HOME_BYTES if state_cluster.exists() else NEW_HOME_BYTES


def take_over(home: Home, program: str = __version__) -> None:
    """Refuse a home of a newer program; write this program's version into one of an older program."""
    made_by = read_version(home.folder)
    refuse_newer(home.folder, made_by, program)
    if is_older(made_by, program):
        home.write(home.folder / VERSION_FILE, f"{program}\n".encode())


def check_space(home: Home) -> None:
    """Refuse to start on a full disk: a database that runs out of space during its start fails in many lines."""
    free = shutil.disk_usage(home.folder).free
    least = needed_bytes(home.state_cluster)
    if free < least:
        raise Unavailable(
            "DiskFull",
            f"only {free // MIB} MiB are free on the disk of {home.folder}, and {least // MIB} MiB are needed "
            "to start: free some space, or choose another home with --home",
        )
