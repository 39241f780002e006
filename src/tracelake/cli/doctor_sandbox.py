"""Whether functions of users can be run on this machine, and what holds queries: the sandbox is set up once, and
tried."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tracelake.cli.doctor_checks import Finding, Verdict
from tracelake.cli.failures import installed

if TYPE_CHECKING:
    from tracelake.worker.sandbox.check import SandboxReport

_CGROUPS = (
    "to limit a sandbox as a whole, run the worker as root with a writable cgroup file system, or as a systemd "
    "service with Delegate=yes"
)


def check_sandbox() -> Iterator[Finding]:
    """Only the lambda runtime can't do without, so a machine without it isn't broken."""
    if sys.platform == "win32":
        yield Finding("sandbox", Verdict.WARNING, "no functions can run here: this isn't Linux")
        return
    from tracelake.worker.sandbox import Sandbox

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
