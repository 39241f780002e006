"""A tree of folders that somebody else wrote can be removed, whatever its shape, and keeps nobody from working.

The shapes are those that an operator can make in its own folder, a Spark task in Spark's, a function in its bundle.
"""

from __future__ import annotations

import ast
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tracelake.embedded.postgres.folder import ClusterFolder
from tracelake.objects.base import staging_prefix
from tracelake.objects.directory import DirectoryStore
from tracelake.trees import folders_of, remove_if_possible, remove_tree
from tracelake.worker.app import own_work_folder
from tracelake.worker.host.client import OperatorHost
from tracelake.worker.host.host_check import _leaking
from tracelake.worker.lambda_.function_program import build_layer, open_to_readers
from tracelake.worker.operator.attempt import AttemptSetup

AS_ROOT = os.geteuid() == 0
SUSPECT = re.compile("rmtree|walk|rglob")
SOURCES = Path(__file__).resolve().parents[2] / "src" / "tracelake"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: thousands of folders take their time on a disk that is busy."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
    yield folder
    remove_tree(folder)


def deep(folder: Path, depth: int = 1200, name: str = "d") -> None:
    """Made from descriptor to descriptor, as whoever wants it deeper than a path can say makes it."""
    at = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, 0o755, dir_fd=at)
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=at))
    os.close(at)


def wide(folder: Path) -> None:
    for number in range(300):
        (folder / f"folder-{number}" / "inner").mkdir(parents=True)
        (folder / f"folder-{number}" / "inner" / "file").touch()
    for number in range(5000):
        (folder / f"file-{number}").touch()


def closed(folder: Path) -> None:
    """Folders that their owner can't enter, list or write to, with others in them."""
    for mode in (0o000, 0o500, 0o300, 0o100, 0o400):
        inner = folder / f"{mode:o}" / "inner"
        (inner / "innermost").mkdir(parents=True)
        (inner / "innermost" / "file").touch()
        for each in (inner / "innermost", inner, inner.parent):
            each.chmod(mode)


def named(folder: Path) -> None:
    """Long names, names that are no text, and the names that a removal uses itself."""
    at = os.fsencode(folder)
    for name in (b"\xff\n\x1b[31m", b"x" * 255, b".removed-1", b".removed-3"):
        os.makedirs(at + b"/" + name + b"/a/b/c")
    for name in (b".removed-2", b".removed-4", b"-rf", b"y" * 255):
        os.close(os.open(at + b"/" + name, os.O_WRONLY | os.O_CREAT))
    deep(folder, 100, "n" * 255)


def strange(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "away").symlink_to(folder.parent)
    (folder / "nowhere").symlink_to("absent")
    (folder / "kept").mkdir()
    (folder / "kept" / "away").symlink_to(folder.parent.parent, target_is_directory=True)


SHAPES: tuple[Callable[[Path], None], ...] = (deep, wide, closed, named, strange)


def given_away(folder: Path) -> None:
    """To an account as operators have, where this test may do that."""
    if AS_ROOT:
        for place, _, names in os.walk(folder):
            for path in (place, *(os.path.join(place, name) for name in names)):
                os.chown(path, 60_999, 60_999, follow_symlinks=False)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_a_tree_of_any_shape_is_removed_and_nothing_else(
    tmp_path: Path, shape: Callable[[Path], None]
) -> None:
    tree, beside = tmp_path / "tree", tmp_path / "beside"
    for each in (tree, beside):
        each.mkdir()
    (beside / "file").touch()
    shape(tree)
    if shape is not deep and shape is not named:
        given_away(tree)
    remove_tree(tree)
    assert sorted(tmp_path.iterdir()) == [beside]
    assert (beside / "file").exists()


def test_who_is_not_root_removes_what_they_closed_themselves(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    closed(tree)
    if not AS_ROOT:
        remove_tree(tree)
        assert not tree.exists()
        return
    given_away(tree)
    os.chown(tmp_path, 60_999, 60_999)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setresgid(60_999, 60_999, 60_999)
            os.setresuid(60_999, 60_999, 60_999)
            remove_tree(tree)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert not tree.exists()


def test_a_tree_is_removed_with_a_handful_of_descriptors(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    deep(tmp_path / "tree")
    used = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, hard))
    try:
        assert remove_tree(tmp_path / "tree") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_link_in_the_trees_place_is_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to("other")
    remove_tree(tmp_path / "link")
    assert (tmp_path / "other").is_dir()
    with pytest.raises(FileNotFoundError):
        remove_tree(tmp_path / "link")
    assert remove_if_possible(tmp_path / "link")


