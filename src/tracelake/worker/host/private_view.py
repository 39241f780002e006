"""The file system that operators see, decided as an ordered list of mounts.

It is read-only except for paths marked writable: an operator changes neither the interpreter that its wrapper
runs on, nor files that its user may write elsewhere. The installation's home, and every folder with credentials,
is covered by an empty file system in which only the paths that operators need appear again: the objects, their
work folder, the interpreter. The same is done for closed folders above a needed path, such as a home directory
that other users can't enter: the closed folder is covered by a skeleton that leads to that path and to nothing
else.

    Cover   an empty folder takes the place of this one
    Show    the previous content of this path appears again, read-only or ``writable``
    Blank   an empty file takes the place of this one

Outer paths come before inner ones, so a credential within a shown folder is covered again. A file that is blanked
on its own must be changed in place: when another file is moved over it, the kernel removes the cover. Covered
folders, such as a home, have no such weakness.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tracelake
from tracelake.sandbox.accounts import Account


@dataclass(frozen=True, slots=True)
class Cover:
    """An empty folder; every user may write to a ``scratch`` one."""

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
    """``closed`` decides whether the operators' user is kept from entering a folder. Paths are absolute."""
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
        # A path is shown only where a cover hides it, and covered only where none does yet. The exception is
        # a writable place within a read-only one.
        if isinstance(step, Show) == isinstance(around, Cover) or _opens(step, around):
            steps.append(step)
    bare = [path for path in sorted(set(blanked)) if not isinstance(_enclosing(path, steps), Cover)]
    return [*steps, *(Blank(path) for path in bare)]


def split(steps: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """The steps that all processes share, and those repeated for each: scratch folders and the paths shown in
    them."""
    scratch = [step.path for step in steps if isinstance(step, Cover) and step.scratch]
    own = [step for step in steps if any(step.path.is_relative_to(path) for path in scratch)]
    return [step for step in steps if step not in own], own


def _opens(step: Step, around: Step | None) -> bool:
    """Whether the step makes a writable place within a read-only one."""
    return isinstance(step, Show) and step.writable and not (isinstance(around, Show) and around.writable)


def _enclosing(path: Path, steps: Sequence[Step]) -> Step | None:
    """The innermost step that decides about this path; steps are ordered by depth."""
    return next((step for step in reversed(steps) if path.is_relative_to(step.path)), None)


def closed_to(account: Account | None) -> Callable[[Path], bool]:
    """Whether an account can't enter a folder; None is the current user. Supplementary groups don't count:
    operators drop them."""

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
    """All paths that this interpreter may still load code from."""
    places = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, *sys.path]
    places += [path for path in (sys.executable, tracelake.__file__) if path]
    return [Path(place) for place in places if os.path.isabs(place) and os.path.exists(place)]


def with_targets(paths: Iterable[Path]) -> list[Path]:
    """The paths that exist, as written and as resolved: each may lie below another cover."""
    there = [Path(os.path.abspath(path)) for path in paths if path.exists()]
    return sorted({*there, *(Path(os.path.realpath(path)) for path in there)})
