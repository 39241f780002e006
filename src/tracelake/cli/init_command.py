"""``tracelake init``: a DAG and a pool file to begin with, which work as they are."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from tracelake.cli.show import print_json
from tracelake.cli.stack import JsonOption
from tracelake.domain.errors import Conflict

DAG_FILE = "dag.yaml"
POOL_FILE = "rpc.toml"
_STARTERS = "tracelake.cli.starter"


def init(
    folder: Annotated[
        Path, typer.Argument(help="Where to write them; made if need be.", metavar="[DIR]")
    ] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Write a commented DAG to begin with, and the file that names a chain's endpoints.

    The DAG keeps the tip of a chain in Postgres and fetches its past as Parquet. Both files work as they are, on
    the chain that `tracelake devchain` serves; the comments say what to change for another. Nothing is overwritten.

    Examples:

        tracelake init

        tracelake init ./my-chain
    """
    written = write_starters(folder)
    steps = next_steps(folder)
    if as_json:
        print_json({"files": [str(file) for file in written], "next": steps})
        return
    for file in written:
        typer.echo(f"wrote {file}")
    typer.echo("\nnext, each in a terminal of its own:\n")
    for step in steps:
        typer.echo(f"  {step}")


def write_starters(folder: Path) -> list[Path]:
    """The files, none of which was there before. All or nothing: what can't be completed is taken back."""
    targets = {folder / name: mode for name, mode in ((DAG_FILE, 0o666), (POOL_FILE, 0o600))}
    if there := [str(file) for file in targets if os.path.lexists(file)]:
        exist = "exist" if len(there) > 1 else "exists"
        raise Conflict("FileExists", f"{' and '.join(there)} {exist} already; nothing was written")
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    try:
        for file, mode in targets.items():
            content = resources.files(_STARTERS).joinpath(file.name).read_bytes()
            # An address of an endpoint usually contains a key: the file is for its owner alone from the beginning.
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            written.append(file)
            with os.fdopen(descriptor, "wb") as target:
                target.write(content)
    except BaseException:
        for file in written:
            file.unlink(missing_ok=True)
        raise
    return written


def next_steps(folder: Path) -> list[str]:
    import shlex

    dag, pool = shlex.quote(str(folder / DAG_FILE)), shlex.quote(str(folder / POOL_FILE))
    return [
        "tracelake devchain --blocks 1000 --block-time 1s",
        f"tracelake dev --rpc-pools {pool}",
        f"tracelake deploy {dag}",
    ]
