"""An operator sees the objects that it may read, to be read, and its own attempt's folder; what it has reported
belongs to the platform, whatever it kept of it.

Each attempt here is an operator that keeps something, in a process that goes on living after its files were taken
over. ``test_operator_boundaries`` runs all of it again as a user without power.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from tests.support.operator_scene import attempt, clear, make_home, running_host, spawn
from tests.support.worker_tasks import payload
from tracelake.contracts.dispatcher_api import InputFile, OutputIn, PayloadOutput
from tracelake.domain.errors import TracelakeError
from tracelake.worker.host.client import HostSpec, OperatorHost, OperatorProcess
from tracelake.worker.staging import AttemptObjects

pytestmark = pytest.mark.asyncio(loop_scope="module")
AS_ROOT = os.geteuid() == 0
CONTENT = "rows that others rely on"


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


class Attempt:
    """One attempt's staging folder, and a process that may write there."""

    def __init__(self, spec: HostSpec, process: OperatorProcess, version: str) -> None:
        self.process = process
        self.version = version
        self.folder = spec.object_root / version / str(uuid4()) / "1-1"
        output = PayloadOutput(0, "rows", uuid4(), uuid4(), "parquet", 0, staging=f"file://{self.folder}/")
        self.objects = AttemptObjects(spec.object_root, payload(outputs=[output]), process, None)

    @classmethod
    async def begin(cls, host: OperatorHost, version: str | None = None) -> Attempt:
        begun = cls(host.spec, await spawn(host), version or f"dataset/{uuid4()}/version/{uuid4()}")
        await begun.objects.prepare()
        return begun

    async def run(self, code: str) -> Any:
        """What the code printed, as JSON. It finds the folder as ``FOLDER``."""
        told = await attempt(self.process, f"FOLDER = {str(self.folder)!r}\n{code}")
        assert told.finished.status == "Completed", told
        return json.loads(told.output or "null")

    async def report(self) -> None:
        await self.objects.take_over([OutputIn(0, location=f"file://{self.folder}/", row_count=1)])


async def committed(host: OperatorHost, version: str) -> Path:
    """A file of the version, written by an attempt that has ended."""
    writer = await Attempt.begin(host, version)
    await writer.run(f"open(FOLDER + '/part', 'w').write({CONTENT!r})")
    await writer.report()
    await writer.process.kill()
    return writer.folder / "part"


ALTER = """
import ctypes, json, os
def tried(*paths):
    done = []
    def attempt(name, call):
        try:
            call()
            done.append(name)
        except OSError:
            pass
    for path in paths:
        folder = os.path.dirname(path)
        attempt("write", lambda: open(path, "r+b").write(b"x"))
        attempt("append", lambda: open(path, "ab").write(b"x"))
        attempt("truncate", lambda: os.truncate(path, 0))
        attempt("chmod", lambda: os.chmod(path, 0o777))
        attempt("utime", lambda: os.utime(path, (0, 0)))
        attempt("rename away", lambda: os.rename(path, folder + "/moved"))
        attempt("link", lambda: os.link(path, folder + "/linked"))
        attempt("link home", lambda: os.link(path, os.environ["HOME"] + "/linked"))
        attempt("create", lambda: open(folder + "/another", "wb").close())
        attempt("replace", lambda: os.replace(os.environ["HOME"] + "/mine", path))
        attempt("unlink", lambda: os.unlink(path))
        attempt("rename folder", lambda: os.rename(folder, folder + "-moved"))
        attempt("setxattr", lambda: os.setxattr(path, "user.x", b"x"))
    return done
"""


async def test_files_that_it_reads_can_not_be_changed_and_others_are_not_there(host: OperatorHost) -> None:
    spec = host.spec
    version, other = (f"dataset/{uuid4()}/version/{uuid4()}" for _ in range(2))
    path, elsewhere = await committed(host, version), await committed(host, other)
    reader = await Attempt.begin(host)
    await reader.objects.reveal([InputFile(f"file://{path}", 1, 1, 0, 9)])
    code = f"""{ALTER}
open(os.environ["HOME"] + "/mine", "w").write("mine")
print(json.dumps([open({str(path)!r}).read(), tried({str(path)!r}), os.path.exists({str(elsewhere)!r}),
      sorted(os.listdir({str(spec.object_root / "dataset")!r}))]))
"""
    content, done, visible, datasets = await reader.run(code)
    assert (content, done, visible) == (CONTENT, [], False)
    assert datasets == sorted({version.split("/")[1], reader.version.split("/")[1]})
    assert path.read_text() == CONTENT


