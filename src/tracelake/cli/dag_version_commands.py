"""``tracelake dag``: the DAGs that are deployed, their earlier versions, and the way back to one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.cli.bounds import HIGHEST_ID, HIGHEST_VERSION
from tracelake.cli.dag_commands import deploy, plan, print_plan
from tracelake.cli.show import counted, print_json, print_table
from tracelake.cli.stack import HomeOption, JsonOption, TokenOption, UrlOption, connect
from tracelake.domain.errors import Conflict

if TYPE_CHECKING:
    from tracelake.client import Client

dag_app = typer.Typer(help="DAGs, their versions, and the way back to one.", no_args_is_help=True)
dag_app.command("plan")(plan)
dag_app.command("deploy")(deploy)

DagArgument = Annotated[str, typer.Argument(help="The DAG's name.", metavar="DAG")]
LimitOption = Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")]


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
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Deploy an earlier version of a DAG again, after showing what that changes.

    Jobs that were just so before take up their data where they left it; nothing that was written in between is
    deleted. To go forward again: --to with the higher number.

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
        raise typer.BadParameter("nobody is there to ask: give --yes to do it")
    typer.confirm(question, abort=True)
