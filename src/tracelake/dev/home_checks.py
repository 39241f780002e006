"""Whether this program can run a stack on a home, said before anything in it is touched."""

from __future__ import annotations

import shutil

from tracelake import __version__
from tracelake.dev.home import Home
from tracelake.dev.home_version import VERSION_FILE, is_older, read_version, refuse_newer
from tracelake.domain.errors import Unavailable

_MIB = 1024 * 1024
_NEW_HOME_BYTES = 256 * _MIB
_KNOWN_HOME_BYTES = 32 * _MIB


def take_over(home: Home, program: str = __version__) -> None:
    """Refuses a home of a newer program, and marks one of an older as this one's."""
    made_by = read_version(home.folder)
    refuse_newer(home.folder, made_by, program)
    if is_older(made_by, program):
        home.write(home.folder / VERSION_FILE, f"{program}\n".encode())


def check_space(home: Home) -> None:
    """A database that runs out of space halfway through its start says so in many lines."""
    free = shutil.disk_usage(home.folder).free
    least = _KNOWN_HOME_BYTES if home.state_cluster.exists() else _NEW_HOME_BYTES
    if free < least:
        raise Unavailable(
            "DiskFull",
            f"only {free // _MIB} MiB are free on the disk of {home.folder}, and {least // _MIB} MiB are needed "
            "to start: free some space, or choose another home with --home",
        )
