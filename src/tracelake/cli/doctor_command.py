"""``tracelake doctor``: checks the machine, the installation and the stack."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tracelake.cli.failures import ExitCode
from tracelake.cli.show import cell, print_json
from tracelake.cli.stack import (
    DEFAULT_HOME,
    NOT_RUNNING,
    HomeOption,
    JsonOption,
    TokenOption,
    UrlOption,
    connect,
    start_command,
)
from tracelake.domain.errors import TracelakeError
from tracelake.stack_address import INTERNAL_PORT, USER_PORT

if TYPE_CHECKING:
    from tracelake.cli.doctor_checks import Finding

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


def doctor(
    url: UrlOption = None, token: TokenOption = None, home: HomeOption = None, as_json: JsonOption = False
) -> None:
    """Check this machine and the installation; each finding comes with its remedy.

    Python, extras, the embedded Postgres, the home and its disk, the file with the RPC pools, Java and Node for
    workers, the sandbox for functions and queries, the ports, and the stack and its parts if one runs. A stack that
    isn't running is no fault. The exit code is 1 when a check failed.

    Examples:

        tracelake doctor

        tracelake doctor --home ./home --json
    """
    from tracelake.cli.doctor_checks import Verdict

    found = list(_findings(url, token, home))
    if as_json:
        print_json({"findings": found})
    else:
        for finding in found:
            mark = typer.style(f"{finding.verdict:<8}", fg=_COLOURS[finding.verdict])
            typer.echo(f"{mark}{finding.check}: {cell(finding.message)}")
            if finding.remedy is not None:
                typer.echo(f"        -> {finding.remedy}")
    if any(finding.verdict is Verdict.FAILED for finding in found):
        raise typer.Exit(ExitCode.FAILED)


def _findings(url: str | None, token: str | None, home: Path | None) -> Iterator[Finding]:
    from tracelake.cli import doctor_checks as checks
    from tracelake.cli.doctor_parts import check_parts
    from tracelake.cli.doctor_rpc import check_rpc_pools
    from tracelake.cli.doctor_runtimes import check_runtimes
    from tracelake.cli.doctor_sandbox import check_sandbox

    place = (home or DEFAULT_HOME).absolute()
    yield from checks.check_python()
    yield from checks.check_extras()
    yield from checks.check_postgres(place)
    yield from checks.check_home(place)
    yield from check_rpc_pools(place)
    yield from check_runtimes()
    yield from check_sandbox()
    yield from _stack(url, token, home)
    if url is None:
        yield from check_parts(place)


def _stack(url: str | None, token: str | None, home: Path | None) -> Iterator[Finding]:
    from tracelake.cli.doctor_checks import Finding, Verdict, check_clock, check_port

    try:
        with connect(url, token, home) as client:
            asked = datetime.now(UTC)
            theirs = client.check_ready()
            answered = datetime.now(UTC)
            client.dags(limit=1)
    except TracelakeError as error:
        if error.reason == NOT_RUNNING:
            yield Finding("stack", Verdict.OK, "none is running", f"start one with `{start_command(home)}`")
            yield check_port("user", USER_PORT)
            yield check_port("internal", INTERNAL_PORT)
        else:
            remedy = "HOME/logs/dispatcher.log tells more; a stack that was killed is started again with "
            yield Finding("stack", Verdict.FAILED, error.message, f"{remedy}`{start_command(home)}`")
        return
    yield Finding("stack", Verdict.OK, f"{client.url} is ready and knows the token")
    if theirs is not None:
        yield check_clock(theirs, asked, answered)