def test_who_still_writes_there_does_not_keep_root_from_ending(tmp_path: Path) -> None:
    if not AS_ROOT:
        # A user and their operators are one to the file system.
        return
    tree = tmp_path / "tree"
    (tree / "inner").mkdir(parents=True)
    for each in (tmp_path, tree, tree / "inner"):
        os.chown(each, 60_999, 60_999)
    code = """
import itertools, os
os.setresgid(60999, 60999, 60999); os.setresuid(60999, 60999, 60999)
held = os.open(".", os.O_RDONLY)
print("up", flush=True)
for number in itertools.count():
    try:
        os.close(os.open(f"more-{number}", os.O_CREAT | os.O_WRONLY, dir_fd=held))
    except OSError:
        break
"""
    writer = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tree / "inner", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        began = time.monotonic()
        # What it adds between the last look and the end is found by who looks once more.
        while not remove_if_possible(tree):
            assert time.monotonic() - began < 30
        writer.wait(30)
    assert not tree.exists()


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What a worker that was killed has left: an operator's deep folder is in it."""
    folder = tmp_path / "work" / "left"
    folder.mkdir(parents=True)
    deep(folder)
    return folder


def test_a_worker_starts_beside_a_deep_folder_and_removes_its_own(left: Path) -> None:
    own = left.with_name("own")
    with own_work_folder(own):
        assert not left.exists()
        deep(own)
    assert not own.exists()


def test_a_worker_starts_whatever_is_wrong_with_what_was_left(
    left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> int:
        raise RecursionError("maximum recursion depth exceeded")

    with monkeypatch.context() as patched:
        patched.setattr("tracelake.trees.remove_tree", fails)
        with own_work_folder(left.with_name("own")):
            assert left.exists()
    remove_tree(left)


async def test_staged_objects_that_lie_deep_are_deleted(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "objects")
    prefix = staging_prefix(store.root, uuid4(), uuid4(), uuid4(), 1, 1)
    folder = Path("/", prefix.path)
    folder.mkdir(parents=True)
    deep(folder)
    assert await store.delete_prefix(prefix) == 1
    assert not folder.exists()
    assert await store.delete_prefix(prefix) == 0


def test_an_attempts_deep_folder_is_cleared_for_the_next_attempt(tmp_path: Path) -> None:
    stage = AttemptSetup(tmp_path)
    deep(Path(stage._make_folder()))
    stage._clear_folder()
    assert list(tmp_path.iterdir()) == []


async def test_a_program_gets_a_new_folder_where_a_deep_one_was_left(tmp_path: Path) -> None:
    left = tmp_path / "program"
    left.mkdir()
    deep(left)
    host = object.__new__(OperatorHost)
    host._work_folder = tmp_path
    folder = await host._make_folder("program", None)
    assert (folder, os.listdir(folder)) == (left, ["tmp"])


def test_a_clusters_folder_is_ready_whatever_a_killed_launcher_left(tmp_path: Path) -> None:
    (tmp_path / "pgdata.new-left").mkdir()
    deep(tmp_path / "pgdata.new-left")
    assert ClusterFolder(tmp_path).staging(None).is_dir()
    assert not (tmp_path / "pgdata.new-left").exists()


def test_a_layer_is_built_where_a_deep_one_was(tmp_path: Path) -> None:
    (tmp_path / "layer").mkdir()
    deep(tmp_path / "layer")
    build_layer(tmp_path / "layer")
    assert sorted(os.listdir(tmp_path / "layer")) == ["node", "python"]


def test_trees_that_are_looked_through_may_be_deep(tmp_path: Path) -> None:
    deep(tmp_path)
    assert sum(1 for _ in folders_of(tmp_path)) == 1201
    open_to_readers(tmp_path)
    assert _leaking(tmp_path, ()) is None
    (tmp_path / "d" / "d" / "secret").write_text("x")
    assert _leaking(tmp_path, ()) == tmp_path / "d" / "d" / "secret"
    remove_tree(tmp_path / "d")


def recursing(code: ast.AST) -> Iterator[str]:
    for node in ast.walk(code):
        match node:
            case ast.Attribute(value=ast.Name(id="shutil"), attr="rmtree" as name):
                yield name
            case ast.Attribute(value=ast.Name(id="os"), attr="walk" | "fwalk" as name):
                yield name
            case ast.Attribute(attr="rglob" as name):
                yield name
            case ast.ImportFrom(module="shutil" | "os", names=names):
                yield from (each.name for each in names if each.name in ("rmtree", "walk", "fwalk"))


def test_nothing_in_the_product_recurses_through_folders() -> None:
    """Python's own ways do, up to 3.11 all of them; and there is no tree of which one can be sure."""
    found = [
        f"{path.relative_to(SOURCES)}: {name}"
        for path in SOURCES.rglob("*.py")
        if "testing" not in path.relative_to(SOURCES).parts
        and SUSPECT.search(text := path.read_text(encoding="utf-8"))
        for name in recursing(ast.parse(text))
    ]
    # A copy of what is installed, made a line before.
    assert found == ["embedded/postgres/server.py: rglob"]
    assert list(recursing(ast.parse("import shutil; shutil.rmtree('x')"))) == ["rmtree"]
