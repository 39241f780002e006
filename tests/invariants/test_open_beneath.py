"""Nothing below the object root is reached through a link, at whatever moment the link appears.

An operator may write in its attempt's folder while the platform works there with its own rights. The tests put a
folder with a secret where the operator's link leads, and swap folder and link (``RENAME_EXCHANGE``) at every moment
that there is: after each call that the code makes to the system, and as fast as it goes from a thread beside it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tracelake.cli.logs import Tail
from tracelake.contracts.dispatcher_api import PayloadOutput
from tracelake.domain.errors import Forbidden, NotFound, TracelakeError, Unavailable
from tracelake.objects import beneath
from tracelake.objects.base import ObjectLocation, ObjectPrefix
from tracelake.objects.directory import DirectoryStore
from tracelake.objects.verify import verify_output
from tracelake.query.catalog import ColdFile
from tracelake.query.open_relation import ColdFiles
from tracelake.worker.attempt_log import AttemptLog, sweep_logs
from tracelake.worker.staging import prepare_staging

OWN, SECRET = b"own content", b"the secret!"
assert len(OWN) == len(SECRET), "so that a size tells nothing"
_AT_CWD, _EXCHANGE = -100, 2
_CALLS = ("open", "lstat", "stat", "fstat", "scandir", "listdir", "mkdir", "replace", "dup", "close", "chown")
_MOST_CALLS = 200
_SWAPS = 300


@pytest.fixture(autouse=True, params=["by the kernel", "name by name"])
def resolved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "name by name":
        monkeypatch.setattr(beneath, "_kernel_resolves", lambda: False)


class Scene:
    """An attempt's staging with a folder ``swap`` of its own, and beside it a link of the same depth to a folder of
    the platform's that has files of the same names."""

    def __init__(self, folder: Path) -> None:
        self.store = DirectoryStore(folder / "objects")
        self.staging = self.store.staging_prefix(UUID(int=1), UUID(int=2), UUID(int=3), 1, 7)
        self.place = Path("/" + self.staging.path)
        self.outside = folder / "outside"
        for made in (self.place / "swap", self.outside):
            made.mkdir(parents=True)
        self._rows(self.place / "swap", OWN)
        self._rows(self.outside, SECRET)
        (self.place / "link").symlink_to(self.outside)
        self.inside = self.staging.child("swap")

    def _rows(self, folder: Path, content: bytes) -> None:
        (folder / "a").write_bytes(content)
        (folder / "rows_0_9.parquet").write_bytes(content)
        pq.write_table(pa.table({content.decode(): [1]}), folder / "table.parquet")

    def swap(self) -> None:
        failed = ctypes.CDLL(None, use_errno=True).renameat2(
            _AT_CWD, os.fsencode(self.place / "swap"), _AT_CWD, os.fsencode(self.place / "link"), _EXCHANGE
        )
        assert not failed, os.strerror(ctypes.get_errno())

    def untouched(self) -> bool:
        names = {"a", "rows_0_9.parquet", "table.parquet"}
        return {each.name for each in self.outside.iterdir()} == names and (
            self.outside / "a"
        ).read_bytes() == SECRET


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def _read(scene: Scene) -> object:
    return await scene.store.read(scene.inside.location("a"), 100)


async def _read_pieces(scene: Scene) -> object:
    return [piece async for piece in scene.store.read_pieces(scene.inside.location("a"))]


async def _descriptor(scene: Scene) -> object:
    with os.fdopen(scene.store.open_descriptor(scene.inside.location("a")), "rb") as file:
        return file.read()


async def _put(scene: Scene) -> object:
    return await scene.store.put(scene.inside.location("b"), OWN)


async def _put_deeper(scene: Scene) -> object:
    return await scene.store.put(scene.inside.child("new").location("b"), OWN)


async def _replace(scene: Scene) -> object:
    return await scene.store.put(scene.inside.location("a"), OWN)


