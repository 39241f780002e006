"""A sandbox runs a program, shows it what it was given, tells how it ended, and is never done without."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.sandbox_driver import LAUNCHERS, PYTHON, Run, driver_command, processes_with
from tracelake import kernel
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.sandbox import launcher, layout, sandbox, seccomp
from tracelake.sandbox import sandbox as check
from tracelake.sandbox.layout import EndReason, ReadOnlyBind, SandboxLimits, SandboxSpec, python_runtime
from tracelake.sandbox.sandbox import Sandbox

pytestmark = pytest.mark.xdist_group("sandbox")

MISSING = "bubblewrap is needed for this test: scripts/install-system-packages installs it"


@pytest.fixture
async def box() -> AsyncIterator[Sandbox]:
    assert check.find_program() is not None, MISSING
    opened = await Sandbox.open()
    yield opened
    await opened.close()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """What anyone may read, in a folder that nobody but us may enter."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    folder = private / "code"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    (folder / "data").write_text("from the bundle")
    (folder / "data").chmod(0o644)
    return folder


def shell(code: Path, script: str, **more: Any) -> SandboxSpec:
    spec = SandboxSpec(argv=["/bin/sh", "-c", script], env={"PATH": "/usr/bin:/bin"}, code=code)
    return replace(spec, **more)


def _status(process: Path) -> str:
    try:
        return (process / "status").read_text()
    except OSError:
        return ""


async def heard(box: Sandbox, spec: SandboxSpec) -> tuple[int, EndReason, str]:
    read, write = os.pipe()
    started = await box.start(replace(spec, stdout=write, stderr=write))
    os.close(write)
    with open(read) as pipe:
        said = await asyncio.to_thread(pipe.read)
    ended = await started.wait()
    return ended.returncode, ended.reason, said


async def test_a_program_sees_its_code_and_its_exit_code_comes_back(box: Sandbox, code: Path) -> None:
    assert await heard(box, shell(code, "cat data; exit 7")) == (7, EndReason.EXITED, "from the bundle")


async def test_the_environment_is_what_was_given_and_no_more(box: Sandbox, code: Path) -> None:
    spec = replace(shell(code, ""), argv=["/usr/bin/env"], env={"A": "1", "B": "two words = ü"})
    _, _, said = await heard(box, spec)
    assert sorted(line for line in said.splitlines() if not line.startswith("PWD=")) == [
        "A=1",
        "B=two words = ü",
    ]


