"""Programs that run in a query's slot instead of the engine's, and the way they get there.

A slot's process imports nothing but ``tracelake`` and the libraries that it needs, so this folder is made
one of them; in the slot each program is a module of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tracelake.query.engine import confinement


def bring_along(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [*confinement.library_folders(), Path(__file__).resolve().parent]
    monkeypatch.setattr(confinement, "library_folders", lambda: folders)
