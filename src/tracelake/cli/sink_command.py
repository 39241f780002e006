"""``tracelake sink``: writes what jobs publish to buffered datasets."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tracelake.cli.home_stack import stack_on
from tracelake.cli.serve import serve
from tracelake.cli.stack import DEFAULT_HOME
from tracelake.secret import Secret

HELP = """Run a sink: it writes the records that jobs publish to buffered datasets into their tables.

One sink serves every buffered dataset; further ones take over what it lets go, and never write beside it. Records
wait in their queues while there is none (`tracelake buffers list` shows how many, and since when). A batch that
can't be written becomes a dead letter with its reason, and the others go on. A sink that is told to stop (SIGTERM,
Ctrl-C) writes what it has received and hands its datasets back; told a second time, it hands them back at once.

How to reach the stack is read from the home of one that runs on this machine, or from the environment:
`TRACELAKE_INTERNAL_URL`, `TRACELAKE_WORKER_TOKEN`, `TRACELAKE_QUEUE_DSN` and `TRACELAKE_DATA_DSN`, the role that
commits (all four come before the home), and `TRACELAKE_OBJECT_ROOT`, where large batches lie.

Examples:

    tracelake sink

    tracelake sink --home ./home --log-format text
"""

_FACTS = ("TRACELAKE_INTERNAL_URL", "TRACELAKE_WORKER_TOKEN", "TRACELAKE_QUEUE_DSN", "TRACELAKE_DATA_DSN")
_OBJECT_ROOT = "TRACELAKE_OBJECT_ROOT"


def sink(
    home: Annotated[
        Path, typer.Option(readable=False, help="The home of a stack on this machine.")
    ] = DEFAULT_HOME,
    drain_seconds: Annotated[
        float, typer.Option(min=0, max=86400, help="How long it may go on writing when told to stop.")
    ] = 5,
    worker_id: Annotated[
        str | None, typer.Option(help="Shown with its attempts.  [default: host and process]")
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Where the process id stands while the sink takes datasets.")
    ] = None,
    log_format: Annotated[str, typer.Option(help="json or text.")] = "json",
) -> None:
    from tracelake.worker.host.kernel import forbid_inspection

    forbid_inspection()
    from tracelake.logs import configure_logs
    from tracelake.sink.settings import SinkSettings
    from tracelake.worker.settings import new_worker_id

    configure_logs("json" if log_format == "json" else "text")
    facts = _facts(home.absolute(), os.environ)
    settings = SinkSettings(
        internal_url=facts.internal_url,
        worker_token=facts.worker_token,
        queue_dsn=facts.queue_dsn,
        data_dsn=facts.data_dsn,
        object_root=facts.object_root,
        worker_id=worker_id or new_worker_id("sink"),
        drain_seconds=drain_seconds,
    )
    from tracelake.sink.app import run_sink

    serve(lambda stop, hurry, ready: run_sink(settings, stop, hurry, ready), settings.worker_id, ready_file)


sink.__doc__ = HELP


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    internal_url: str
    worker_token: Secret
    queue_dsn: Secret
    data_dsn: Secret
    object_root: Path


def _facts(home: Path, environment: MutableMapping[str, str]) -> _Facts:
    """What is taken from the environment is taken out of it."""
    given = {name: environment.pop(name, "") for name in (*_FACTS, _OBJECT_ROOT)}
    if not all(given[name] for name in _FACTS):
        return _of_home(home, [name for name in _FACTS if not given[name]])
    url, token, queue_dsn, data_dsn = (given[name] for name in _FACTS)
    root = given[_OBJECT_ROOT]
    return _Facts(
        internal_url=url,
        worker_token=Secret(token),
        queue_dsn=Secret(queue_dsn),
        data_dsn=Secret(data_dsn),
        object_root=Path(root).absolute() if root else home / "objects",
    )


def _of_home(home: Path, missing: list[str]) -> _Facts:
    handle = stack_on(home, missing)
    return _Facts(
        internal_url=handle.internal_url,
        worker_token=Secret(handle.worker_token),
        queue_dsn=Secret(handle.queue_dsn),
        data_dsn=Secret(handle.data_write_dsn),
        object_root=Path(handle.object_root),
    )
