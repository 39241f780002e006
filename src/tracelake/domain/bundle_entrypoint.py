"""How a bundle is run: what kind of function it is, and which of its files the entrypoint means.

The names are AWS Lambda's. An executable ``bootstrap`` at the root runs by itself and may read the entrypoint as it
likes; otherwise ``module.function`` names a Python module (``module.py`` or a package) or a Node one
(``module.js``, ``.mjs``, ``.cjs``). Dots and slashes both lead into folders.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tracelake.domain.bundle_zip import BundleListing
from tracelake.domain.errors import Invalid

BundleKind = Literal["python", "node", "bootstrap"]

BOOTSTRAP = "bootstrap"
REFERENCE = re.compile(r"^sha256:[0-9a-f]{64}\Z")
"""How a DAG names a bundle: by the hash of the zip file."""

_ENTRYPOINT = re.compile(r"[A-Za-z0-9_-]+([./][A-Za-z0-9_-]+)*\.[A-Za-z_$][A-Za-z0-9_$]*", re.ASCII)
_SUFFIXES: tuple[tuple[str, BundleKind], ...] = (
    (".py", "python"),
    ("/__init__.py", "python"),
    (".js", "node"),
    (".mjs", "node"),
    (".cjs", "node"),
)


@dataclass(frozen=True, slots=True)
class Entrypoint:
    """``file`` is the module's file in the bundle, or the ``bootstrap``; ``function`` what to call in it."""

    kind: BundleKind
    file: str
    function: str


def find_entrypoint(listing: BundleListing, entrypoint: str) -> Entrypoint:
    """``Invalid`` with the reason ``InvalidEntrypoint`` when the bundle has no such thing, or two."""
    if BOOTSTRAP in listing.executables:
        return Entrypoint("bootstrap", BOOTSTRAP, entrypoint)
    if _ENTRYPOINT.fullmatch(entrypoint) is None:
        raise _invalid(f"{entrypoint[:200]!r} is not of the form module.function")
    module, _, function = entrypoint.rpartition(".")
    stem = module.replace(".", "/")
    names = frozenset(listing.names)
    found = [
        Entrypoint(kind, stem + suffix, function) for suffix, kind in _SUFFIXES if stem + suffix in names
    ]
    if len(found) > 1:
        raise _invalid(f"{module} could be any of {', '.join(each.file for each in found)}")
    if not found:
        unmarked = "; its bootstrap is not executable" if BOOTSTRAP in names else ""
        raise _invalid(
            f"the bundle has neither {stem}.py, {stem}/__init__.py nor {stem}.js, .mjs or .cjs{unmarked}"
        )
    return found[0]


def _invalid(why: str) -> Invalid:
    return Invalid("InvalidEntrypoint", why)
