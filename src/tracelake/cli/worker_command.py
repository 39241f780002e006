"""``tracelake worker``: takes tasks of one runtime and runs their operators."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tracelake.cli.bounds import LONGEST_SECONDS
from tracelake.cli.home_stack import stack_on
from tracelake.cli.rpc_commands import POOLS_FILE, POOLS_VARIABLE
from tracelake.cli.serve import serve
from tracelake.cli.stack import DEFAULT_HOME
from tracelake.domain.errors import Invalid
from tracelake.secret import Secret

HELP = """Run a worker: it waits for tasks of its runtime, runs their operators and reports what came of them.

Any number of workers may serve one runtime, on any number of machines. A worker that is told to stop (SIGTERM,
Ctrl-C) finishes what it runs or hands it back; told a second time, it hands everything back at once.

How to reach the stack is read from the home of one that runs on this machine, or from the environment:
`TRACELAKE_INTERNAL_URL`, `TRACELAKE_WORKER_TOKEN` and `TRACELAKE_QUEUE_DSN` (all three come before the home), and
`TRACELAKE_DATA_DSN`, `TRACELAKE_DATA_ADDRESS` (`host:port` for operators, when the worker itself goes by a unix
socket that they can't reach), `TRACELAKE_QUERY_URL`, `TRACELAKE_OBJECT_ROOT`. Secrets that jobs name are read from
`TRACELAKE_SECRET_<NAME>` or from the private file in `TRACELAKE_SECRETS_FILE`. RPC pools are read from the file in
`TRACELAKE_RPC_POOLS`, or from `rpc.toml` in the home.

Examples:

    tracelake worker --runtime ecs_python

    tracelake worker --runtime ecs_spark --home ./home --concurrency 4 --idle-timeout 10m

    tracelake worker --runtime ecs_python --operators my_company.operators --operators ./extra_operator.py
"""

IN_PROCESS = "dispatcher"
_DURATION = re.compile(r"([0-9]{1,9})(s|m|h|d)?")
_UNITS = {None: 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_FACTS = ("TRACELAKE_INTERNAL_URL", "TRACELAKE_WORKER_TOKEN", "TRACELAKE_QUEUE_DSN")
_MAY_BE = (
    "TRACELAKE_DATA_DSN",
    "TRACELAKE_DATA_ADDRESS",
    "TRACELAKE_QUERY_URL",
    "TRACELAKE_OBJECT_ROOT",
    "TRACELAKE_SECRETS_FILE",
)
_NOT_OURS = ("TRACELAKE_STAGING_DSN", "TRACELAKE_READING_DSN")
"""Logins that a worker's environment may still name, of former versions or of its neighbours."""


def worker(
    runtime: Annotated[
        str, typer.Option(help="ecs_python, ecs_spark, lambda, or the name of a registered one.")
    ],
    home: Annotated[
        Path, typer.Option(readable=False, help="The home of a stack on this machine; logs go there too.")
    ] = DEFAULT_HOME,
    queue: Annotated[
        str | None, typer.Option(help="The runtime's queue.  [default: the runtime's name]")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1000, help="Operators that run at once.")] = 2,
    idle_timeout: Annotated[
        str | None, typer.Option(help="End after so long without work, as in 30s or 10m.  [default: never]")
    ] = None,
    operators: Annotated[
        list[str] | None,
        typer.Option(help="Load operators from this module or .py file as well. Repeatable."),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0, max=86400, help="How long running tasks may go on when told to stop.")
    ] = 30,
    worker_id: Annotated[
        str | None, typer.Option(help="Shown with its attempts.  [default: runtime, host and process]")
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Where the process id stands while the worker takes tasks.")
    ] = None,
    log_format: Annotated[str, typer.Option(help="json or text.")] = "json",
) -> None:
    from tracelake.worker.host.kernel import forbid_inspection

    forbid_inspection()
    from tracelake.dev.home import make_home
    from tracelake.logs import configure_logs
    from tracelake.worker.settings import WorkerSettings, new_worker_id

    configure_logs("json" if log_format == "json" else "text")
    if runtime == IN_PROCESS:
        raise Invalid("InvalidRuntime", f"tasks of runtime {IN_PROCESS} are run by the Dispatcher itself")
    idle = None if idle_timeout is None else _seconds(idle_timeout)
    home = home.absolute()
    facts = _facts(home, os.environ)
    rpc_pools = os.environ.pop(POOLS_VARIABLE, "")
    name = worker_id or new_worker_id(runtime)
    settings = WorkerSettings(
        runtime=runtime,
        internal_url=facts.internal_url,
        worker_token=facts.worker_token,
        queue_dsn=facts.queue_dsn,
        queue=queue or runtime,
        data_dsn=facts.data_dsn,
        data_address=facts.data_address,
        query_url=facts.query_url,
        object_root=facts.object_root,
        log_folder=home / "logs" / "tasks",
        work_folder=home / "work" / _file_name(runtime) / _file_name(name),
        home=home,
        concurrency=concurrency,
        idle_timeout=idle,
        drain_seconds=drain_seconds,
        operators=tuple(dict.fromkeys((*facts.operators, *map(operators_at, operators or ())))),
        worker_id=name,
        secrets_file=facts.secrets_file,
        rpc_pools=Path(rpc_pools).absolute() if rpc_pools else home / POOLS_FILE,
        rpc_pools_required=bool(rpc_pools),
    )
    make_home(home)
    from tracelake.worker.app import run_worker

    serve(lambda stop, hurry, ready: run_worker(settings, stop, hurry, ready), name, ready_file)


