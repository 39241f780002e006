"""A name for an account that the machine doesn't know, seen by one program alone.

``initdb`` looks up who runs it and refuses to go on without a name; the server itself doesn't ask. So a thread gets
mounts of its own, in which ``/etc/passwd`` has root and that account, and starts ``initdb`` there. The mounts end
with it, and no other process ever sees them.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tracelake.accounts import Account, group_text, passwd_text
from tracelake.domain.errors import Unavailable
from tracelake.embedded_postgres.account import way_out
from tracelake.trees import remove_if_possible

Result = TypeVar("Result")

_CLONE_NEWNS = 0x00020000
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
# A name service that answers from elsewhere would be asked before the file.
_NAME_SERVICES = (Path("/run/nscd/socket"), Path("/var/run/nscd/socket"))


def with_name(account: Account, scratch: Path, work: Callable[[], Result]) -> Result:
    """Do ``work`` where ``account`` has its name; what it starts inherits that. For root."""
    results: list[Result] = []
    failures: list[BaseException] = []

    def in_thread() -> None:
        # Mounts belong to a thread until it ends, so this one is never used again.
        try:
            with tempfile.TemporaryDirectory(prefix="names-", dir=scratch) as folder:
                _show_names(account, Path(folder))
                results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=in_thread, name="embedded-postgres-initdb")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def check_naming(account: Account) -> None:
    """Raises where a new cluster couldn't be made."""
    with_name(account, Path(tempfile.gettempdir()), lambda: None)


def sweep(scratch: Path) -> None:
    """What those who were killed left."""
    for stale in scratch.glob("names-*"):
        remove_if_possible(stale)


def _show_names(account: Account, folder: Path) -> None:
    files = {
        "passwd": passwd_text([account]),
        "group": group_text([account]),
        "nsswitch.conf": "passwd: files\ngroup: files\n",
    }
    try:
        _unshare(_CLONE_NEWNS)
        _mount("none", "/", _MS_REC | _MS_PRIVATE)
        for name, text in files.items():
            shown = folder / name
            shown.write_text(text, encoding="ascii")
            shown.chmod(0o644)
            if Path("/etc", name).exists():
                _mount(str(shown), f"/etc/{name}", _MS_BIND)
        for socket in _NAME_SERVICES:
            if socket.exists():
                _mount("/dev/null", str(socket), _MS_BIND)
    except OSError as error:
        raise Unavailable(
            "NoAccountForPostgres",
            f"a new Postgres can't be given a user of its own here ({error.strerror}): {way_out()}",
        ) from None


def _unshare(flags: int) -> None:
    _check(_libc().unshare(ctypes.c_int(flags)), "unshare")


def _mount(source: str, target: str, flags: int) -> None:
    result = _libc().mount(os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(flags), None)
    _check(result, f"mount on {target}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
