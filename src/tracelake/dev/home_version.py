"""Which program a home belongs to: the file ``VERSION`` names the newest one that ran a stack on it.

A home of an older program is taken over, as are those from before there was such a file: databases are migrated
when they are opened. One of a newer program, which may keep things in ways that this one doesn't know, is refused.
What changes between versions with the same first two numbers can be read by both.
"""

from __future__ import annotations

import re
from pathlib import Path

from tracelake import __version__
from tracelake.domain.errors import Conflict, Invalid

VERSION_FILE = "VERSION"
_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(\.[0-9A-Za-z.+-]{1,100})?", re.ASCII)


def read_version(folder: Path) -> str | None:
    path = folder / VERSION_FILE
    try:
        said = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Invalid("HomeDamaged", f"can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        said = ""
    if _VERSION.fullmatch(said) is None:
        raise Invalid("HomeDamaged", f"{path} doesn't name a version of Tracelake: is {folder} a home?")
    return said


def refuse_newer(folder: Path, made_by: str | None, program: str = __version__) -> None:
    if made_by is not None and _series(made_by) > _series(program):
        raise Conflict(
            "HomeIsNewer",
            f"the home {folder} was used by Tracelake {made_by}, and this is {program}: "
            "upgrade this program, or choose another home with --home",
        )


def is_older(made_by: str | None, program: str = __version__) -> bool:
    """Whether the program is to be named in its place."""
    return made_by is None or _series(made_by) < _series(program)


def _series(version: str) -> tuple[int, int]:
    found = _VERSION.fullmatch(version)
    assert found is not None
    return int(found[1]), int(found[2])
