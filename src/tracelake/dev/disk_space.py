"""How much room a home needs on its disk: what `tracelake dev` refuses below, and `tracelake doctor` warns of."""

from __future__ import annotations

from pathlib import Path

MIB = 1024 * 1024
GIB = 1024 * MIB
NEW_HOME_BYTES = 256 * MIB
KNOWN_HOME_BYTES = 32 * MIB
SCARCE_BYTES = 5 * GIB
"""A stack starts with less, and its tables soon need it."""


def needed_bytes(state_cluster: Path) -> int:
    """To start: the databases of a new home are still to be made."""
    return KNOWN_HOME_BYTES if state_cluster.exists() else NEW_HOME_BYTES
