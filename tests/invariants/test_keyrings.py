"""No key of the kernel's crosses from the worker to an operator, nor from one account's process to its next.

Each test asks in a process of its own, since a session's keyring is its processes' for good.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
import textwrap

import pytest

from tracelake import kernel
from tracelake.sandbox import accounts

AS_ROOT = os.geteuid() == 0
UID = 60_998
ADD_KEY, KEYCTL = {"x86_64": (248, 250), "aarch64": (217, 219)}.get(platform.machine(), (0, 0))

KEYS = f"""
import ctypes, json, os, sys
from tracelake.sandbox import accounts
libc = ctypes.CDLL(None, use_errno=True)
PROCESS, SESSION, USER = -2, -3, -4
def add(name, ring):
    return libc.syscall({ADD_KEY}, b"user", name, b"secret", 6, ctypes.c_int(ring)) > 0
def found(name, ring):
    return libc.syscall({KEYCTL}, 10, ctypes.c_int(ring), b"user", name, 0) > 0
def persistent():
    return libc.syscall({KEYCTL}, 22, ctypes.c_int(-1), ctypes.c_int(PROCESS))
def become(uid):
    if os.geteuid() == 0:
        os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
def in_child(work):
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps(work()).encode()); os._exit(0)
    os.close(write)
    return json.loads(os.read(read, 4096))
# A session of our own: the test leaves nothing in anybody's.
libc.syscall({KEYCTL}, 1, None)
"""

pytestmark = pytest.mark.skipif(
    not KEYCTL or not kernel.keyrings_can_be_used(),
    reason="this machine has no keyrings, or they may not be used",
)


def told(code: str) -> object:
    answer = subprocess.check_output([sys.executable, "-c", KEYS + textwrap.dedent(code)])
    return json.loads(answer)


def test_who_leaves_a_session_finds_none_of_its_keys() -> None:
    code = f"""
    assert add(b"tracelake_admin", SESSION)
    def before():
        become({UID})
        return found(b"tracelake_admin", SESSION)
    def after():
        become({UID})
        accounts.leave_keyrings({UID})
        return found(b"tracelake_admin", SESSION)
    print(json.dumps([in_child(before), in_child(after), found(b"tracelake_admin", SESSION)]))
    """
    assert told(code) == [True, False, True]


def test_who_is_given_an_account_finds_no_key_of_who_had_it_before() -> None:
    if not AS_ROOT:
        # A user's own keyring stays theirs.
        return
    code = f"""
    def first():
        become({UID})
        return [add(b"tracelake_note", USER), add(b"tracelake_note", persistent())]
    def look():
        become({UID})
        return [found(b"tracelake_note", USER), found(b"tracelake_note", persistent())]
    def leave():
        become({UID})
        accounts.leave_keyrings({UID})
        return look()
    print(json.dumps([in_child(first), in_child(look), in_child(leave), in_child(look)]))
    """
    assert told(code) == [[True, True], [True, True], [False, False], [False, False]]


def test_a_users_own_keyring_is_left_alone() -> None:
    uid = 1000 if AS_ROOT else os.getuid()
    code = f"""
    become({uid})
    assert add(b"tracelake_own", USER)
    accounts.leave_keyrings({uid})
    kept = found(b"tracelake_own", USER)
    key = libc.syscall({KEYCTL}, 10, ctypes.c_int(USER), b"user", b"tracelake_own", 0)
    libc.syscall({KEYCTL}, 9, key, ctypes.c_int(USER))
    print(json.dumps(kept))
    """
    assert told(code) is True


def test_an_embedded_postgres_is_started_without_our_keys() -> None:
    if not AS_ROOT:
        # A user's server is the same user, who may see their own keys wherever they are.
        return
    code = f"""
    import subprocess
    from tracelake.embedded.postgres.account import Account
    from tracelake.embedded.postgres.server import before_exec
    assert add(b"tracelake_admin", SESSION)
    account = Account(name="x", uid={UID}, gid={UID})
    def seen(before):
        return b"tracelake_admin" in subprocess.check_output(
            ["cat", "/proc/keys"], cwd="/", user={UID}, group={UID}, extra_groups=[], preexec_fn=before)
    print(json.dumps([seen(None), seen(before_exec(account))]))
    """
    assert told(code) == [True, False]


def test_where_there_is_no_such_call_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    before = ctypes.get_errno()
    accounts.leave_keyrings(UID)
    assert not kernel.keyrings_can_be_used()
    assert ctypes.get_errno() == before