worker.__doc__ = HELP


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    internal_url: str
    worker_token: Secret
    queue_dsn: Secret
    data_dsn: Secret | None
    data_address: str | None = None
    query_url: str | None
    object_root: Path
    secrets_file: Path | None
    operators: tuple[str, ...] = ()


def _facts(home: Path, environment: MutableMapping[str, str]) -> _Facts:
    """What is taken from the environment is taken out of it: nothing that the worker starts inherits it."""
    given = {name: environment.pop(name, "") for name in (*_FACTS, *_MAY_BE, *_NOT_OURS)}
    secrets_file = Path(given["TRACELAKE_SECRETS_FILE"]) if given["TRACELAKE_SECRETS_FILE"] else None
    if all(given[name] for name in _FACTS):
        url, token, queue_dsn = (given[name] for name in _FACTS)
        data_dsn, data_address, query_url, root, _ = (given[name] for name in _MAY_BE)
        return _Facts(
            internal_url=url,
            worker_token=Secret(token),
            queue_dsn=Secret(queue_dsn),
            data_dsn=Secret(data_dsn) if data_dsn else None,
            data_address=data_address or None,
            query_url=query_url or None,
            object_root=Path(root).absolute() if root else home / "objects",
            secrets_file=secrets_file,
        )
    return _of_home(home, secrets_file, [name for name in _FACTS if not given[name]])


def _of_home(home: Path, secrets_file: Path | None, missing: list[str]) -> _Facts:
    handle = stack_on(home, missing)
    return _Facts(
        internal_url=handle.internal_url,
        worker_token=Secret(handle.worker_token),
        queue_dsn=Secret(handle.queue_dsn),
        data_dsn=Secret(handle.data_write_dsn),
        query_url=handle.query_url,
        object_root=Path(handle.object_root),
        secrets_file=secrets_file,
        operators=handle.operators,
    )


def _seconds(text: str) -> float:
    matched = _DURATION.fullmatch(text.strip())
    if matched is None:
        raise Invalid("InvalidDuration", f"--idle-timeout takes seconds or 30s, 10m, 2h, 1d, not {text!r}")
    seconds = int(matched[1]) * _UNITS[matched[2]]
    if seconds > LONGEST_SECONDS:
        raise Invalid(
            "InvalidDuration", f"--idle-timeout {text}: the most is {LONGEST_SECONDS} seconds (365d)"
        )
    return float(seconds)


def operators_at(source: str) -> str:
    """A file by its full path: it is loaded by a process that runs elsewhere, and once however it was named."""
    path = Path(source)
    return str(path.absolute()) if path.suffix == ".py" or path.is_dir() else source


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)
