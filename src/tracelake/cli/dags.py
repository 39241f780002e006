"""``tracelake init``, ``deploy``, ``plan``, ``schema`` and ``dag``: from a first DAG file to its deployed versions.

``init`` writes a DAG and a pool file that work as they are. ``deploy`` and ``plan`` report the problems of a file
as compilers do, each with line and column. ``dag`` lists what is deployed, shows earlier versions and rolls back
to one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.cli.failures import ExitCode, problem_lines
from tracelake.cli.rpc import POOLS_FILE
from tracelake.cli.show import cell, counted, print_json, print_table
from tracelake.cli.stack import (
    HIGHEST_ID,
    HIGHEST_VERSION,
    HomeOption,
    JsonOption,
    TokenOption,
    UrlOption,
    connect,
)
from tracelake.domain.errors import BadRequest, Conflict, InvalidDag, TooLarge

if TYPE_CHECKING:
    from tracelake.client import Client
    from tracelake.contracts.user_api import DagWarning, PlanResponse

DAG_FILE = "dag.yaml"
_STARTERS = "tracelake.cli.starter"
FileArgument = Annotated[Path, typer.Argument(help="The DAG file, or - for standard input.", metavar="FILE")]
_COLOURS = {"+": "green", "!": "yellow", "~": "cyan", "-": "red"}
DagArgument = Annotated[str, typer.Argument(help="The DAG's name.", metavar="DAG")]
LimitOption = Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of entries.")]


def init(
    folder: Annotated[
        Path, typer.Argument(help="The folder for them; created if it doesn't exist.", metavar="[DIR]")
    ] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Write a commented DAG to start from, and the file that names a chain's endpoints.

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
    """Write the starter files, all or none: if one can't be written, the others are removed again."""
    targets = {folder / name: mode for name, mode in ((DAG_FILE, 0o666), (POOLS_FILE, 0o600))}
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
            # Noted before it is written: a file that can't be filled is removed as well.
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

    dag, pool = shlex.quote(str(folder / DAG_FILE)), shlex.quote(str(folder / POOLS_FILE))
    return [
        "tracelake devchain --blocks 1000 --block-time 1s",
        f"tracelake dev --rpc-pools {pool}",
        f"tracelake deploy {dag}",
    ]


