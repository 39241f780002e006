"""What operators see of the file system, decided as an ordered list of mounts.

Nothing of it can be written to, but for what is said to be writable: an operator changes neither the interpreter
that its wrapper runs on, nor what its user may write elsewhere.

The installation's home, and every folder with credentials, is covered by an empty file system in which only what
operators need appears again at its own path: the objects, their work folder, the interpreter. The same is done
where the operators' user can't reach what it needs, such as an interpreter below a home directory that is closed
to others: the closed folder is covered by a skeleton that leads there and to nothing else.

    Cover   an empty folder takes the place of this one
    Show    what was at this path before appears again, to be read, or ``writable``
    Blank   an empty file takes the place of this one

Outer paths come before inner ones, so a credential within a folder that is shown is covered again. A file that is
blanked on its own must be changed in place: when another one is moved over it, the kernel takes the cover away.
Folders that are covered have no such weakness; a home is one.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tracelake
from tracelake.accounts import Account


@dataclass(frozen=True, slots=True)
class Cover:
    """``scratch`` is empty too, but anybody may write there."""

    path: Path
    scratch: bool = False


@dataclass(frozen=True, slots=True)
class Show:
    path: Path
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Blank:
    path: Path


Step = Cover | Show | Blank


def plan_view(
    *,
    covered: Iterable[Path],
    blanked: Iterable[Path],
    shown: Iterable[Path],
    closed: Callable[[Path], bool],
    scratch: Iterable[Path] = (),
    writable: Iterable[Path] = (),
) -> list[Step]:
    """``closed`` tells whether the operators' user is kept from entering a folder. Paths are absolute."""
    empty = set(scratch)
    covers = {*covered, *empty}
    changeable = set(writable)
    shows = {*shown, *changeable} - covers
    covers |= {folder for path in shows for folder in path.parents if closed(folder)}
    wanted: list[Step] = [
        *(Cover(path, scratch=path in empty) for path in covers),
        *(Show(path, writable=path in changeable) for path in shows - covers),
    ]
    steps: list[Step] = []
    for step in sorted(wanted, key=lambda each: (len(each.path.parts), each.path)):
        around = _enclosing(step.path, steps)
        if isinstance(step, Show) == isinstance(around, Cover) or _opens(step, around):
            steps.append(step)
    bare = [path for path in sorted(set(blanked)) if not isinstance(_enclosing(path, steps), Cover)]
    return [*steps, *(Blank(path) for path in bare)]


def split(steps: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """What all processes see alike, and what is made anew for each: scratch folders and what is shown in them."""
    scratch = [step.path for step in steps if isinstance(step, Cover) and step.scratch]
    own = [step for step in steps if any(step.path.is_relative_to(path) for path in scratch)]
    return [step for step in steps if step not in own], own


def _opens(step: Step, around: Step | None) -> bool:
    """A place to write in, where all around it is to be read."""
    return isinstance(step, Show) and step.writable and not (isinstance(around, Show) and around.writable)


def _enclosing(path: Path, steps: Sequence[Step]) -> Step | None:
    """The innermost step that decides about this path; they come in order of depth."""
    return next((step for step in reversed(steps) if path.is_relative_to(step.path)), None)


def closed_to(account: Account | None) -> Callable[[Path], bool]:
    """Without supplementary groups, which operators don't keep. None stands for who we are."""

    def closed(folder: Path) -> bool:
        if account is None:
            return not os.access(folder, os.X_OK)
        found = folder.stat()
        if found.st_uid == account.uid:
            return not found.st_mode & stat.S_IXUSR
        if found.st_gid == account.gid:
            return not found.st_mode & stat.S_IXGRP
        return not found.st_mode & stat.S_IXOTH

    return closed


def interpreter_paths() -> list[Path]:
    """Everything that this interpreter may still load something from."""
    places = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, *sys.path]
    places += [path for path in (sys.executable, tracelake.__file__) if path]
    return [Path(place) for place in places if os.path.isabs(place) and os.path.exists(place)]


def with_targets(paths: Iterable[Path]) -> list[Path]:
    """The paths that exist, as they are written and as links lead: each may lie below another cover."""
    there = [Path(os.path.abspath(path)) for path in paths if path.exists()]
    return sorted({*there, *(Path(os.path.realpath(path)) for path in there)})
