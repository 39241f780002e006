"""``python -m tests.support.chain_replay``: record a chain, and serve a recording."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from tests.support.chain_replay.recording import STANDARD, standard_recording
from tests.support.chain_replay.recording import record as record_chain
from tests.support.chain_replay.server import READY
from tests.support.chain_replay.server import serve as serve_recording

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@app.command()
def record(
    url: str,
    start: Annotated[int, typer.Argument(min=0)],
    end: Annotated[int, typer.Argument(min=0)],
    file: Path,
) -> None:
    """Record the blocks from START to END of the chain behind URL into FILE."""
    typer.echo(f"{record_chain(url, start, end, file)} blocks, {file.stat().st_size:,} bytes")


@app.command()
def standard(name: str, folder: Path) -> None:
    """Make one of the standard recordings for benchmarks in FOLDER, and say where it is."""
    if name not in STANDARD:
        raise typer.BadParameter(f"the standard recordings are {', '.join(STANDARD)}")
    began = time.monotonic()
    path = standard_recording(name, folder)
    typer.echo(f"{path} ({path.stat().st_size:,} bytes, {time.monotonic() - began:.1f} s)")


@app.command()
def serve(file: Path, port: Annotated[int, typer.Option(min=0, max=65535)] = 0) -> None:
    """Answer JSON-RPC from FILE on loopback until a signal; 0 picks a free port."""
    serve_recording(file, port, lambda url: typer.echo(READY + url))


app()
