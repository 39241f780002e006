"""How many blocks of a chain share a file, and so a Spark task: the same for whoever writes a chain's tables."""

from __future__ import annotations

# Sizes that divide each other and a thousand, so that files of neighbouring tasks meet on round numbers.
_SIZES = (1000, 500, 250, 125, 25)
_ENOUGH_FILES = 4
_MOST_FILES = 500


def blocks_per_file(blocks: int, wished: int | None) -> int:
    """Without a wish it follows from the scope alone, so that one task keeps several cores busy and its files are
    the same wherever it runs, and whichever operator writes them."""
    if wished is not None:
        return wished
    size = next((size for size in _SIZES if blocks >= _ENOUGH_FILES * size), _SIZES[-1])
    while blocks > size * _MOST_FILES:
        size *= 10
    return size
