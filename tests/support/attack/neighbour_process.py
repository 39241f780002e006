"""Runs a function in a process of another user of the machine.

Everything is imported before the process changes its user, who may have no access to this interpreter's own
folder. One interpreter serves several users, each in a child of its own.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_SET_DUMPABLE = 4
_SECONDS = 300.0


def as_user(uid: int | None, module: str, function: str, **given: Any) -> Any:
    """``None`` stays who this is."""
    return as_users(module, function, [(uid, given)])[0]


def as_users(module: str, function: str, calls: Sequence[tuple[int | None, dict[str, Any]]]) -> list[Any]:
    """What ``function`` answers to each user, called with what is given for it; arguments and answers are JSON."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, module, function],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the neighbour failed: {done.stderr[-2000:]}")
    answers: list[Any] = json.loads(done.stdout)
    return answers


def main(module: str, function: str) -> None:
    call = getattr(importlib.import_module(module), function)
    answers = [_answer(call, uid, given) for uid, given in json.loads(sys.stdin.read())]
    sys.stdout.write(json.dumps(answers))


def _answer(call: Any, uid: int | None, given: dict[str, Any]) -> Any:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            _become(uid)
            with os.fdopen(writing, "w") as pipe:
                pipe.write(json.dumps(call(**given)))
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise RuntimeError(f"user {uid} ended with {status}")
    return json.loads(answer)


def _become(uid: int | None) -> None:
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        # Like any process of that user: otherwise not even its own /proc entry were its own.
        ctypes.CDLL(None).prctl(_SET_DUMPABLE, 1, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
