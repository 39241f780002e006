"""Attacks by mistakes of an operator of the stack: a second Dispatcher, shared folders, and absurd sizes."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psycopg

from tests.support.attack.attack import Verdict, all_of, attack, broken, held
from tests.support.dev_stack import eventually

if TYPE_CHECKING:
    from tests.support.attack.stack import AttackedStack

REPLICAS = "replicas join without changing anything"
SIZES = "sizes that people type are bounded"


def _verifiers(stack: AttackedStack) -> dict[str, Any]:
    with stack.admin(stack.handle.state_dsn) as connection:
        rows = connection.execute("SELECT rolname, rolpassword FROM pg_authid WHERE rolcanlogin").fetchall()
    return dict(rows)


def _dispatcher(
    stack: AttackedStack, home: Path, ready: Path | None, port: int = 0
) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRACELAKE_")}
    state = stack.handle.state_dsn
    environment = {
        **inherited,
        "TRACELAKE_STATE_DSN": state,
        "TRACELAKE_QUEUE_DSN": state.replace("/tracelake_state", "/tracelake_queue"),
    }
    argv = [sys.executable, "-m", "tracelake", "dispatcher", "--home", str(home)]
    argv += ["--user-port", str(port), "--internal-port", "0"]
    argv += [] if ready is None else ["--ready-file", str(ready)]
    return subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serves(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _until_up(process: subprocess.Popen[bytes], ready: Path) -> bool:
    """False when it refused to start."""
    eventually("the second Dispatcher is up, or gone", lambda: ready.exists() or process.poll() is not None)
    return process.poll() is None


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@attack(
    "installation",
    REPLICAS,
    "a second Dispatcher with a home of its own on the same databases",
    "it joins (or refuses to start); no password changes, nobody is locked out",
    quick=True,
)
def a_second_dispatcher_changes_no_password(stack: AttackedStack) -> Verdict:
    home = stack.home.parent / f"second-{os.urandom(3).hex()}"
    home.mkdir(mode=0o700)
    before = _verifiers(stack)
    process = _dispatcher(stack, home, home / "ready.json")
    try:
        up = _until_up(process, home / "ready.json")
        after = _verifiers(stack)
        changed = sorted(name for name in before if before[name] != after.get(name))
        try:
            psycopg.connect(stack.handle.queue_dsn).close()
            locked = ""
        except psycopg.OperationalError as error:
            locked = str(error).splitlines()[0]
    finally:
        _end(process)
        _restore(stack, before)
    if changed or locked:
        return broken(f"changed the passwords of {', '.join(changed)}; {locked}")
    return held("it joins, and nothing changes" if up else "it refuses to start")


def _restore(stack: AttackedStack, before: dict[str, Any]) -> None:
    """So that the attacks after this one meet a stack that works."""
    after = _verifiers(stack)
    with stack.admin(stack.handle.state_dsn) as connection:
        for name, verifier in before.items():
            if verifier is not None and after.get(name) != verifier:
                statement = psycopg.sql.SQL("ALTER ROLE {} PASSWORD {}")
                named = statement.format(psycopg.sql.Identifier(name), psycopg.sql.Literal(verifier))
                connection.execute(named)


@attack(
    "installation",
    REPLICAS,
    "a second Dispatcher on the same home, started and stopped",
    "refused, or dispatcher.json still leads to the first one afterwards",
)
def a_second_dispatcher_takes_no_file(stack: AttackedStack) -> Verdict:
    file = stack.home / "dispatcher.json"
    before = file.read_bytes()
    verifiers = _verifiers(stack)
    # As people start it: where it says that it is ready is its own affair.
    port = _free_port()
    process = _dispatcher(stack, stack.home, None, port)
    try:
        eventually(
            "the second Dispatcher serves, or is gone", lambda: process.poll() is not None or _serves(port)
        )
        up = process.poll() is None
    finally:
        _end(process)
        changed = _verifiers(stack) != verifiers
        _restore(stack, verifiers)
    if not file.exists() or file.read_bytes() != before:
        now = "is gone" if not file.exists() else "is another's"
        file.write_bytes(before)
        file.chmod(0o600)
        return broken(f"dispatcher.json {now}")
    if changed:
        return broken("passwords have changed")
    return held("dispatcher.json leads to the first one" if up else "it refuses to start")


@attack(
    "installation",
    "no login can lock the others out",
    "ALTER ROLE CURRENT_USER PASSWORD by the shared logins: queue, writer, reader",
    "refused; or restored within half a minute, and the others log in again",
)
def shared_logins_are_restored(stack: AttackedStack) -> Verdict:
    handle = stack.handle
    verdicts: list[tuple[str, Verdict]] = []
    for dsn in filter(None, (handle.queue_dsn, handle.data_write_dsn, handle.data_read_dsn)):
        admin = (
            handle.state_dsn
            if urlsplit(dsn).port == urlsplit(handle.state_dsn).port
            else handle.data_owner_dsn
        )
        role = urlsplit(dsn).username or ""
        with psycopg.connect(admin, autocommit=True) as owner:
            before = owner.execute("SELECT rolpassword FROM pg_authid WHERE rolname = %s", [role]).fetchone()
            verdicts.append((role, _locked_out(dsn)))
            if before is not None and not _opens(dsn):
                statement = psycopg.sql.SQL("ALTER ROLE {} PASSWORD {}")
                owner.execute(statement.format(psycopg.sql.Identifier(role), psycopg.sql.Literal(before[0])))
    return all_of(verdicts)


def _locked_out(dsn: str) -> Verdict:
    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("SET default_transaction_read_only = off")
            connection.execute("ALTER ROLE CURRENT_USER PASSWORD 'stolen'")
    except psycopg.Error as error:
        return held(str(error).splitlines()[0])
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if _opens(dsn):
            return held("restored")
        time.sleep(0.2)
    return broken("all other processes are locked out")


def _opens(dsn: str) -> bool:
    try:
        psycopg.connect(dsn).close()
    except psycopg.OperationalError:
        return False
    return True


@attack(
    "installation",
    SIZES,
    "devchain with 999,999,999,999 blocks, accounts, transactions; ports and seeds beyond reason",
    "refused at once, with what is allowed; or bounded, and ended by SIGTERM",
)
def devchain_sizes_are_bounded(stack: AttackedStack) -> Verdict:
    sizes = (
        ("--blocks", "999999999999"),
        ("--blocks", "-1"),
        ("--blocks", "99999999999999999999999"),
        ("--seed", "9" * 400),
        ("--chain-id", "9" * 400),
        ("--reorg-depth", "99999999999", "--blocks", "100"),
        ("--transactions", "2000", "--logs", "2000", "--blocks", "999999999"),
    )
    return all_of((" ".join(each)[:40], _bounded("devchain", "--port", "0", *each)) for each in sizes)


def _bounded(*arguments: str) -> Verdict:
    def little_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))

    process = subprocess.Popen(
        [sys.executable, "-m", "tracelake", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        preexec_fn=little_memory,
    )
    try:
        _, errors = process.communicate(timeout=12)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        try:
            process.wait(10)
            return held(f"bounded; ended {time.monotonic() - began:.0f} s after SIGTERM")
        except subprocess.TimeoutExpired:
            return broken("goes on, and ignores SIGTERM")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if "Traceback" in errors or "MemoryError" in errors:
        return broken(f"ends in {errors.strip().splitlines()[-1][:80]}")
    return held("refused with what is allowed") if process.returncode else broken("was accepted and ended")


@attack(
    "installation",
    SIZES,
    "numbers beyond reason for other commands: limits, ranges, a worker's concurrency and drain, a service's slots",
    "refused with what is allowed; no traceback",
)
def sizes_of_commands_are_bounded(stack: AttackedStack) -> Verdict:
    from tests.support.dev_stack import tracelake

    huge = "999999999999999999999999"
    verdicts: list[tuple[str, Verdict]] = []
    for command in (
        ("tasks", "--limit", huge),
        ("datasets", "--limit", huge),
        ("query", "SELECT 1", "--limit", huge),
        ("trigger", "victim/src", "--cursor", huge),
        ("trigger", "victim/src", "--start", "0", "--end", huge),
        ("backfill", "victim/work", "--from", "0", "--to", huge),
        ("logs", "dispatcher", "--lines", huge),
        ("worker", "--runtime", "ecs_python", "--concurrency", huge),
        ("worker", "--runtime", "ecs_python", "--drain-seconds", "1e300"),
        ("query-service", "--slots", huge),
        ("explain", COLD_NAME, "--from", "0", "--to", huge),
    ):
        done = tracelake(*command, "--home", stack.home)
        ok = done.returncode != 0 and "Traceback" not in done.stderr
        last_line = (done.stderr.strip().splitlines() or ["accepted"])[-1][:80]
        verdicts.append((" ".join(command[:3]), held("refused") if ok else broken(last_line)))
    return all_of(verdicts)


COLD_NAME = "ledger"


@attack(
    "installation",
    "the stack is as it was",
    "all of the above, looked at from its victims",
    "their rows are as they were, every part still runs, the roles still log in",
    quick=True,
)
def the_victims_are_unharmed(stack: AttackedStack) -> Verdict:
    if changed := stack.unharmed():
        return broken(changed)
    gone = [name for name, pid in stack.handle.pids.items() if not Path(f"/proc/{pid}").exists()]
    if gone:
        return broken(f"was ended: {', '.join(gone)}")
    for dsn in (stack.handle.queue_dsn, stack.handle.data_write_dsn):
        psycopg.connect(dsn).close()
    good = stack.operate("report(fine=True)")
    return held("unharmed") if not good.failed else broken(f"a good task fails: {good.why}")
