"""The folders that an attempt's Parquet goes to, made by the wrapper before the operator runs.

The object root belongs to the platform; the operator may write in its own attempt's folders and nowhere else. A
place outside of the root, or one that a symbolic link leads to, is refused: it would be made with the wrapper's
rights. Object stores that aren't folders need nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tracelake.contracts.dispatcher_api import PayloadOutput
from tracelake.domain.errors import Forbidden
from tracelake.objects import beneath
from tracelake.objects.prefix import ObjectPrefix

_FILE = "file://"
_MODE = 0o755


def prepare_staging(root: Path, outputs: Iterable[PayloadOutput], owner: int | None) -> None:
    """``owner`` is the uid that operators run as, None when it is the wrapper's own."""
    for output in outputs:
        if output.staging is not None and output.staging.startswith(_FILE):
            _make(Path(os.path.realpath(root)), output.staging, owner)


def _make(root: Path, uri: str, owner: int | None) -> None:
    prefix = ObjectPrefix.parse(uri)
    if not ObjectPrefix.parse(f"{_FILE}{root}").contains(prefix) or prefix.path.strip("/") == str(root)[1:]:
        raise Forbidden("LocationOutsideRoot", f"the staging folder {uri} isn't below {root}")
    below = prefix.path.removesuffix("/")[len(str(root)) :]
    held = beneath.HeldFolder(root)
    try:
        place = beneath.make_folder(held.descriptor(), below, _MODE, whatever_umask=True)
    except (beneath.LeadsElsewhere, NotADirectoryError):
        raise Forbidden("LocationOutsideRoot", f"{uri} isn't a folder below {root}") from None
    try:
        if owner is not None:
            os.fchown(place, owner, -1)
    finally:
        os.close(place)
