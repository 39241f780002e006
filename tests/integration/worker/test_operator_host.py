"""The operator host: starts processes and programs, and ends them with everything that they left behind."""

from __future__ import annotations

import asyncio
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.operator_scene import (
    HELD,
    attempt,
    begin,
    clear,
    code_that_holds,
    held_folder,
    is_held,
    make_home,
    run_message,
    running_host,
    spawn,
    until_printed,
    until_released,
)
from tracelake.contracts.operator_protocol import Cancel, Finished
from tracelake.domain.errors import Invalid, TracelakeError, Unavailable
from tracelake.worker.host.client import HostSpec, OperatorGone, OperatorHost, OperatorProcess
from tracelake.worker.host.operator_pool import MAX_RUNS, OperatorPool, process_key

pytestmark = pytest.mark.asyncio(loop_scope="module")
AS_ROOT = os.geteuid() == 0
USE = process_key(run_message("try_code").task)


@pytest.fixture
def spec(tmp_path: Path) -> HostSpec:
    """Of a host of the test's own."""
    return make_home(tmp_path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_host(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OperatorHost]:
    async with running_host(make_home(tmp_path_factory.mktemp("shared"))) as host:
        yield host


@pytest_asyncio.fixture(loop_scope="module")
async def host(shared_host: OperatorHost) -> AsyncIterator[OperatorHost]:
    """Of all tests of this file. Nothing of a test is left on it for the next one."""
    yield shared_host
    assert not shared_host.has_ended()
    await clear(shared_host)


async def test_an_attempt_runs_and_the_process_is_ready_for_the_next_one(host: OperatorHost) -> None:
    process = await spawn(host)
    for number in range(3):
        told = await attempt(process, f"print('attempt', {number})")
        assert (told.finished.status, told.output) == ("Completed", f"attempt {number}\n")
        assert process.ready


async def test_modules_that_were_not_loaded_before_can_still_be_imported(host: OperatorHost) -> None:
    told = await attempt(
        await spawn(host),
        """
        import importlib, sys
        for name in ("sqlite3", "wave", "xml.dom.minidom", "httpx", "structlog"):
            assert name not in sys.modules, name
            importlib.import_module(name)
        import subprocess
        print(subprocess.check_output([sys.executable, "-c", "import decimal; print(decimal.Decimal(7))"]))
        """,
    )
    assert told.finished.status == "Completed", told
    assert told.output == "b'7\\n'\n"


async def test_processes_have_different_numbers_that_are_true_outside(host: OperatorHost) -> None:
    first, second = await spawn(host), await spawn(host)
    assert first.pid != second.pid
    for process in (first, second):
        assert Path(f"/proc/{process.pid}").exists()
        await process.kill()
        assert not Path(f"/proc/{process.pid}").exists()


async def test_the_environment_is_the_attempts_own(host: OperatorHost) -> None:
    told = await attempt(
        await spawn(host), "import os; print(sorted(os.environ))", {"TRACE_TASK_CAPABILITY_TOKEN": "token"}
    )
    assert told.output == "['HOME', 'LANG', 'PATH', 'TMPDIR', 'TRACE_TASK_CAPABILITY_TOKEN']\n"


async def test_copies_draw_different_random_numbers(host: OperatorHost) -> None:
    code = "import random, uuid; print(random.random(), uuid.uuid4())"
    first, second = [await attempt(await spawn(host), code) for _ in range(2)]
    assert first.output != second.output


async def test_who_ignores_signals_is_killed_with_its_children(host: OperatorHost) -> None:
    spec = host.spec
    process = await spawn(host, HELD)
    code = """
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(write, 1)
        hold("child")
    os.read(read, 100)
    hold("parent")
    """
    output = await begin(process, code_that_holds(held_folder(spec), code))
    await until_printed(output, "holding parent")
    os.close(output)
    held = [held_folder(spec) / name for name in ("parent", "child")]
    assert [is_held(path) for path in held] == [True, True]
    await process.kill()
    assert [is_held(path) for path in held] == [False, False]
    with pytest.raises(OperatorGone):
        await process.receive()


DAEMON = """
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.dup2(write, 1)
        hold("daemon")
    os._exit(0)
os.wait()
assert b"holding" in os.read(read, 100)
print("daemon is there", flush=True)
"""


async def test_a_daemon_is_found_and_ends_with_its_attempt(host: OperatorHost) -> None:
    spec = host.spec
    process = await spawn(host, HELD)
    told = await attempt(process, code_that_holds(held_folder(spec), DAEMON))
    assert told.finished.status == "Completed"
    assert not told.finished.reusable
    await process.kill()
    assert not is_held(held_folder(spec) / "daemon")


async def test_a_daemon_ends_when_its_operator_dies(host: OperatorHost) -> None:
    spec = host.spec
    process = await spawn(host, HELD)
    code = code_that_holds(held_folder(spec), DAEMON + "os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(OperatorGone, match="SIGSEGV"):
        await attempt(process, code)
    await until_released(held_folder(spec) / "daemon")
    assert (await attempt(await spawn(host), "print(1)")).output == "1\n"


async def test_many_leftovers_in_chains_and_groups_of_their_own_are_all_gone(host: OperatorHost) -> None:
    spec = host.spec
    code = """
    read, write = os.pipe()
    for number in range(20):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setpgid(0, 0)
                os.dup2(write, 1)
                hold(f"left-{number}")
            time.sleep(60 * (number % 2))
            os._exit(0)
    seen = b""
    while seen.count(b"holding") < 20:
        seen += os.read(read, 4096)
    """
    process = await spawn(host, HELD)
    assert not (await attempt(process, code_that_holds(held_folder(spec), code))).finished.reusable
    await process.kill()
    assert [path.name for path in held_folder(spec).glob("left-*") if is_held(path)] == []
    assert len(list(held_folder(spec).glob("left-*"))) == 20


@pytest.mark.parametrize("mode", ["required", *([] if AS_ROOT else ["never"])])
async def test_a_killed_wrapper_leaves_no_process(tmp_path: Path, mode: str) -> None:
    spec = make_home(tmp_path)
    code = code_that_holds(held_folder(spec), DAEMON + "hold('operator')")
    wrapper = subprocess.Popen(
        [sys.executable, "-m", "tests.support.operator_scene", str(tmp_path), mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with wrapper:
        assert wrapper.stdin is not None
        assert wrapper.stdout is not None
        wrapper.stdin.write(code.encode())
        wrapper.stdin.close()
        await until_printed(wrapper.stdout.fileno(), "holding operator")
        assert is_held(held_folder(spec) / "daemon")
        assert is_held(held_folder(spec) / "operator")
        wrapper.kill()
    for name in ("daemon", "operator"):
        await until_released(held_folder(spec) / name)


async def test_how_a_process_ended_is_told(host: OperatorHost) -> None:
    for code, why in (
        ("import os; os._exit(3)", "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    ):
        with pytest.raises(OperatorGone, match=why):
            await attempt(await spawn(host), code)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"\x00\x00\x00\x05hello", "not a message"),
        (b"\xff\xff\xff\xff", "at most"),
        (b'\x00\x00\x00\x10{"type":"weird"}', "not a message"),
        (b"\x00\x00\x00\x50{}", "within a message"),
    ],
)
async def test_what_is_no_message_ends_the_conversation(host: OperatorHost, said: bytes, why: str) -> None:
    process = await spawn(host)
    code = f"""
    import os, socket, stat
    for descriptor in range(3, 50):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                channel = socket.socket(fileno=descriptor)
                break
        except OSError:
            pass
    channel.sendall({said!r})
    channel.shutdown(socket.SHUT_WR)
    import time
    time.sleep(600)
    """
    with pytest.raises(OperatorGone, match=why):
        await attempt(process, code)
    await process.kill()


async def test_an_operator_that_floods_or_does_not_listen_can_still_be_killed(host: OperatorHost) -> None:
    process = await spawn(host)
    output = await begin(
        process,
        """
        import os, signal
        print("stopping", flush=True)
        while True:
            ctx.progress(text="x" * 1000)
        """,
    )
    await until_printed(output, "stopping")
    os.close(output)
    await process.receive()
    os.kill(process.pid, signal.SIGSTOP)
    for _ in range(30):
        await process.send(Cancel("x" * 1_000_000))
    with pytest.raises(OperatorGone, match="doesn't read"):
        await process.send(Cancel("x" * 10_000_000))
    await process.kill()


async def test_a_program_runs_with_its_log_environment_and_folder(host: OperatorHost) -> None:
    spec = host.spec
    read, write = os.pipe()
    program = await host.start_program(
        ["/bin/sh", "-c", "pwd; echo $ANSWER; env | wc -l; exit 7"],
        {"ANSWER": "42"},
        log=write,
        folder=spec.work_folder / "program",
    )
    os.close(write)
    assert await program.wait() == 7
    said = os.read(read, 4096).decode().split()
    os.close(read)
    assert said[:2] == [str(spec.work_folder / "program"), "42"]
    # The shell adds PWD and its like.
    assert int(said[2]) <= 4


async def test_a_program_that_is_killed_takes_its_children_along(host: OperatorHost) -> None:
    spec = host.spec
    code = """
    import os
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.dup2(write, 1)
        hold("child")
    os.read(read, 100)
    hold("program")
    """
    read, write = os.pipe()
    folder = spec.work_folder / "program"
    argv = [sys.executable, "-c", code_that_holds(folder, code)]
    program = await host.start_program(argv, {}, log=write, folder=spec.work_folder / "program")
    os.close(write)
    await until_printed(read, "holding program")
    os.close(read)
    assert is_held(folder / "child")
    # The folder goes with the program; its files are still to be asked who holds them.
    names = ("child", "program")
    files = {name: os.open(folder / name, os.O_RDWR) for name in names}
    await program.kill()
    assert await program.wait() == -signal.SIGKILL
    assert not folder.exists()
    for descriptor in files.values():
        assert not is_held(Path(f"/proc/self/fd/{descriptor}"))
        os.close(descriptor)


async def test_a_program_that_does_not_exist_says_so(host: OperatorHost) -> None:
    spec = host.spec
    read, write = os.pipe()
    program = await host.start_program(
        ["/no/such/program"], {}, log=write, folder=spec.work_folder / "program"
    )
    os.close(write)
    assert await program.wait() == 127
    assert b"No such file" in os.read(read, 4096)
    os.close(read)


async def test_when_the_host_dies_everything_it_started_is_gone(spec: HostSpec) -> None:
    host = await OperatorHost.start(spec)
    process = await spawn(host, HELD)
    waiting = await spawn(host)
    output = await begin(process, code_that_holds(held_folder(spec), DAEMON + "hold('operator')"))
    await until_printed(output, "holding operator")
    os.close(output)
    zygote = _parent(_parent(process.pid))
    os.kill(zygote, signal.SIGKILL)
    await host.died()
    for each in (process, waiting):
        with pytest.raises(OperatorGone):
            await _finished(each)
    for name in ("daemon", "operator"):
        assert not is_held(held_folder(spec) / name)
    with pytest.raises(Unavailable, match="has ended"):
        await spawn(host)
    await host.stop()


async def test_when_the_hosts_guardian_is_killed_everything_is_gone_as_well(spec: HostSpec) -> None:
    host = await OperatorHost.start(spec)
    process = await spawn(host, HELD)
    output = await begin(process, code_that_holds(held_folder(spec), DAEMON + "hold('operator')"))
    await until_printed(output, "holding operator")
    os.close(output)
    os.kill(_parent(_parent(_parent(process.pid))), signal.SIGKILL)
    await host.died()
    for name in ("daemon", "operator"):
        await until_released(held_folder(spec) / name)
    with pytest.raises(OperatorGone):
        await _finished(process)


async def test_a_leftover_that_flees_from_process_to_process_is_caught(host: OperatorHost) -> None:
    spec = host.spec
    code = """
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        lock = os.open(os.path.join(WORK, "fleeing"), os.O_CREAT | os.O_RDWR, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(write, b"x")
        while True:
            if os.fork():
                os._exit(0)
    os.read(read, 1)
    """
    process = await spawn(host, HELD)
    assert not (await attempt(process, code_that_holds(held_folder(spec), code))).finished.reusable
    await process.kill()
    assert not is_held(held_folder(spec) / "fleeing")


async def test_an_operator_file_that_is_broken_is_named(spec: HostSpec, tmp_path: Path) -> None:
    broken = tmp_path / "broken_operators.py"
    broken.write_text("raise RuntimeError('no such luck')")
    with pytest.raises(Invalid, match="no such luck"):
        await OperatorHost.start(replace(spec, operators=(str(broken),)))


async def test_an_operator_file_that_is_not_there_is_named(spec: HostSpec, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"there is no file .*absent\.py"):
        await OperatorHost.start(replace(spec, operators=(str(tmp_path / "absent.py"),)))


async def test_an_operator_file_that_ends_its_process_is_told_and_left_out(
    spec: HostSpec, tmp_path: Path
) -> None:
    broken = tmp_path / "ending_operators.py"
    broken.write_text("import os; os._exit(1)")
    async with running_host(replace(spec, operators=(str(broken), *spec.operators))) as host:
        assert list(host.failed) == [str(broken)]
        assert host.operators["try_code"] == spec.operators[0]
        pool = OperatorPool(host, 1)
        taken = await pool.take(USE)
        assert (await attempt(taken, "print('others go on')")).output == "others go on\n"
        with pytest.raises(
            Unavailable, match=r"no operator 'absent', and .*ending_operators\.py was left out"
        ):
            await pool.take(process_key(run_message("absent").task))
        await pool.close()


async def test_without_namespaces_it_works_or_says_what_is_missing(spec: HostSpec) -> None:
    """Root has to run operators as somebody else, who can't reach the objects without a view of their own."""
    never = replace(spec, namespaces="never")
    if AS_ROOT:
        with pytest.raises(TracelakeError, match="can't read"):
            await OperatorHost.start(never)
        return
    async with running_host(never) as host:
        assert "without a private view" in host.view
        process = await spawn(host, HELD)
        told = await attempt(process, code_that_holds(held_folder(spec), DAEMON))
        assert told.finished.status == "Completed"
        await process.kill()
        assert not is_held(held_folder(spec) / "daemon")


async def test_an_account_that_is_root_shared_or_unknown_is_refused(spec: HostSpec) -> None:
    if not AS_ROOT:
        return
    for user, why in (
        ("root", "root"),
        ("0", "root"),
        ("nobody", "is shared: other programs run as it"),
        (str(pwd.getpwnam("nobody").pw_uid), "is shared: other programs run as it"),
        ("no-such-account", "no account"),
    ):
        with pytest.raises(Invalid, match=why):
            await OperatorHost.start(replace(spec, user=user))


async def test_the_pool_keeps_processes_ready_and_uses_them_again(host: OperatorHost) -> None:
    pool = OperatorPool(host, 2)
    first = await pool.take(USE)
    assert (await attempt(first, "print(1)")).finished.reusable
    await pool.give_back(first, reusable=True)
    seen = {first.pid}
    for _ in range(4):
        process = await pool.take(USE)
        seen.add(process.pid)
        await attempt(process, "print(1)")
        await pool.give_back(process, reusable=True)
    assert len(seen) <= 3
    await pool.close()


async def test_the_pool_gives_no_process_twice_at_a_time(host: OperatorHost) -> None:
    pool = OperatorPool(host, 2)
    taken = await asyncio.gather(*(pool.take(USE) for _ in range(5)))
    assert len({process.pid for process in taken}) == 5
    await asyncio.gather(*(pool.give_back(process, reusable=True) for process in taken))
    await pool.close()


@pytest.mark.parametrize("reason", ["not reusable", "left a child", "ran too often", "dead"])
async def test_the_pool_does_not_use_a_process_again(host: OperatorHost, reason: str) -> None:
    pool = OperatorPool(host, 1)
    process = await pool.take(USE)
    if reason == "left a child":
        await attempt(process, "import subprocess; subprocess.Popen(['sleep', '600'])")
    else:
        await attempt(process, "print(1)")
    if reason == "ran too often":
        process.runs = MAX_RUNS
    if reason == "dead":
        os.kill(process.pid, signal.SIGKILL)
    await pool.give_back(process, reusable=reason != "not reusable")
    await process.hosted.gone
    other = await pool.take(USE)
    assert other is not process
    assert (await attempt(other, "print(1)")).output == "1\n"
    await pool.give_back(other, reusable=True)
    await pool.close()


async def test_a_process_that_dies_while_it_waits_is_replaced(host: OperatorHost) -> None:
    pool = OperatorPool(host, 1)
    process = await pool.take(USE)
    await pool.give_back(process, reusable=True)
    os.kill(process.pid, signal.SIGKILL)
    await process.hosted.gone
    other = await pool.take(USE)
    assert (await attempt(other, "print('alive')")).output == "alive\n"
    await pool.give_back(other, reusable=False)
    await pool.close()


async def test_a_pool_whose_host_died_says_so(spec: HostSpec) -> None:
    async with running_host(spec) as host:
        pool = OperatorPool(host, 1)
        process = await pool.take(USE)
        os.kill(_parent(_parent(process.pid)), signal.SIGKILL)
        await host.died()
        await pool.give_back(process, reusable=True)
        with pytest.raises(Unavailable, match="host has ended"):
            await pool.take(USE)
        await pool.close()


async def test_who_stops_waiting_for_a_process_takes_none_away(host: OperatorHost) -> None:
    pool = OperatorPool(host, 1)
    waiting = [asyncio.create_task(pool.take(USE)) for _ in range(3)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    process = await pool.take(USE)
    await pool.give_back(process, reusable=True)
    await pool.close()


async def test_a_run_of_an_operator_that_is_not_there_fails_and_says_what_there_is(
    host: OperatorHost,
) -> None:
    process = await spawn(host)
    with open(os.devnull, "wb") as log:
        await process.run(run_message("no_such_operator"), log.fileno())
    finished = await process.receive()
    assert isinstance(finished, Finished)
    assert finished.error_message is not None
    assert "no_such_operator" in finished.error_message


async def _finished(process: OperatorProcess) -> Finished:
    while not isinstance(message := await process.receive(), Finished):
        pass
    return message


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