async def _keep(scene: Scene) -> object:
    upload = await scene.store.begin_upload()
    try:
        await upload.write(OWN + b"!")
        return await upload.keep(scene.inside.location("a"))
    finally:
        await upload.discard()


async def _delete(scene: Scene) -> object:
    return await scene.store.delete_prefix(scene.staging)


async def _list(scene: Scene) -> object:
    (scene.outside / "only-there").touch()
    try:
        return await scene.store.list(scene.inside)
    finally:
        (scene.outside / "only-there").unlink()


async def _stage(scene: Scene) -> object:
    place = scene.inside.child("made").uri
    output = PayloadOutput(0, "rows", UUID(int=1), UUID(int=2), "parquet", 0, staging=place)
    root = Path("/" + scene.store.root.path)
    return prepare_staging(root, [output], os.getuid())


async def _columns(scene: Scene) -> object:
    file = ColdFile(scene.inside.location("table.parquet").uri, 1)
    return ColdFiles(scene.store).columns(file).names


ACTS = [
    _read, _read_pieces, _descriptor, _put, _put_deeper, _replace, _keep, _delete, _list, _stage, _columns
]  # fmt: skip


@contextmanager
def after_call(number: int, act: Callable[[], None]) -> Iterator[list[int]]:
    """Do something after the so many-th call to the system; how many there were."""
    calls = [0]
    real = {name: getattr(os, name) for name in _CALLS}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = real[name](*args, **kwargs)
            calls[0] += 1
            if calls[0] == number:
                act()
            return result

        return call

    with pytest.MonkeyPatch.context() as patched:
        for name in _CALLS:
            patched.setattr(os, name, counted(name))
        yield calls


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__.strip("_"))
@pytest.mark.parametrize("at_first", ["folder", "link"])
def test_a_swap_after_any_call_leads_nowhere(tmp_path: Path, act: Any, at_first: str) -> None:
    for number in range(1, _MOST_CALLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        scene = Scene(folder)
        if at_first == "link":
            scene.swap()

        def swap(scene: Scene = scene) -> None:
            # An attempt that is being deleted may be gone already.
            with suppress(AssertionError):
                scene.swap()

        result: object = None
        with after_call(number, swap) as calls, suppress(TracelakeError):
            result = asyncio.run(act(scene))
        assert SECRET.decode() not in str(result)
        assert "only-there" not in str(result)
        assert scene.untouched(), f"reached after call {number}"
        if calls[0] < number:
            return
    pytest.fail(f"more than {_MOST_CALLS} calls")


async def test_a_folder_that_is_swapped_all_the_time_is_read_or_refused(scene: Scene) -> None:
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            scene.swap()

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(_SWAPS):
            with suppress(Forbidden, NotFound):
                assert await scene.store.read(scene.inside.location("a"), 100) == OWN
    finally:
        over.set()
        swapping.join()
    assert scene.untouched()


async def test_verified_is_what_lies_in_the_attempt(scene: Scene) -> None:
    place = scene.inside.location("rows_0_9.parquet")
    assert len(await verify_output(scene.store, scene.staging, place.uri, None, 1, 0, 9, name="rows")) == 1
    scene.swap()
    for location in (place.uri, scene.staging.uri):
        with pytest.raises(TracelakeError) as caught:
            await verify_output(scene.store, scene.staging, location, None, 1, 0, 9, name="rows")
        assert caught.value.reason == "OutputOutsideStaging"


async def test_what_is_no_plain_file_is_no_object_and_nobody_waits_for_it(scene: Scene) -> None:
    folder = scene.place / "swap"
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as door:
        here = os.open(folder, os.O_PATH)
        door.bind(f"/proc/self/fd/{here}/door")
        os.close(here)
    (folder / "folder").mkdir()
    async with asyncio.timeout(30):
        for name in ("pipe", "door", "folder"):
            location = scene.inside.location(name)
            assert await scene.store.stat(location) is None
            with pytest.raises(NotFound):
                await scene.store.read(location, 10)
            with pytest.raises(NotFound):
                scene.store.open_descriptor(location)


async def test_a_file_with_another_name_elsewhere_is_neither_committed_nor_published(scene: Scene) -> None:
    (scene.place / "swap" / "linked").hardlink_to(scene.outside / "a")
    location = scene.inside.location("linked")
    assert await scene.store.stat(location) is None
    with pytest.raises(NotFound):
        await scene.store.read(location, 100)


@pytest.mark.parametrize("path", ["../outside/a", "a/../../x", "/etc/passwd", "a//b", ".", "a/.", "a\0b"])
def test_a_path_that_isnt_plain_is_refused(scene: Scene, path: str) -> None:
    root = os.open("/" + scene.store.root.path, os.O_RDONLY)
    try:
        for call in (beneath.open_file, beneath.open_folder, beneath.stat_beneath, beneath.make_folder):
            with pytest.raises(beneath.LeadsElsewhere):
                call(root, path)
    finally:
        os.close(root)


async def test_the_root_is_held_and_found_again_but_never_by_a_link(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "objects")
    place = store.root.location("a")
    await store.put(place, OWN)
    (tmp_path / "objects").rename(tmp_path / "moved")
    with pytest.raises(Unavailable):
        await store.read(place, 100)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a").write_bytes(SECRET)
    (tmp_path / "objects").symlink_to(tmp_path / "outside")
    with pytest.raises(Unavailable):
        await store.read(place, 100)
    (tmp_path / "objects").unlink()
    (tmp_path / "moved").rename(tmp_path / "objects")
    assert await store.read(place, 100) == OWN


def test_descriptors_dont_pile_up(scene: Scene) -> None:
    async def all_of_it() -> None:
        for act in ACTS:
            with suppress(TracelakeError):
                await act(scene)

    asyncio.run(all_of_it())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        asyncio.run(all_of_it())
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_logs_are_written_read_and_swept_without_links(tmp_path: Path) -> None:
    task, outside = str(UUID(int=9)), tmp_path / "outside"
    outside.mkdir()
    (outside / "1.log").write_bytes(SECRET)
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / task).symlink_to(outside)
    log = AttemptLog.open(logs, task, 1, [])
    log.note("said")
    await log.close()
    assert sweep_logs(logs, seconds=-60) == 0
    assert (outside / "1.log").read_bytes() == SECRET
    (logs / "link.log").symlink_to(outside / "1.log")
    with pytest.raises(OSError, match="symbolic link"):
        list(Tail(logs / "link.log").lines())


