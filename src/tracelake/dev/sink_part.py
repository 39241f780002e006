"""The sink as a part: the same command that people run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from tracelake.dev.child_process import ChildSpec
from tracelake.dev.home import Home
from tracelake.dev.ready_file import says_ready

NAME = "sink"
DRAIN_SECONDS = 2
"""Ctrl-C ends the whole stack within 10 s: what isn't written by then waits in its queue for the next start."""
START_SECONDS = 60.0


def sink_spec(home: Home, *, environment: Mapping[str, str]) -> ChildSpec:
    """``environment`` says how to reach the rest of the stack."""
    ready_file = home.folder / f"{NAME}.pid"

    def argv() -> list[str]:
        ready_file.unlink(missing_ok=True)
        return [
            *(sys.executable, "-P", "-m", "tracelake", "sink", "--home", str(home.folder)),
            *("--ready-file", str(ready_file), "--drain-seconds", str(DRAIN_SECONDS)),
        ]

    return ChildSpec(
        name=NAME,
        argv=argv,
        ready=lambda pid: says_ready(ready_file, pid),
        folder=home.folder,
        log=home.logs / f"{NAME}.log",
        env=lambda: {**os.environ, **environment},
        start_timeout=START_SECONDS,
        stop_timeout=5.0,
    )
