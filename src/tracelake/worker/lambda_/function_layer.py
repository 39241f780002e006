"""What a function's runtime needs beside the function's own code: put together once, shown read-only.

    /opt/tracelake/python    awslambdaric and what it needs, the client library
    /opt/tracelake/node      our runtime for Node

Nothing else of the platform's installation is visible inside, so a function can't come to lean on it. The files
are copies, readable by anyone, since the installation itself may lie where only its owner gets to.
"""

from __future__ import annotations

import compileall
import os
import re
import shutil
import stat
from contextlib import suppress
from importlib import metadata, resources
from pathlib import Path

from tracelake.domain.errors import TracelakeError
from tracelake.trees import folders_of, remove_tree

TARGET = "/opt/tracelake"
PYTHON_TARGET = f"{TARGET}/python"
NODE_RUNTIME = f"{TARGET}/node/runtime.mjs"

_RUNTIME = "awslambdaric"
_FILES = resources.files("tracelake.functions")
_REQUIREMENT_NAME = re.compile(r"[A-Za-z0-9._-]+")
_CLIENT_PACKAGE = '{"name": "tracelake_function", "main": "index.js"}\n'


def build_layer(folder: Path) -> None:
    """Into ``folder``, which is made anew."""
    with suppress(FileNotFoundError):
        remove_tree(folder)
    python, node = folder / "python", folder / "node"
    for place in (folder, python, node):
        place.mkdir(mode=0o755)
    for name in _with_requirements(_RUNTIME):
        _copy_distribution(name, python)
    _copy("tracelake_function.py", python / "tracelake_function.py")
    _copy("node/runtime.mjs", node / "runtime.mjs")
    # In a read-only folder nothing can be compiled later, and a cold start would compile each time.
    compileall.compile_dir(python, quiet=2)
    open_to_readers(folder)


def add_node_client(code: Path) -> None:
    """An ES module finds packages only in folders around its own, so the client goes to where the code is,
    unless the function brought its own."""
    place = code / "node_modules" / "tracelake_function"
    if place.exists():
        return
    place.mkdir(mode=0o755, parents=True)
    _copy("node/tracelake_function.js", place / "index.js")
    place.joinpath("package.json").write_text(_CLIENT_PACKAGE, encoding="utf-8")
    open_to_readers(code / "node_modules")


def add_builtin(name: str, code: Path) -> None:
    """A function that ships with the platform, in a folder of its own like any other."""
    code.mkdir(mode=0o755)
    _copy(f"builtin/{name}.py", code / f"{name}.py")
    open_to_readers(code)


def _copy(name: str, target: Path) -> None:
    target.write_bytes(_FILES.joinpath(name).read_bytes())


def _with_requirements(name: str) -> list[str]:
    found: list[str] = []
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in found:
            continue
        found.append(current)
        for requirement in _distribution(current).requires or ():
            named = _REQUIREMENT_NAME.match(requirement)
            if named is not None and ";" not in requirement:
                waiting.append(named.group())
    return found


def _distribution(name: str) -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise TracelakeError(
            "RuntimeMissing", f"functions in Python need {name}; install tracelake[lambda]"
        ) from None


def _copy_distribution(name: str, folder: Path) -> None:
    for file in _distribution(name).files or ():
        parts = file.parts
        if ".." in parts or parts[0].endswith(".dist-info") or "__pycache__" in parts:
            continue
        target = folder.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.locate(), target)


def open_to_readers(folder: Path) -> None:
    """Whatever the umask was: the function's user is not ours."""
    for place, names in folders_of(folder):
        os.chmod(place, 0o755)
        for name in names:
            file = Path(place, name)
            file.chmod(stat.S_IMODE(file.stat().st_mode) | 0o444)
