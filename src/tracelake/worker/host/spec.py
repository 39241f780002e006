"""What an operator host is told to be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tracelake.worker.host.protocol import Place, Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """``hidden`` are files and folders with credentials outside of ``home``; ``shown`` what operators must reach
    besides the interpreter, the objects and the work folder. ``namespaces``: refuse to do without them, do
    without them when they can't be had, or don't try. ``user`` is whom root runs operators as, by default
    ``TRACELAKE_OPERATOR_USER``; without either each process has an account of its own."""

    home: Path | None
    object_root: Path
    work_folder: Path
    operators: tuple[str, ...] = ()
    preload_spark: bool = False
    hidden: tuple[Path, ...] = ()
    shown: tuple[Path, ...] = ()
    namespaces: Literal["required", "auto", "never"] = "auto"
    user: str | None = None

    @property
    def chosen_user(self) -> str | None:
        return self.user or os.environ.get("TRACELAKE_OPERATOR_USER") or None

    @property
    def sources(self) -> list[str]:
        """Each once, and files by their full path."""
        full = (os.path.abspath(each) if each.endswith(".py") else each for each in self.operators)
        return list(dict.fromkeys(full))

    def setup(self, *, namespaces: bool, own: Place, provers: Sequence[Place]) -> Setup:
        """``own`` is the place of who proves the view; ``provers`` those of who load the ``sources``."""

        def absolute(paths: Sequence[Path]) -> list[str]:
            return [os.path.abspath(path) for path in paths]

        sources = self.sources
        files = [Path(source) for source in sources if source.endswith(".py")]
        return Setup(
            namespaces=namespaces,
            home=None if self.home is None else os.path.abspath(self.home),
            # As links lead: what is covered there must not be seen by another name.
            object_root=os.path.realpath(self.object_root),
            work_folder=os.path.realpath(self.work_folder),
            operators=sources,
            preload_spark=self.preload_spark,
            hidden=absolute(self.hidden),
            shown=absolute([*self.shown, *files]),
            folder=own.folder,
            account=own.account,
            provers=list(provers),
        )
