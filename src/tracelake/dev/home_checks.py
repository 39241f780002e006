"""Whether this program can run a stack on a home, said before anything in it is touched."""

from __future__ import annotations

import shutil

from tracelake import __version__
from tracelake.dev.disk_space import MIB, needed_bytes
from tracelake.dev.home import Home
from tracelake.dev.home_version import VERSION_FILE, is_older, read_version, refuse_newer
from tracelake.domain.errors import Unavailable


def take_over(home: Home, program: str = __version__) -> None:
    """Refuses a home of a newer program, and marks one of an older as this one's."""
    made_by = read_version(home.folder)
    refuse_newer(home.folder, made_by, program)
    if is_older(made_by, program):
        home.write(home.folder / VERSION_FILE, f"{program}\n".encode())


def check_space(home: Home) -> None:
    """A database that runs out of space halfway through its start says so in many lines."""
    free = shutil.disk_usage(home.folder).free
    least = needed_bytes(home.state_cluster)
    if free < least:
        raise Unavailable(
            "DiskFull",
            f"only {free // MIB} MiB are free on the disk of {home.folder}, and {least // MIB} MiB are needed "
            "to start: free some space, or choose another home with --home",
        )