async def test_staged_files_of_another_attempt_are_out_of_reach(host: OperatorHost) -> None:
    """Also of one that writes the very dataset that it reads."""
    version = f"dataset/{uuid4()}/version/{uuid4()}"
    path = await committed(host, version)
    writer = await Attempt.begin(host, version)
    await writer.run(f"open(FOLDER + '/part', 'w').write({CONTENT!r})")
    reader = await Attempt.begin(host)
    staged = str(writer.folder / "part")
    assert await reader.run(f"import json, os; print(json.dumps(os.path.exists({staged!r})))") is False
    await reader.objects.reveal([InputFile(f"file://{path}", 1, 1, 0, 9)])
    done = await reader.run(f"{ALTER}\nprint(json.dumps(tried({staged!r})))")
    assert done == []
    seen = await reader.run(f"import json, os; print(json.dumps(os.path.exists({staged!r})))")
    # Users who are one to the file system can read it, and no more.
    assert seen is (not AS_ROOT)
    assert (writer.folder / "part").read_text() == CONTENT


KEPT = {
    "a descriptor": "kept = open(path, 'r+b', buffering=0)",
    "a mapping": "import mmap; file = open(path, 'r+b'); kept = mmap.mmap(file.fileno(), 0); file.close()",
    "a second name": "os.link(path, FOLDER + '/linked')",
    "a link": "os.rename(path, FOLDER + '/real'); os.symlink('real', path)",
    "a pipe": "os.unlink(path); os.mkfifo(path)",
}


@pytest.mark.parametrize("kept", [*KEPT])
async def test_what_could_still_be_changed_is_not_taken_over(host: OperatorHost, kept: str) -> None:
    begun = await Attempt.begin(host)
    await begun.run(f"""
import os, signal, sys
path = FOLDER + "/part"
open(path, "w").write({CONTENT!r})
{KEPT[kept]}
sys.kept = locals().copy()
""")
    with pytest.raises(TracelakeError) as refused:
        await begun.report()
    assert refused.value.reason == "OutputUnsafe"


async def test_a_folder_that_was_kept_open_is_of_no_use_once_its_files_are_taken_over(
    host: OperatorHost,
) -> None:
    begun = await Attempt.begin(host)
    await begun.run(f"""
import os, sys
os.mkdir(FOLDER + "/inner")
path = FOLDER + "/inner/part"
open(path, "w").write({CONTENT!r})
sys.kept = {{
    "folder": os.open(FOLDER + "/inner", os.O_RDONLY),
    "path": os.open(FOLDER + "/inner", os.O_PATH),
    "file": os.open(path, os.O_PATH),
    "reader": os.open(path, os.O_RDONLY),
}}
os.chdir(FOLDER + "/inner")
""")
    await begun.report()
    done = await begun.run("""
import ctypes, json, os, sys
done = []
def attempt(name, call):
    try:
        call()
        done.append(name)
    except OSError:
        pass
for kind in ("folder", "path"):
    at = sys.kept[kind]
    attempt(kind + " create", lambda: os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    attempt(kind + " open", lambda: os.open("part", os.O_RDWR, dir_fd=at))
    attempt(kind + " truncate", lambda: os.open("part", os.O_RDONLY | os.O_TRUNC, dir_fd=at))
    attempt(kind + " link", lambda: os.link("part", "linked", src_dir_fd=at, dst_dir_fd=at))
    attempt(kind + " rename", lambda: os.rename("part", "moved", src_dir_fd=at, dst_dir_fd=at))
    attempt(kind + " unlink", lambda: os.unlink("part", dir_fd=at))
    attempt(kind + " mkdir", lambda: os.mkdir("made", dir_fd=at))
    attempt(kind + " chmod", lambda: os.chmod("part", 0o777, dir_fd=at))
    attempt(kind + " chmod folder", lambda: os.fchmod(at, 0o777))
for kind in ("file", "reader"):
    again = f"/proc/self/fd/{sys.kept[kind]}"
    attempt(kind + " write", lambda: os.open(again, os.O_RDWR))
    attempt(kind + " truncate", lambda: os.truncate(again, 0))
    attempt(kind + " chmod", lambda: os.chmod(again, 0o777))
    attempt(kind + " link", lambda: os.link(again, FOLDER + "/again", follow_symlinks=True))
attempt("fchmod", lambda: os.fchmod(sys.kept["reader"], 0o777))
attempt("path", lambda: open(FOLDER + "/inner/part", "r+b"))
print(json.dumps(done))
""")
    assert done == []
    path = begun.folder / "inner" / "part"
    assert path.read_text() == CONTENT
    found = path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o444
    assert found.st_uid == os.geteuid()
    assert path.parent.stat().st_uid == begun.folder.stat().st_uid == os.geteuid()
    assert not stat.S_IMODE(path.parent.stat().st_mode) & 0o022


