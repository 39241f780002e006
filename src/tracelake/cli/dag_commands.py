"""``tracelake deploy``, ``plan`` and ``schema``: DAG files in, what they mean out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.cli.failures import ExitCode, problem_lines
from tracelake.cli.show import counted, print_json
from tracelake.cli.stack import HomeOption, JsonOption, TokenOption, UrlOption, connect
from tracelake.domain.errors import BadRequest, InvalidDag, TooLarge

if TYPE_CHECKING:
    from tracelake.contracts.user_api import PlanResponse

FileArgument = Annotated[Path, typer.Argument(help="The DAG file, or - for standard input.", metavar="FILE")]
_COLOURS = {"+": "green", "!": "yellow", "~": "cyan", "-": "red"}


def deploy(
    file: FileArgument,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Deploy a DAG file; it becomes active at once.

    The same file twice is one version. A file that isn't valid is refused as a whole: every problem is
    printed as FILE:line:column: field: message, and the exit code is 2.

    Examples:

        tracelake deploy chain.yaml

        tracelake deploy chain.yaml --json

        generate-dag | tracelake dag deploy - --home ./home
    """
    yaml = _read(file)
    with connect(url, token, home) as client, _explained(file):
        deployed, created = client.deploy(yaml)
    if as_json:
        print_json({"created": created, **_plain(deployed)})
        return
    jobs = counted(len(deployed.jobs), "job")
    what = "deployed" if created else "this file was deployed before"
    typer.echo(f"{deployed.dag_name} version {deployed.dag_version}: {what}, {jobs} active")


def plan(
    file: FileArgument,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a deploy of this file would change, and change nothing.

    Signs: + new, ! replaced (its outputs and everything downstream get a new version), ~ only run
    differently, - removed. A file that isn't valid has the exit code 2, as with deploy.

    Examples:

        tracelake plan chain.yaml

        tracelake dag plan chain.yaml --json
    """
    yaml = _read(file)
    with connect(url, token, home) as client, _explained(file):
        planned = client.plan(yaml)
    if as_json:
        print_json(planned)
        return
    print_plan(planned)


def print_plan(planned: PlanResponse) -> None:
    for line in planned.text.splitlines():
        typer.secho(line, fg=_COLOURS.get(line.lstrip()[:1]))


def schema() -> None:
    """Print the JSON Schema of DAG files, for editors.

    Examples:

        tracelake schema > dag.schema.json
    """
    from tracelake.domain.dag.schema import json_schema

    print_json(json_schema())


def _read(file: Path) -> bytes:
    if str(file) == "-":
        return sys.stdin.buffer.read()
    try:
        return file.read_bytes()
    except OSError as error:
        typer.echo(f"error: {file}: {error.strerror}", err=True)
        raise typer.Exit(ExitCode.USAGE) from None


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """Problems of the file are told with its name, as compilers do."""
    name = "<stdin>" if str(file) == "-" else str(file)
    try:
        yield
    except InvalidDag as error:
        lines = problem_lines(name, error)
    except (BadRequest, TooLarge) as error:
        lines = [f"{name}: {error.message}"]
    else:
        return
    for line in lines:
        typer.echo(line, err=True)
    raise typer.Exit(ExitCode.USAGE)


def _plain(value: object) -> dict[str, object]:
    import msgspec

    plain: dict[str, object] = msgspec.to_builtins(value)
    return plain
