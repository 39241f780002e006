"""Tracelake: events in, leased tasks out, every output committed once.

``tracelake.Client().query("SELECT max(block_number) FROM blocks").to_pandas()`` asks a running stack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tracelake.client import Client

__version__ = "0.1.0"
__all__ = ["Client", "__version__"]


def __getattr__(name: str) -> object:
    """The client is loaded when it is asked for: the command line and the workers start without it."""
    if name != "Client":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tracelake.client import Client

    return Client