def test_a_prefix_is_where_it_says(scene: Scene) -> None:
    beside = ObjectPrefix.parse(scene.store.root.uri.removesuffix("/") + "-beside/")
    with pytest.raises(Forbidden):
        scene.store.open_descriptor(ObjectLocation.parse(beside.uri + "a"))


LEASE = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
held = os.open(sys.argv[1], os.O_RDONLY)
fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
while fcntl.fcntl(held, fcntl.F_GETLEASE) == fcntl.F_WRLCK:
    time.sleep(0.01)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("seconds", [0.2, 600.0], ids=["gives it back", "keeps it"])
def test_who_has_a_lease_on_a_file_is_waited_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Operators can't have any; another program of the same user may."""
    folder = os.open(tmp_path, os.O_RDONLY)
    path = tmp_path / "leased"
    path.write_bytes(OWN)
    if seconds > 1:
        monkeypatch.setattr(beneath, "_LEASE_SECONDS", 0.2)
    holder = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", LEASE, str(path), str(seconds)], stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        if not holder.stdout.readline():
            pytest.skip("there are no leases here")
        if seconds > 1:
            with pytest.raises(BlockingIOError):
                beneath.open_file(folder, "leased")
        else:
            os.close(beneath.open_file(folder, "leased"))
        holder.kill()
    os.close(folder)
