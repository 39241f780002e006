"""The doctor on a home whose stack is gone, or of which a part is being started again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tracelake.cli.doctor import Finding, Verdict, check_parts
from tracelake.dev.handle import DevHandle, write_handle
from tracelake.stack_connection import DEV_FILE


def found(home: Path, **pids: int) -> list[Finding]:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        handle = DevHandle(
            **dict.fromkeys(DevHandle.__struct_fields__, "x")
            | {
                "query_url": f"http://127.0.0.1:{silent.getsockname()[1]}",
                "operators": (),
                "rpc_pools": None,
                "pids": pids,
                "metrics": {},
            }
        )
        write_handle(home / DEV_FILE, handle)
        return list(check_parts(home))


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_home_without_a_stack_has_no_parts(tmp_path: Path) -> None:
    assert list(check_parts(tmp_path)) == []


def test_a_killed_supervisor_is_a_fault_with_its_remedy(tmp_path: Path) -> None:
    [finding] = found(tmp_path, supervisor=ended_pid(), query=ended_pid())
    assert finding.verdict is Verdict.FAILED
    assert finding.remedy is not None
    assert f"tracelake dev --home {tmp_path} continues where it was" in finding.remedy


def test_a_part_that_is_gone_and_queries_that_are_not_answered_are_named(tmp_path: Path) -> None:
    gone, queries = found(tmp_path, supervisor=os.getpid(), query=ended_pid())
    assert (gone.verdict, gone.message) == (Verdict.WARNING, "query isn't running right now")
    assert "tracelake logs query" in str(gone.remedy)
    assert queries.verdict is Verdict.WARNING
    assert "doesn't answer" in queries.message
