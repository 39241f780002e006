"""``tracelake logs``: what the parts of a stack on this machine said."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tracelake.cli.show import cell
from tracelake.cli.stack import DEFAULT_HOME, JsonOption
from tracelake.domain.errors import NotFound

_POLL = 0.2


def logs(
    part: Annotated[str, typer.Argument(help="dispatcher, postgres-state or postgres-data.")] = "dispatcher",
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Begin with so many last lines.")] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as more is said, until Ctrl-C.")
    ] = False,
    home: Annotated[
        Path, typer.Option(readable=False, help="The home of a stack on this machine.")
    ] = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Print the end of a part's log, also of one that no longer runs.

    Examples:

        tracelake logs

        tracelake logs dispatcher -f

        tracelake logs postgres-state -n 200 --json
    """
    path = _file(home, part)
    with path.open("rb") as file:
        for line in deque(file, maxlen=lines):
            _print(part, line, as_json)
        place = file.tell()
    if follow:
        for line in _following(path, place):
            _print(part, line, as_json)


def _file(home: Path, part: str) -> Path:
    files = {path.stem: path for path in sorted((home / "logs").glob("*.log"))}
    for cluster in ("state", "data"):
        path = home / "postgres" / cluster / "server.log"
        if path.exists():
            files[f"postgres-{cluster}"] = path
    if part not in files:
        there = f"there are {', '.join(files)}" if files else "there are none yet"
        raise NotFound("UnknownLog", f"{home} has no log of {part!r}: {there}")
    return files[part]


def _following(path: Path, place: int) -> Iterator[bytes]:
    """Whole lines from ``place`` on; a log that was begun anew is read from its beginning."""
    rest = b""
    while True:
        if path.exists():
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < place:
                    place, rest = 0, b""
                file.seek(place)
                *whole, rest = (rest + file.read()).split(b"\n")
                place = file.tell()
            yield from whole
        time.sleep(_POLL)


def _print(part: str, line: bytes, as_json: bool) -> None:
    import msgspec

    try:
        entry = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        entry = {"event": line.decode("utf-8", "replace").rstrip("\n")}
    if as_json:
        typer.echo(msgspec.json.encode({"part": part, **entry}))
        return
    told = [entry.pop(name, None) for name in ("timestamp", "level", "event")]
    rest = [f"{name}={value}" for name, value in entry.items() if name != "logger"]
    typer.echo("  ".join(cell(each) for each in (*told, *rest) if each is not None))
