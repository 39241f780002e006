"""A worker as a part: the same command that people run, one per runtime."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from tracelake.dev.child_process import ChildSpec
from tracelake.dev.home import Home
from tracelake.dev.ready_file import says_ready

DRAIN_SECONDS = 2
"""Ctrl-C ends the whole stack within 10 s: what isn't done by then is handed back and done after the next start."""
START_SECONDS = 120.0
"""A Spark server on a cold machine."""


def worker_name(runtime: str) -> str:
    return f"worker-{runtime}"


def worker_spec(
    home: Home, runtime: str, *, environment: Mapping[str, str], operators: Sequence[str] = ()
) -> ChildSpec:
    """``environment`` says how to reach the rest of the stack."""
    name = worker_name(runtime)
    ready_file = home.folder / f"{name}.pid"

    def argv() -> list[str]:
        ready_file.unlink(missing_ok=True)
        return [
            *(sys.executable, "-P", "-m", "tracelake", "worker", "--runtime", runtime),
            *("--home", str(home.folder), "--ready-file", str(ready_file)),
            *("--drain-seconds", str(DRAIN_SECONDS)),
            *(option for each in operators for option in ("--operators", each)),
        ]

    return ChildSpec(
        name=name,
        argv=argv,
        ready=lambda pid: says_ready(ready_file, pid),
        folder=home.folder,
        log=home.logs / f"{name}.log",
        env=lambda: {**os.environ, **environment},
        start_timeout=START_SECONDS,
        stop_timeout=5.0,
    )
