"""The stack that runs on a home, for commands that serve one: a worker, a sink, a Query Service."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tracelake.cli.stack import NOT_RUNNING, start_command
from tracelake.domain.errors import Unavailable

if TYPE_CHECKING:
    from tracelake.dev.handle import DevHandle


def stack_on(home: Path, missing: Iterable[str]) -> DevHandle:
    """``missing`` are the variables that would say the same."""
    from tracelake.dev.handle import DEV_FILE, DevHandle, read_handle

    handle = read_handle(home / DEV_FILE, DevHandle)
    if handle is None:
        raise Unavailable(
            NOT_RUNNING,
            f"no stack runs on the home {home}: start one with `{start_command(home)}`, "
            f"or say where it is by {', '.join(missing)}",
        )
    return handle
