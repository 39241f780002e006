"""No operator process can read the worker's credentials or the state database, whatever it tries.

Each test is an operator that tries something, in a process of a real host, with a wrapper that holds secrets. The
last one runs all of them again as a user without power.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import stat
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import pytest_asyncio

from tests.support.operator_scene import (
    SECRETS,
    attempt,
    begin,
    clear,
    make_home,
    run_message,
    running_host,
    spawn,
    until_printed,
)
from tracelake.contracts.dispatcher_api import JobRef
from tracelake.sandbox.accounts import is_ours
from tracelake.worker.host.client import HostSpec, OperatorHost
from tracelake.worker.host.operator_pool import OperatorPool, ProcessKey, process_key

pytestmark = pytest.mark.asyncio(loop_scope="module")
AS_ROOT = os.geteuid() == 0
TOKEN = "worker-token-0123456789abcdef"
AGAIN = "TRACELAKE_TEST_UNPRIVILEGED"


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


@pytest.fixture
def secret_keeper() -> Iterator[int]:
    """A process outside of the view, under this test's user, that anybody of that user could look into."""
    keeper = subprocess.Popen(
        [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"],
        env={"WORKER_TOKEN": TOKEN, "PATH": os.defpath},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with keeper:
        assert keeper.stdout is not None
        keeper.stdout.readline()
        yield keeper.pid
        keeper.kill()


async def tried(host: OperatorHost, code: str) -> Any:
    """What the code printed, as JSON."""
    told = await attempt(await spawn(host), code)
    assert told.finished.status == "Completed", told
    return json.loads(told.output)


async def test_no_secret_of_the_home_can_be_read(host: OperatorHost) -> None:
    spec = host.spec
    assert spec.home is not None
    paths = [str(spec.home / name) for name in SECRETS]
    for path in paths:
        assert Path(path).read_text()
    code = f"""
    import json, os
    def readable(path):
        try:
            with open(path) as file:
                return bool(file.read())
        except OSError:
            return False
    print(json.dumps([path for path in {paths!r} if readable(path)]))
    """
    assert await tried(host, code) == []


async def test_the_home_shows_an_empty_object_root_and_a_folder_of_its_own(host: OperatorHost) -> None:
    spec = host.spec
    (spec.object_root / "committed").write_text("rows")
    other = await spawn(host)
    (other.folder / "left").write_text("by another job")
    code = f"""
    import json, os
    home = {str(spec.home)!r}
    found = sorted(os.path.relpath(os.path.join(folder, name), home)
                   for folder, folders, names in os.walk(home) for name in folders + names)
    own = os.path.relpath(os.path.dirname(os.getcwd()), home)
    print(json.dumps([own, [name for name in found if not name.startswith(own + "/")]]))
    """
    own, seen = await tried(host, code)
    assert seen == ["objects", "work", "work/operators", own]
    assert own.startswith("work/operators/process-")


async def test_no_environment_or_memory_of_another_process_can_be_read(
    host: OperatorHost, secret_keeper: int
) -> None:
    other = await spawn(host)
    code = f"""
    import glob, json, os
    found = []
    for path in glob.glob("/proc/[0-9]*"):
        if path == f"/proc/{{os.getpid()}}":
            continue
        for name in ("environ", "mem", "maps", "fd", "cwd", "root", "task"):
            try:
                full = os.path.join(path, name)
                if name in ("fd", "cwd", "root"):
                    os.listdir(full)
                elif name != "task":
                    with open(full, "rb") as file:
                        file.read(1)
                else:
                    continue
                found.append(full)
            except OSError:
                pass
    visible = os.path.exists("/proc/{secret_keeper}/environ")
    print(json.dumps([found, visible and open("/proc/{secret_keeper}/environ").read()]))
    """
    found, outside = await tried(host, code)
    assert found == []
    assert not outside
    await other.kill()


async def test_the_view_holds_no_process_but_the_hosts_own(host: OperatorHost, secret_keeper: int) -> None:
    code = """
    import json, os
    print(json.dumps(sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())))
    """
    seen = await tried(host, code)
    # The init of the view, and the operator itself.
    assert isinstance(seen, list)
    assert len(seen) == 2
    assert seen[0] == 1


async def test_no_other_process_can_be_traced_or_signalled(host: OperatorHost, secret_keeper: int) -> None:
    other = await spawn(host)
    code = f"""
    import ctypes, json, os, signal
    libc = ctypes.CDLL(None, use_errno=True)
    PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
    done = []
    others = [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]
    for pid in (*others, {secret_keeper}):
        for request in (PTRACE_ATTACH, PTRACE_SEIZE):
            if libc.ptrace(request, pid, None, None) == 0:
                done.append(["ptrace", pid])
    for pid in (1, {secret_keeper}):
        try:
            os.kill(pid, signal.SIGKILL)
            done.append(["kill", pid])
        except OSError:
            pass
    print(json.dumps(done))
    """
    # Its keeper can be sent a signal by a process of the same user, but not one that ends it.
    assert await tried(host, code) == ([] if AS_ROOT else [["kill", 1]])
    assert (await attempt(other, "print('alive')")).output == "alive\n"
    assert Path(f"/proc/{secret_keeper}").exists()


async def test_covers_can_not_be_taken_away(host: OperatorHost) -> None:
    spec = host.spec
    secret = str((spec.home or Path()) / "secrets.json")
    code = f"""
    import ctypes, json, os
    libc = ctypes.CDLL(None, use_errno=True)
    NEWNS, NEWUSER, NEWPID = 0x20000, 0x10000000, 0x20000000
    MNT_DETACH, MS_BIND, MS_REC, MS_MOVE, MS_REMOUNT = 2, 4096, 16384, 8192, 32
    home = {str(spec.home)!r}
    work = {str(spec.work_folder)!r}

    def attack():
        targets = [line.split()[4] for line in open("/proc/self/mountinfo")]
        for target in {{home, "/proc", "/root", *targets}}:
            libc.umount2(target.encode(), MNT_DETACH)
        for target in (home, "/"):
            libc.mount(b"/", work.encode(), None, ctypes.c_ulong(MS_BIND), None)
            libc.mount(b"none", target.encode(), None, ctypes.c_ulong(MS_REMOUNT), None)
        libc.mount(home.encode(), work.encode(), None, ctypes.c_ulong(MS_MOVE), None)
        libc.mount(os.path.dirname(home).encode(), work.encode(), None, ctypes.c_ulong(MS_BIND), None)
        found = []
        for path in ({secret!r}, work + "/home/secrets.json", work + {secret!r}, work + "/secrets.json"):
            try:
                if open(path).read():
                    found.append(path)
            except OSError:
                pass
        return found

    found = attack()
    read, write = os.pipe()
    if os.fork() == 0:
        uid, gid = os.getuid(), os.getgid()
        libc.unshare(NEWUSER | NEWNS | NEWPID)
        try:
            open("/proc/self/setgroups", "w").write("deny")
            open("/proc/self/uid_map", "w").write(f"0 {{uid}} 1")
            open("/proc/self/gid_map", "w").write(f"0 {{gid}} 1")
        except OSError:
            pass
        os.write(write, json.dumps(attack()).encode())
        os._exit(0)
    os.close(write)
    found += json.loads(os.read(read, 65536))
    os.wait()
    print(json.dumps(found))
    """
    assert await tried(host, code) == []


async def test_no_power_is_left_and_none_can_be_gained(host: OperatorHost) -> None:
    code = """
    import json, os
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    kept = {name: int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    print(json.dumps([kept, status["NoNewPrivs"].strip(), os.getresuid(), os.getgroups()]))
    """
    kept, no_new_privileges, uids, groups = await tried(host, code)
    assert set(kept.values()) == {0}
    assert no_new_privileges == "1"
    assert 0 not in uids
    assert len(set(uids)) == 1
    assert is_ours(uids[0]) if AS_ROOT else uids[0] == os.getuid()
    assert not AS_ROOT or groups == []


REFUSED_CALLS = """
import ctypes, fcntl, json, os, platform
libc = ctypes.CDLL(None, use_errno=True)
numbers = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}[platform.machine()]
add_key, request_key, keyctl = numbers
tries = {
    "add_key": lambda: libc.syscall(add_key, b"user", b"note", b"x", 1, ctypes.c_int(-4)),
    "request_key": lambda: libc.syscall(request_key, b"user", b"note", None, ctypes.c_int(-4)),
    "keyctl": lambda: libc.syscall(keyctl, 0, ctypes.c_int(-3), 0),
}
done = []
for name, attempt in tries.items():
    if attempt() >= 0 or ctypes.get_errno() != 1:
        done.append(name)
file = os.open("own", os.O_RDWR | os.O_CREAT)
folder = os.open(".", os.O_RDONLY)
for name, held, command, value in (
    ("lease", file, fcntl.F_SETLEASE, fcntl.F_WRLCK),
    ("notice", folder, fcntl.F_NOTIFY, fcntl.DN_CREATE),
):
    try:
        fcntl.fcntl(held, command, value)
        done.append(name)
    except PermissionError:
        pass
fcntl.flock(file, fcntl.LOCK_EX)
print(json.dumps(done), flush=True)
"""


async def test_neither_keyrings_nor_leases_can_be_had(host: OperatorHost) -> None:
    """Keyrings belong to a uid that others are given, leases make a file's readers wait. Also for a program."""
    spec = host.spec
    assert await tried(host, REFUSED_CALLS) == []
    read, write = os.pipe()
    program = await host.start_program(
        [sys.executable, "-c", REFUSED_CALLS], {}, log=write, folder=spec.work_folder / "program"
    )
    os.close(write)
    assert await program.wait() == 0
    assert json.loads(os.read(read, 4096)) == []
    os.close(read)


async def test_only_the_channel_and_nothing_else_is_inherited(host: OperatorHost) -> None:
    code = """
    import json, os, stat
    kinds = []
    for name in os.listdir("/proc/self/fd"):
        try:
            mode = os.fstat(int(name)).st_mode
        except OSError:
            continue
        if int(name) > 2:
            kinds.append(stat.S_IFMT(mode))
    print(json.dumps(sorted(kinds)))
    """
    assert await tried(host, code) == [stat.S_IFSOCK]


async def test_shared_memory_of_other_programs_is_out_of_sight(host: OperatorHost, tmp_path: Path) -> None:
    outside = Path("/dev/shm") / f"tracelake-test-{os.getpid()}"
    outside.write_text(TOKEN)
    outside.chmod(0o644)
    try:
        code = "import json, os; print(json.dumps(os.listdir('/dev/shm')))"
        assert await tried(host, code) == []
    finally:
        outside.unlink()


async def test_a_hidden_file_outside_of_the_home_is_blank(spec: HostSpec, tmp_path: Path) -> None:
    hidden = tmp_path / "elsewhere" / "provider_secrets"
    hidden.parent.mkdir()
    hidden.write_text(TOKEN)
    folder = tmp_path / "vault"
    folder.mkdir()
    (folder / "key").write_text(TOKEN)
    seen = replace(spec, hidden=(hidden, folder), shown=(hidden.parent, tmp_path / "tried_operators.py"))
    async with running_host(seen) as host:
        code = f"""
        import json, os
        found = []
        for path in {[str(hidden), str(folder / "key")]!r}:
            try:
                found.append(open(path).read())
            except OSError:
                found.append("")
        print(json.dumps(found))
        """
        assert await tried(host, code) == ["", ""]


async def test_nothing_of_the_machine_can_be_written_to(host: OperatorHost, tmp_path: Path) -> None:
    """Not even what this user owns: the interpreter that the wrapper runs on is among it."""
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    inside = ["/", "/etc", "/var", "/run", "/run/lock", "/dev", "/home", "/opt", "/usr", "/dev/mqueue"]
    places = [sys.prefix, str(Path(json.__file__).parent), *inside, str(tmp_path), str(open_to_all)]
    name = f"planted-{uuid4()}"
    code = f"""
    import json, os
    done = []
    for place in [*{places!r}, os.environ["HOME"]]:
        try:
            with open(os.path.join(place, {name!r}), "w"):
                done.append(place)
        except OSError:
            pass
    print(json.dumps([done, os.environ["HOME"]]))
    """
    done, home = await tried(host, code)
    # In its own /tmp it may write, also where that leads to the home of a test.
    assert [place for place in done if not place.startswith("/tmp/")] == (
        [home] if home[:5] != "/tmp/" else []
    )
    assert home in done
    assert [place for place in places if (Path(place) / name).exists()] == []


async def test_what_one_process_leaves_no_other_one_finds(host: OperatorHost) -> None:
    places = ("/tmp", "/var/tmp", "/dev/shm")
    plant = f"""
    import json, os
    work = os.path.dirname(os.environ["HOME"])
    for place in (*{places!r}, os.environ["HOME"], work):
        open(os.path.join(place, "planted"), "w").write("for the next job")
    print(json.dumps([os.getuid(), work]))
    """
    first, folder = await tried(host, plant)
    assert all(not (Path(place) / "planted").exists() for place in places)
    look = f"""
    import json, os
    work = os.path.dirname(os.environ["HOME"])
    found = [os.path.join(at, name) for place in (*{places!r}, os.path.dirname(work))
             for at, _, names in os.walk(place) for name in names if name == "planted"]
    print(json.dumps([os.getuid(), found, os.path.exists({folder!r})]))
    """
    second, found, visible = await tried(host, look)
    assert (found, visible) == ([], False)
    assert not AS_ROOT or first != second


async def test_a_process_of_another_job_can_neither_be_seen_nor_signalled(host: OperatorHost) -> None:
    other = await spawn(host)
    output = await begin(other, "print('there', flush=True); import time; time.sleep(600)")
    await until_printed(output, "there")
    os.close(output)
    code = f"""
    import json, os, signal
    # Every number that a process may have, and the one that it has outside.
    own = set(map(int, os.listdir("/proc/self/task")))
    for pid in [*range(2, 5000), {other.pid}]:
        if pid not in own:
            for number in (signal.SIGSTOP, signal.SIGKILL):
                try:
                    os.kill(pid, number)
                except OSError:
                    pass
    try:
        os.kill(-1, signal.SIGKILL)
    except OSError:
        pass
    print(json.dumps(sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())))
    """
    assert await tried(host, code) == [1, 2]
    state = Path(f"/proc/{other.pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    assert state not in (b"T", b"Z", b"X")
    assert other.alive


async def test_a_neighbour_on_the_machine_reaches_nothing_through_proc(host: OperatorHost) -> None:
    """Whoever it is: here it is ``nobody``, whom other programs of the machine run as too."""
    spec = host.spec
    if not AS_ROOT:
        # A user's own processes are one to the machine.
        return
    process = await spawn(host)
    read, write = os.pipe()
    program = await host.start_program(
        [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(600)"],
        {"TOKEN": TOKEN},
        log=write,
        folder=spec.work_folder / "program",
    )
    os.close(write)
    await until_printed(read, "up")
    os.close(read)
    keepers = [_parent(process.pid), _parent(program.pid), _parent(_parent(program.pid))]
    pids = [process.pid, program.pid, *keepers]
    owners = {pid: Path(f"/proc/{pid}/status").read_text().split("Uid:")[1].split()[0] for pid in pids}
    nobody = pwd.getpwnam("nobody").pw_uid
    assert {owners[pid] for pid in keepers} == {"0"}
    assert owners[process.pid] != owners[program.pid]
    assert all(is_ours(int(owners[pid])) for pid in (process.pid, program.pid))
    code = f"""
import json, os, signal
os.setgroups([]); os.setresgid({nobody}, {nobody}, {nobody}); os.setresuid({nobody}, {nobody}, {nobody})
done = []
for pid in {pids!r}:
    for name in ("environ", "mem", "maps", "fd", "cwd", "root", "map_files", "auxv", "stack"):
        path = f"/proc/{{pid}}/{{name}}"
        try:
            os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
            done.append(path)
        except OSError:
            pass
        try:
            os.readlink(path)
            done.append(path)
        except OSError:
            pass
    try:
        os.kill(pid, 0)
        done.append(f"signal to {{pid}}")
    except OSError:
        pass
    if {TOKEN!r}.encode() in open(f"/proc/{{pid}}/cmdline", "rb").read():
        done.append(f"cmdline of {{pid}}")
print(json.dumps(done))
"""
    seen = await asyncio.to_thread(subprocess.check_output, [sys.executable, "-c", code])
    assert json.loads(seen) == []


async def test_an_operator_reaches_nothing_of_a_program(host: OperatorHost) -> None:
    """Spark is such a program: its token and its files are not for operators to take."""
    spec = host.spec
    read, write = os.pipe()
    code = "open('secret', 'w').write('x'); print('up', flush=True); import time; time.sleep(600)"
    program = await host.start_program(
        [sys.executable, "-c", code], {"TOKEN": TOKEN}, log=write, folder=spec.work_folder / "program"
    )
    os.close(write)
    await until_printed(read, "up")
    os.close(read)
    secret = spec.work_folder / "program" / "secret"
    assert secret.exists()
    look = f"""
    import glob, json, os
    found = [path for path in glob.glob("/proc/[0-9]*/environ") if path != f"/proc/{{os.getpid()}}/environ"
             and os.access(path, os.R_OK)]
    print(json.dumps([found, os.path.exists("/proc/{program.pid}"), os.path.exists({str(secret)!r})]))
    """
    found, visible, reachable = await tried(host, look)
    # As a user the keeper's may be opened, and says nothing.
    assert [path for path in found if path != "/proc/1/environ"] == []
    assert (visible, reachable) == (False, False)
    assert (await program.kill()) is None


async def test_a_program_finds_nothing_of_its_last_life(host: OperatorHost) -> None:
    """Spark's tasks write in its folder, and could leave a module there for the server that is started next."""
    spec = host.spec
    listings = []
    for _ in range(2):
        read, write = os.pipe()
        code = (
            "import os; print(sorted(os.listdir('.'))); open('msgspec.py', 'w'); os.makedirs('conf/planted')"
        )
        program = await host.start_program(
            [sys.executable, "-I", "-c", code], {}, log=write, folder=spec.work_folder / "program"
        )
        os.close(write)
        assert await program.wait() == 0
        listings.append(os.read(read, 4096))
        os.close(read)
    assert listings == [b"['tmp']\n"] * 2


PATCH = """
from tracelake.operators.context import Context
if not hasattr(Context, "patched"):
    Context.patched = {by!r}
"""
SHOW = "from tracelake.operators.context import Context; print(getattr(Context, 'patched', None))"


async def test_code_that_an_operator_patched_meets_no_other_job(host: OperatorHost) -> None:
    def used(dag: str, job: str, **config: object) -> ProcessKey:
        task = run_message("try_code", **config).task
        return process_key(msgspec.structs.replace(task, job=JobRef(dag, job)))

    pool = OperatorPool(host, 2)
    mine = used("team", "a_job")
    process = await pool.take(mine)
    await attempt(process, PATCH.format(by="team"))
    await pool.give_back(process, reusable=True)
    again = await pool.take(mine)
    assert again is process
    assert (await attempt(again, SHOW)).output == "team\n"
    await pool.give_back(again, reusable=True)
    for other in (
        used("team", "b_job"),
        used("other", "a_job"),
        used("team_a", "job"),
        used("team", "a_job", x=1),
    ):
        taken = await pool.take(other)
        assert (await attempt(taken, SHOW)).output == "None\n"
        await pool.give_back(taken, reusable=True)
    await pool.close()


async def test_code_that_runs_when_a_source_is_loaded_meets_no_other_source(
    spec: HostSpec, tmp_path: Path
) -> None:
    hostile = tmp_path / "hostile_operators.py"
    hostile.write_text(
        PATCH.format(by="a source")
        + "from tracelake.operators.registry import operator\n@operator('hostile')\ndef hostile(ctx):\n    pass\n"
    )
    async with running_host(replace(spec, operators=(*spec.operators, str(hostile)))) as host:
        assert host.operators["hostile"] == str(hostile)
        assert host.operators["noop"] is None
        pool = OperatorPool(host, 1)
        warm = await pool.take(process_key(run_message("hostile").task))
        assert warm.source == str(hostile)
        process = await pool.take(process_key(run_message("try_code").task))
        assert (await attempt(process, SHOW)).output == "None\n"
        fresh = await pool.take(process_key(run_message("noop").task))
        assert fresh.source is None
        await pool.close()


async def test_the_wrapper_itself_can_not_be_looked_into(tmp_path: Path) -> None:
    """Even without a view of their own, where its processes are seen by everybody."""
    make_home(tmp_path)
    token = f"token-{uuid4()}"
    mode = "required" if AS_ROOT else "never"
    wrapper = subprocess.Popen(
        [sys.executable, "-m", "tests.support.operator_scene", str(tmp_path), mode],
        env={**os.environ, "WORKER_TOKEN": token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    code = f"""
    import glob
    for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/task/*/environ"):
        try:
            if {token!r}.encode() in open(path, "rb").read():
                print("found in", path)
        except OSError:
            pass
    for name in ("mem", "maps", "auxv"):
        try:
            open(f"/proc/{wrapper.pid}/{{name}}", "rb").read(1)
            print("opened", name)
        except OSError:
            pass
    print("looked everywhere", flush=True)
    import time
    time.sleep(600)
    """
    with wrapper:
        assert wrapper.stdin is not None
        assert wrapper.stdout is not None
        try:
            wrapper.stdin.write(textwrap.dedent(code).encode())
            wrapper.stdin.close()
            first = wrapper.stdout.readline().decode()
            assert first == "looked everywhere\n"
        finally:
            wrapper.kill()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


async def test_all_of_it_holds_for_a_user_without_power_too(tmp_path: Path) -> None:
    if not AS_ROOT or AGAIN in os.environ:
        # It has just been shown.
        return
    folder = tmp_path / "unprivileged"
    folder.mkdir()
    root = Path(__file__).parents[2]
    tests = (
        "tests/invariants/test_operator_boundaries.py",
        "tests/invariants/test_operator_objects.py",
        "tests/invariants/test_operator_sources.py",
        "tests/invariants/test_hostile_trees.py",
        "tests/invariants/test_keyrings.py",
        "tests/integration/worker/test_operator_host.py",
    )
    options = ("-q", "-x", "-p", "no:cacheprovider", "--basetemp", str(folder / "tmp"))
    pytest_again = [sys.executable, "-m", "pytest", *options, *tests]
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tests.support.unprivileged", str(folder), *pytest_again],
        cwd=root,
        env={**os.environ, AGAIN: "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
