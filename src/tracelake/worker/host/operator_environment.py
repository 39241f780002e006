"""What surrounds operator code: its few variables, and proof that the view is what it claims to be.

The proof is made under the operators' own identity, by trying: what they need can be read, what holds
credentials can't. Root refuses to go on otherwise. A user without namespaces has no way to keep their own files
from their own operators; that is said, and not hidden.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tracelake import keyrings
from tracelake.accounts import is_ours
from tracelake.domain.errors import Invalid
from tracelake.trees import folders_of
from tracelake.worker.host.private_view import interpreter_paths
from tracelake.worker.host.protocol import Setup

_PATH = "/usr/local/bin:/usr/bin:/bin"
_NO_FILTER = (
    "system calls can't be filtered on this machine: operators can use the kernel's keyrings, which others of the"
    " same user find, and make readers of a file wait"
)


def clear_environment() -> None:
    os.environ.clear()
    os.environ.update(PATH=_PATH, LANG="C.UTF-8", TZ="UTC")


def set_environment(folder: str) -> None:
    """All that an operator process inherits; an attempt adds its own."""
    clear_environment()
    os.environ.update(HOME=folder, TMPDIR=os.path.join(folder, "tmp"), PYTHONUNBUFFERED="1")
    os.chdir(folder)


def needed_paths(setup: Setup) -> list[Path]:
    """What was asked for and isn't there is missed by who looks for it, with a better word than ours."""
    shown = [Path(path) for path in setup.shown if os.path.exists(path)]
    return [*interpreter_paths(), Path(setup.object_root), Path(setup.folder), *shown]


def verify(setup: Setup, needed: Sequence[Path]) -> list[str]:
    """Warnings; raises when operators wouldn't work, or would see what they mustn't."""
    account = setup.account
    unreachable = [str(path) for path in needed if not _readable(path)]
    if unreachable:
        user = account.name if account is not None else "this user"
        remedy = "make it readable for others" if setup.namespaces else "allow namespaces, or move it"
        raise Invalid(
            "OperatorsCannotRead",
            f"operators run as {user}, who can't read {unreachable[0]}; {remedy}, or run the worker as a user"
            " that isn't root",
        )
    meant = (setup.object_root, setup.work_folder, *map(str, needed))
    exposed = [path for place in _secrets(setup) if (path := _leaking(place, meant)) is not None]
    # The filter of system calls is one: where keyrings are out of reach, leases on files are as well.
    warnings = [_NO_FILTER] if keyrings.can_be_used() else []
    if not exposed:
        return warnings
    if account is not None or setup.namespaces:
        raise Invalid(
            "OperatorsWouldReadSecrets",
            f"operators would be able to read {exposed[0]}; close it to other users, or allow namespaces",
        )
    exposure = f"operators run as the worker's own user without a private view: they can read {exposed[0]}"
    return [*warnings, exposure]


def describe(setup: Setup) -> str:
    account = setup.account
    if account is None:
        who = "operators run as this user"
    elif is_ours(account.uid):
        who = f"operators run as accounts of their own (the first is uid {account.uid})"
    else:
        who = f"operators run as {account.name} (uid {account.uid})"
    if setup.namespaces:
        return f"{who}, each in a private view: files, processes and shared memory of its own"
    return f"{who}, without a private view: they see the machine's processes and every file open to that user"


def _secrets(setup: Setup) -> list[Path]:
    return [Path(path) for path in ([setup.home] if setup.home else []) + setup.hidden]


def _readable(path: Path) -> bool:
    wanted = os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK
    return os.access(path, wanted)


def _leaking(place: Path, meant_for_operators: Iterable[str]) -> Path | None:
    """A file of this place, or below it, whose content can be read."""
    if not os.path.isdir(place):
        return place if _has_content(place) else None
    spared = {os.path.realpath(path) for path in meant_for_operators}
    for folder, names in folders_of(place, spared):
        for name in names:
            if _has_content(path := Path(folder, name)):
                return path
    return None


def _has_content(path: Path) -> bool:
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return bool(file.read(1))
    except OSError:
        return False
