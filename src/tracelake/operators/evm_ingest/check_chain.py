"""Cells are fetched at different times from different endpoints: they must be parts of one chain."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from tracelake.domain.errors import Unavailable
from tracelake.operators.cell_report import CellReport


def check_chain(reports: Iterable[CellReport]) -> None:
    """``reports`` in the order of blocks, one right after another."""
    for before, after in pairwise(reports):
        if after.parent_hash != before.last_hash:
            raise Unavailable(
                "ChainChanged",
                f"block {after.start} follows on {after.parent_hash}, but block {before.end} was "
                f"{before.last_hash} when it was fetched: the chain has changed meanwhile",
            )