def deploy(
    file: FileArgument,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Deploy a DAG file; it becomes active at once.

    The same file twice is one version. A file that isn't valid is refused as a whole: every problem is
    printed as FILE:line:column: field: message, and the exit code is 2. A place that is valid and looks like a
    mistake is printed likewise, as a warning. Files that it names, such as
    ABIs, are read from its folder and become a part of the version.

    Examples:

        tracelake deploy chain.yaml

        tracelake deploy chain.yaml --json

        generate-dag | tracelake dag deploy - --home ./home
    """
    yaml = _read(file)
    with connect(url, token, home) as client, _explained(file):
        deployed, created = client.deploy(yaml, folder=_folder(file))
    if as_json:
        print_json({"created": created, **_plain(deployed)})
        return
    _warn(file, deployed.warnings)
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
    """Show what a deploy of this file would change, and change nothing.

    Signs: + new, ! replaced (its outputs and everything downstream get a new version), ~ only runs
    differently, - removed. A file that isn't valid has the exit code 2, as with deploy.

    Examples:

        tracelake plan chain.yaml

        tracelake dag plan chain.yaml --json
    """
    yaml = _read(file)
    with connect(url, token, home) as client, _explained(file):
        planned = client.plan(yaml, folder=_folder(file))
    if as_json:
        print_json(planned)
        return
    _warn(file, planned.warnings)
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
        # As bytes: the Dispatcher reports a wrong encoding with its place.
        return sys.stdin.buffer.read()
    try:
        return file.read_bytes()
    except OSError as error:
        typer.echo(f"error: {file}: {error.strerror}", err=True)
        raise typer.Exit(ExitCode.USAGE) from None


def _folder(file: Path) -> Path:
    """Where the files are that a DAG names."""
    return Path() if str(file) == "-" else file.parent


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """Report problems of the file with its name, as compilers do."""
    name = _name(file)
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


def _warn(file: Path, warnings: Iterable[DagWarning]) -> None:
    for each in warnings:
        place = f"{_name(file)}:{each.line}:{each.column}"
        typer.echo(f"{place}: warning: {each.field}: {cell(each.message)}", err=True)


def _name(file: Path) -> str:
    return "<stdin>" if str(file) == "-" else str(file)


def _plain(value: object) -> dict[str, object]:
    import msgspec

    plain: dict[str, object] = msgspec.to_builtins(value)
    return plain


dag_app = typer.Typer(help="DAGs, their versions, and rollbacks.", no_args_is_help=True)


dag_app.command("plan")(plan)


dag_app.command("deploy")(deploy)


@dag_app.command("list")
def list_dags(
    limit: LimitOption = 100,
    after: Annotated[str | None, typer.Option(help="Go on after a page's `next`.")] = None,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the DAGs that are deployed.

    Examples:

        tracelake dag list

        tracelake dag list --json
    """
    with connect(url, token, home) as client:
        page = client.dags(limit=limit, after=after)
    if as_json:
        print_json(page)
        return
    if not page.dags:
        typer.echo("no DAG is deployed: tracelake deploy FILE")
        return
    print_table(
        ("DAG", "VERSION", "JOBS", "PAUSED", "DEPLOYED"),
        [
            (
                each.dag_name,
                each.dag_version,
                len(each.jobs),
                ", ".join(job.name for job in each.jobs if job.paused) or None,
                each.deployed_at,
            )
            for each in page.dags
        ],
    )
    if page.next is not None:
        typer.echo(f"more: --after {page.next}", err=True)


@dag_app.command("versions")
def list_versions(
    dag: DagArgument,
    limit: LimitOption = 20,
    after: Annotated[
        int | None, typer.Option(min=1, max=HIGHEST_ID, help="Go on after a page's `next`.")
    ] = None,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the versions of a DAG, newest first. The same file twice is one version.

    Examples:

        tracelake dag versions chain

        tracelake dag versions chain --json
    """
    with connect(url, token, home) as client:
        page = client.dag_versions(dag, limit=limit, after=after)
    if as_json:
        print_json(page)
        return
    print_table(
        ("VERSION", "ACTIVE", "JOBS", "FIRST DEPLOYED", "BY"),
        [
            (each.version, "active" if each.active else "", each.jobs, each.created_at, each.created_by)
            for each in page.versions
        ],
    )
    if page.next is not None:
        typer.echo(f"more: --after {page.next}", err=True)


@dag_app.command("show")
def show_version(
    dag: DagArgument,
    version: Annotated[
        int | None, typer.Option(min=1, max=HIGHEST_VERSION, help="Which version.  [default: the active one]")
    ] = None,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the file of a DAG as it was deployed.

    Examples:

        tracelake dag show chain > chain.yaml

        tracelake dag show chain --version 3 --json
    """
    with connect(url, token, home) as client:
        number = version or client.dag_versions(dag, limit=1).active_version
        found = client.dag_version(dag, number)
    if as_json:
        print_json(found)
    else:
        typer.echo(found.yaml, nl=not found.yaml.endswith("\n"))


@dag_app.command("rollback")
def rollback(
    dag: DagArgument,
    to: Annotated[
        int | None,
        typer.Option(
            "--to", min=1, max=HIGHEST_VERSION, help="Which version.  [default: the one before the active]"
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")] = False,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Deploy an earlier version of a DAG again, after showing what that changes.

    Jobs that are as they were in that version continue with the data of that time; nothing that was written since
    is deleted. To go forward again: --to with the higher number.

    Examples:

        tracelake dag rollback chain

        tracelake dag rollback chain --to 3 --yes
    """
    with connect(url, token, home) as client:
        target = _earlier(client, dag) if to is None else to
        yaml = client.dag_version(dag, target).yaml.encode()
        planned = client.plan(yaml)
        if not as_json:
            print_plan(planned)
        if not yes:
            _confirm(f"deploy version {target} of {dag} again?", as_json)
        deployed, _ = client.deploy(yaml)
    if as_json:
        print_json({"deployed": deployed, "plan": planned})
        return
    jobs = counted(len(deployed.jobs), "job")
    typer.echo(f"{dag} is at version {deployed.dag_version}, {jobs} active")


def _earlier(client: Client, dag: str) -> int:
    active = client.dag_versions(dag, limit=1).active_version
    before = client.dag_versions(dag, limit=1, after=active).versions
    if not before:
        raise Conflict("NoEarlierVersion", f"{dag} has no version before {active}, the active one")
    return before[0].version


def _confirm(question: str, as_json: bool) -> None:
    if as_json or not sys.stdin.isatty():
        raise typer.BadParameter("no terminal to ask for confirmation: give --yes")
    typer.confirm(question, abort=True)
