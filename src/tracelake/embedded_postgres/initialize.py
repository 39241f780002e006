"""Making a new cluster: all of it, or nothing.

``initdb`` works in a staging folder that is renamed once everything is in place, so a launcher killed
halfway leaves no half cluster behind that a later start would take for a whole one.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tracelake import keyrings
from tracelake.domain.errors import Unavailable
from tracelake.embedded_postgres import named_account
from tracelake.embedded_postgres.account import Account, ServerAccount
from tracelake.embedded_postgres.binaries import Binaries
from tracelake.embedded_postgres.folder import ClusterFolder
from tracelake.embedded_postgres.named_account import with_name
from tracelake.embedded_postgres.server_process import data_argument, environment
from tracelake.trees import remove_if_possible


def initialize(
    folder: ClusterFolder,
    binaries: Binaries,
    server: ServerAccount | None,
    *,
    superuser: str,
    throwaway: bool,
) -> None:
    account = server.account if server else None
    password = folder.ensure_password(superuser)
    staging = folder.staging(account)
    command = [
        *(str(binaries.initdb), "-D", data_argument(staging), "-U", superuser, "--pwfile=/dev/stdin"),
        *("--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"),
        *(["--no-sync"] if throwaway else []),
    ]
    named_account.sweep(folder.path)
    if server is None or server.named:
        _run(command, staging, account, password)
    else:
        with_name(server.account, folder.path, lambda: _run(command, staging, account, password))
    staging.rename(folder.pgdata)
    if not throwaway:
        _sync(folder.path)


def _run(command: list[str], staging: Path, account: Account | None, password: str) -> None:
    stdin = _pipe_with(password + "\n", account)
    try:
        result = subprocess.run(
            command,
            cwd=staging,
            env=environment(),
            stdin=stdin,
            capture_output=True,
            text=True,
            check=False,
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
            preexec_fn=keyrings.prepared(account.uid if account else None),
        )
    finally:
        os.close(stdin)
    if result.returncode != 0:
        remove_if_possible(staging)
        said = (result.stderr.strip() or result.stdout.strip())[-4096:]
        raise Unavailable("ClusterInitFailed", f"can't make a Postgres in {staging.parent}: {said}")


def _pipe_with(text: str, account: Account | None) -> int:
    # initdb opens its standard input anew by path, which asks for permission on the pipe itself.
    reader, writer = os.pipe()
    if account is not None:
        os.fchown(reader, account.uid, account.gid)
    os.write(writer, text.encode())
    os.close(writer)
    return reader


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
