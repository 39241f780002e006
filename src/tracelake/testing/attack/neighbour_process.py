"""``python -m tracelake.testing.attack.neighbour_process UID MODULE FUNCTION``: somebody else on the machine.

The function is called with the JSON of standard input and answers in JSON. Everything is imported before the process
becomes the other user, whom this interpreter's own folder may be closed to.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
from typing import Any

_SET_DUMPABLE = 4
_SECONDS = 120.0


def as_user(uid: int | None, module: str, function: str, **given: Any) -> Any:
    """``None`` stays who this is."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(-1 if uid is None else uid), module, function],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the neighbour failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def main(uid: int, module: str, function: str) -> None:
    call = getattr(importlib.import_module(module), function)
    given = json.loads(sys.stdin.read())
    if uid >= 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        # Like any process of that user: otherwise not even its own /proc entry were its own.
        ctypes.CDLL(None).prctl(_SET_DUMPABLE, 1, 0, 0, 0)
    sys.stdout.write(json.dumps(call(**given)))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
