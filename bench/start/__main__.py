"""Measures the cost of a whole stack: seconds from ``tracelake dev`` to ``ready``, the first time and again, CPU
time until then, seconds to stop, and the memory it holds when it idles.

Memory is the sum of PSS (what several processes share is counted once) over the process tree of the supervisor.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.support.dev_stack import descendants
from tracelake.dev.handle import DevHandle
from tracelake.stack_connection import DEV_FILE, read_handle

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
MIB = 1024


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__)
    options.add_argument("--no-workers", action="store_true", help="the stack without its workers")
    options.add_argument("--idle-seconds", type=float, default=20, help="before memory is measured")
    given = options.parse_args()
    extra = ["--no-workers"] if given.no_workers else []
    with tempfile.TemporaryDirectory(prefix="tracelake-start-") as folder:
        for turn in ("first start", "restart"):
            for line in measure(turn, Path(folder) / "home", extra, given.idle_seconds):
                print(json.dumps(line), flush=True)


def measure(turn: str, home: Path, extra: list[str], idle_seconds: float) -> Iterator[dict[str, object]]:
    command = [sys.executable, "-m", "tracelake", "dev", "--home", str(home), "--port", "auto", *extra]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as stack:
        try:
            assert stack.stdout is not None
            if stack.stdout.readline() != "ready\n":
                raise SystemExit(f"the stack didn't start: {' '.join(command)}")
            seconds = time.monotonic() - began
            cpu = sum(map(cpu_seconds, tree(stack.pid)))
            yield {"measured": turn, "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1)}
            if turn == "restart":
                time.sleep(idle_seconds)
                yield {"measured": "idle memory", **memory(stack.pid, home)}
        finally:
            asked = time.monotonic()
            stack.send_signal(signal.SIGTERM)
            stack.wait()
    yield {"measured": f"stop after {turn}", "seconds": round(time.monotonic() - asked, 1)}


def memory(supervisor: int, home: Path) -> dict[str, object]:
    handle = read_handle(home / DEV_FILE, DevHandle)
    assert handle is not None
    parts = {
        name: sum(map(pss_kib, tree(pid) if name != "supervisor" else [pid]))
        for name, pid in handle.pids.items()
    }
    everything = tree(supervisor)
    mib = {name: round(kib / MIB) for name, kib in sorted(parts.items(), key=lambda part: -part[1])}
    return {
        "pss_mib": round(sum(map(pss_kib, everything)) / MIB),
        "processes": len(everything),
        "of_parts_mib": mib,
    }


def tree(pid: int) -> list[int]:
    return [pid, *descendants(pid)]


def cpu_seconds(pid: int) -> float:
    """Its own and that of its children that have ended."""
    with suppress(OSError):
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICKS
    return 0.0


def pss_kib(pid: int) -> int:
    with suppress(OSError):
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


if __name__ == "__main__":
    main()