async def test_a_folder_of_the_runtime_is_shown_read_only(box: Sandbox, code: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    library.chmod(0o755)
    (library / "module").write_text("shown")
    (library / "module").chmod(0o644)
    spec = shell(
        code,
        "cat /opt/lib/module; echo x > /opt/lib/module || echo no",
        runtime=[ReadOnlyBind(library, "/opt/lib")],
    )
    _, _, said = await heard(box, spec)
    assert said.startswith("shown")
    assert said.endswith("no\n")
    assert (library / "module").read_text() == "shown"


async def test_tmp_is_private_and_writable(box: Sandbox, code: Path) -> None:
    first = await heard(box, shell(code, "echo left > /tmp/file; cat /tmp/file"))
    second = await heard(box, shell(code, "ls -A /tmp"))
    assert (first[2], second[2]) == ("left\n", "")


async def test_the_interpreter_that_runs_us_runs_inside(box: Sandbox, code: Path) -> None:
    python = python_runtime()
    argv = [python.executable, "-I", "-S", "-c", "import ctypes, ssl, sqlite3, sys; print(sys.prefix)"]
    spec = replace(shell(code, ""), argv=argv, env=python.env, runtime=python.binds)
    returncode, _, said = await heard(box, spec)
    assert (returncode, said) == (0, "/opt/python\n" if python.binds else "/usr\n")


async def test_a_signal_is_told_apart_from_an_exit(box: Sandbox, code: Path) -> None:
    ended = await heard(box, shell(code, "kill -TERM $$"))
    assert ended[:2] == (128 + signal.SIGTERM, EndReason.SIGNALED)


async def test_out_of_memory_is_told_as_such_where_it_is_counted(box: Sandbox, code: Path) -> None:
    python = python_runtime()
    argv = [python.executable, "-I", "-S", "-c", "x = b'x' * 300_000_000"]
    limits = SandboxLimits(memory_bytes=64 * 1024 * 1024)
    spec = replace(shell(code, ""), argv=argv, env=python.env, runtime=python.binds, limits=limits)
    returncode, reason, said = await heard(box, spec)
    assert returncode != 0
    if "memory" in box.report.limits.partition(")")[0]:
        assert reason is EndReason.OUT_OF_MEMORY
    else:
        assert "MemoryError" in said


async def test_cpu_and_processes_are_limited_where_they_are_counted(box: Sandbox, code: Path) -> None:
    started = await box.start(shell(code, "sleep 600", limits=SandboxLimits(cpu_share=0.25, processes=7)))
    parent = check.find_parent()
    found: dict[str, str] = {}
    for folder in set(parent.folders.values()) if parent is not None else ():
        for group in folder.glob(f"tracelake-sandbox-{os.getpid()}-*"):
            if str(started.pid) in (group / "cgroup.procs").read_text().split():
                values = [group / name for name in ("pids.max", "cpu.max", "cpu.cfs_quota_us")]
                found |= {path.name: path.read_text().split()[0] for path in values if path.exists()}
    await started.kill()
    assert not box.report.limits_are_complete or found in (
        {"pids.max": "10", "cpu.max": "25000"},
        {"pids.max": "10", "cpu.cfs_quota_us": "25000"},
    )


async def test_code_that_is_not_there_or_not_readable_is_told(box: Sandbox, code: Path) -> None:
    with pytest.raises(Invalid, match="a path to bind into the sandbox does not exist"):
        await box.start(shell(code / "missing", "true"))
    code.chmod(0o700)
    if os.geteuid() == 0:
        with pytest.raises(Invalid, match=r"chmod o\+rX"):
            await box.start(shell(code, "true"))


async def test_kill_leaves_nothing_and_says_so(box: Sandbox, code: Path) -> None:
    started = await box.start(shell(code, "sleep 1234.5 & sleep 1234.5"))
    assert (await started.kill()).reason is EndReason.KILLED
    assert processes_with("1234.5") == []
    assert (await started.kill()).reason is EndReason.KILLED


async def test_no_zombie_is_left(box: Sandbox, code: Path) -> None:
    """Orphans are ours while a sandbox is open, so a zombie would be as well."""
    before = _zombies()
    started = [await box.start(shell(code, "sleep 600 & exit 0")) for _ in range(3)]
    for each in started:
        await each.wait()
    assert _zombies() - before == set()


def test_a_helper_that_ends_after_its_sandbox_is_waited_for() -> None:
    """On a busy machine it does: bubblewrap leaves without waiting for it."""
    bubblewrap = subprocess.Popen(["sleep", "600"], process_group=0)
    helper = subprocess.Popen(["sleep", "600"], process_group=bubblewrap.pid)
    bubblewrap.kill()
    bubblewrap.wait()
    assert not kernel.reap_sandbox(-1, bubblewrap.pid)
    helper.kill()
    os.waitid(os.P_PID, helper.pid, os.WEXITED | os.WNOWAIT)
    assert kernel.reap_sandbox(-1, bubblewrap.pid)
    with pytest.raises(ChildProcessError):
        os.waitpid(helper.pid, os.WNOHANG)
    helper.returncode = 0


async def test_nothing_is_left_of_one_that_could_not_be_set_up(box: Sandbox, code: Path) -> None:
    """bubblewrap runs already and waits for its word when the door can't be opened."""
    before = _zombies()
    with pytest.raises(Unavailable, match="the sandbox could not be set up"):
        await box.start(shell(code, "sleep 3456.7", listen=(65_536,)))
    assert _zombies() - before == set()
    assert processes_with("3456.7") == []
    assert (await heard(box, shell(code, "echo again")))[2] == "again\n"


_EARLY_DOOR = """
import fcntl, os, socket, struct, sys
sys.path.insert(0, sys.argv[1])
import launcher
launcher.call("unshare", 0x10000000 | 0x40000000)
door = launcher.listen(9001)
control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 0x41))  # the interface is up
caller = socket.create_connection(("127.0.0.1", 9001), timeout=10)
accepted, _ = door.accept()
accepted.sendall(b"heard")
print(caller.recv(5).decode())
"""


def test_the_door_is_open_before_the_sandbox_has_its_loopback_address() -> None:
    """bubblewrap says who its child is before the child has set its network up."""
    folder = Path(launcher.__file__).parent
    run = [sys.executable, "-I", "-S", "-c", _EARLY_DOOR, str(folder)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("heard\n", "")


def _zombies() -> set[str]:
    """Children of this process that nobody has asked for; other tests may have left some."""
    return {
        folder.name
        for folder in Path("/proc").glob("[0-9]*")
        if "State:\tZ" in (status := _status(folder)) and f"PPid:\t{os.getpid()}\n" in status
    }


async def test_closing_ends_what_runs(box: Sandbox, code: Path) -> None:
    started = [await box.start(shell(code, "sleep 2345.6")) for _ in range(3)]
    await box.close()
    assert {(await each.wait()).reason for each in started} == {EndReason.KILLED}
    assert processes_with("2345.6") == []


async def test_many_start_at_once_each_for_itself(box: Sandbox, code: Path) -> None:
    runs = [heard(box, shell(code, f"echo {number}; exit {number}")) for number in range(6)]
    assert await asyncio.gather(*runs) == [(n, EndReason.EXITED, f"{n}\n") for n in range(6)]


async def test_no_descriptor_and_no_cgroup_is_left_over(box: Sandbox, code: Path) -> None:
    await heard(box, shell(code, "true"))
    await box.close()
    before = len(os.listdir("/proc/self/fd"))
    again = await Sandbox.open()
    for _ in range(3):
        await heard(again, shell(code, "true"))
    await again.close()
    assert len(os.listdir("/proc/self/fd")) == before
    parent = check.find_parent()
    folders = set(parent.folders.values()) if parent is not None else set()
    assert [left for folder in folders for left in folder.glob(f"tracelake-sandbox-{os.getpid()}-*")] == []


@pytest.mark.parametrize("launcher", LAUNCHERS)
async def test_a_worker_that_is_killed_takes_its_sandboxes_along(launcher: str) -> None:
    token = f"orphan-{launcher}-{os.getpid()}"
    program = "import os, time; os.fork(); os.write(1, b'x'); time.sleep(600)"
    runs = [Run(argv=[PYTHON, "-I", "-S", "-c", program, token], seconds=600)]
    with subprocess.Popen(driver_command(launcher), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
        assert driver.stdin is not None
        driver.stdin.write(msgspec.json.encode(runs))
        driver.stdin.close()
        async with asyncio.timeout(60):
            while len(processes_with(token)) < 3:
                await asyncio.sleep(0.02)
        driver.kill()
    async with asyncio.timeout(60):
        while processes_with(token) or _left_by(driver.pid):
            await asyncio.sleep(0.02)


def _left_by(worker: int) -> list[Path]:
    """Its cgroups, after the next worker has looked for such things."""
    parent = check.find_parent()
    if parent is None:
        return []
    parent.sweep()
    return [
        left for folder in parent.folders.values() for left in folder.glob(f"tracelake-sandbox-{worker}-*")
    ]


async def test_a_spec_that_would_be_misread_is_refused(box: Sandbox, code: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        wrong = [
            shell(code, "true", argv=["/bin/sh", "-c", "a\0b"]),
            shell(code, "true", env={"A=B": "c"}),
            shell(code, "true", env={"A": "b\0--share-net"}),
            shell(code, "true", runtime=[ReadOnlyBind(code, "/etc")]),
            shell(code, "true", runtime=[ReadOnlyBind(code, "/opt/../etc")]),
            shell(code, "true", stdout=file.fileno()),
        ]
        for spec in wrong:
            with pytest.raises(Invalid):
                await box.start(spec)


async def test_a_program_that_is_not_there_ends_with_a_word_in_its_log(box: Sandbox, code: Path) -> None:
    returncode, reason, said = await heard(box, shell(code, "", argv=["/var/task/nothing"]))
    assert (returncode != 0, reason) == (True, EndReason.EXITED)
    assert "/var/task/nothing" in said


async def test_without_bubblewrap_untrusted_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "find_program", lambda: None)
    monkeypatch.setattr(sandbox, "_proved", {})
    with pytest.raises(Unavailable, match="scripts/install-system-packages") as refused:
        await Sandbox.open()
    assert refused.value.reason == "SandboxUnavailable"
    assert not (await Sandbox.check()).available


async def test_a_bubblewrap_that_does_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that just runs the program is as bad as none."""
    impostor = tmp_path / "bwrap"
    impostor.write_text('#!/bin/sh\nshift 3\nexec "$@"\n')
    impostor.chmod(0o755)
    monkeypatch.setattr(check, "find_program", lambda: impostor)
    report = await Sandbox.check()
    assert not report.available


@pytest.mark.parametrize("hole", ["the host's loopback network", "ptrace"])
async def test_a_sandbox_with_a_hole_is_found_out_and_refused(
    monkeypatch: pytest.MonkeyPatch, hole: str
) -> None:
    assert check.find_program() is not None, MISSING
    if hole == "ptrace":
        allow_all = b"\x06\x00\x00\x00\x00\x00\xff\x7f"
        monkeypatch.setattr(seccomp, "build_filter", lambda *_, **__: allow_all)
    else:
        monkeypatch.setattr(layout, "_ISOLATION", (*layout._ISOLATION, "--share-net"))
    report = await Sandbox.check()
    assert not report.available
    assert hole in report.problems[0].message
