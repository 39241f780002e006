"""How a worker and a sink run in the foreground: told to stop they finish, told again they leave at once."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tracelake.dev.ready_file import say_ready

if TYPE_CHECKING:
    import asyncio

    Service = Callable[[asyncio.Event, asyncio.Event, Callable[[], None]], Awaitable[None]]


def serve(service: Service, name: str, ready_file: Path | None) -> None:
    """``service`` is given two events, to stop and to hurry, and what to call as soon as it takes work."""
    import asyncio

    import uvloop

    def ready() -> None:
        say_ready(ready_file)
        typer.echo(f"ready  {name}")

    async def main() -> None:
        stop, hurry = asyncio.Event(), asyncio.Event()

        def asked() -> None:
            (hurry if stop.is_set() else stop).set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, asked)
        await service(stop, hurry, ready)

    try:
        uvloop.run(main())
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)