async def test_mounts_that_a_process_copied_for_itself_are_of_no_use_either(host: OperatorHost) -> None:
    """In a user namespace of its own an operator has power over copies of its mounts."""
    begun = await Attempt.begin(host)
    await begun.run(f"""
import array, ctypes, os, socket, sys
open(FOLDER + "/part", "w").write({CONTENT!r})
ours, theirs = socket.socketpair()
if os.fork() == 0:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(4, 1, 0, 0, 0)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(0x10000000 | 0x20000) == 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {{uid}} 1"), ("gid_map", f"0 {{gid}} 1")):
            try:
                open("/proc/self/" + name, "w").write(text)
            except OSError:
                pass
        socket.send_fds(theirs, [b"x"], [os.open(FOLDER, os.O_RDONLY)])
    theirs.send(b"-")
    os._exit(0)
os.wait()
sys.kept = socket.recv_fds(ours, 1, 1)[1]
""")
    await begun.report()
    done = await begun.run("""
import json, os, sys
done = []
for at in sys.kept:
    for call in (lambda: os.open("part", os.O_RDWR, dir_fd=at), lambda: os.unlink("part", dir_fd=at),
                 lambda: os.chmod("part", 0o777, dir_fd=at)):
        try:
            call()
            done.append("done")
        except OSError:
            pass
print(json.dumps(done))
""")
    assert done == []
    assert (begun.folder / "part").read_text() == CONTENT


async def test_what_an_attempt_left_unreported_is_closed_to_everybody(host: OperatorHost) -> None:
    begun = await Attempt.begin(host)
    await begun.run("open(FOLDER + '/part', 'w').write('half')")
    await begun.objects.close()
    assert await begun.run("import json, os; print(json.dumps(os.path.exists(FOLDER + '/part')))") is False
    found = begun.folder.stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), 0o700)


async def test_a_program_sees_datasets_to_be_read_and_writes_where_it_is_told(host: OperatorHost) -> None:
    spec = host.spec
    version = f"dataset/{uuid4()}/version/{uuid4()}"
    path = await committed(host, version)
    staging = spec.object_root / version / "task" / "1-1"
    staging.mkdir(parents=True)
    (spec.object_root / "export").write_text("somebody's answer")
    code = f"""{ALTER}
import sys
os.environ["HOME"] = os.getcwd()
staging = {str(staging)!r}
print(json.dumps([os.getuid(), open({str(path)!r}).read(), tried({str(path)!r}),
    os.path.exists({str(spec.object_root / "export")!r}), tried(staging + "/none")]), flush=True)
import time
while not os.access(staging, os.W_OK): time.sleep(0.01)
at = os.open(staging, os.O_RDONLY)
open(staging + "/part", "w").write("written")
print(json.dumps("written"), flush=True)
while os.access(staging, os.W_OK): time.sleep(0.01)
print(json.dumps([tried(staging + "/part")]), flush=True)
try:
    os.unlink("part", dir_fd=at)
    print("unlinked", flush=True)
except OSError as error:
    print(error.errno, flush=True)
"""
    read, write = os.pipe()
    lines = os.fdopen(read, "r")
    program = await host.start_program(
        [sys.executable, "-c", code], {"PATH": os.defpath}, log=write, folder=spec.work_folder / "program"
    )
    os.close(write)
    uid, content, done, exports, elsewhere = json.loads(await asyncio.to_thread(lines.readline))
    assert (content, done, exports, elsewhere) == (CONTENT, [], False, [])
    operator = await spawn(host)
    if AS_ROOT:
        assert uid not in (0, operator.owner)
        os.chown(staging, uid, -1)
    place = str(staging.relative_to(spec.object_root))
    await program.grant([place])
    assert json.loads(await asyncio.to_thread(lines.readline)) == "written"
    assert await program.withdraw([place]) == []
    if AS_ROOT:
        os.chown(staging, 0, 0)
    assert json.loads(await asyncio.to_thread(lines.readline)) == [[]]
    assert (await asyncio.to_thread(lines.readline)).strip() != "unlinked"
    assert await program.wait() == 0
    assert (staging / "part").read_text() == "written"
    lines.close()
