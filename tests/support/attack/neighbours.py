"""Attacks by other users of the machine: ``nobody``, and a user id that nothing else uses.

Each is carried out by a process that really runs as that user. It searches for everything of the stack within
its reach: through ``/proc``, on the disk, and on loopback.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psycopg

from tests.support.attack.attack import Verdict, all_of, attack, broken, held
from tests.support.attack.neighbour_process import as_user, as_users

if TYPE_CHECKING:
    from tests.support.attack.stack import AttackedStack

NOBODY = 65534
OTHER_USER = 59_873
_SPARK = "tests.support.attack.spark_without_token"
PROC = "no account is shared"
DISK = "files of the stack are for their owners alone"
LOOPBACK = "a port is no credential"
_WAYS = (
    "environ",
    "mem",
    "maps",
    "cwd",
    "root",
    "fd",
    "exe",
    "auxv",
    "stack",
    "io",
    "syscall",
    "map_files",
    "pagemap",
)
_ENOUGH = 1000
_LISTED = ("cwd", "root", "fd", "map_files")


def uid_of(pid: int) -> int:
    """-1 for one that has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return -1
    found = re.search(r"^Uid:\t(\d+)", status, re.MULTILINE)
    return int(found[1]) if found else -1


def _alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}/status").exists()]


# What runs as the neighbour


def look_into(pids: list[int]) -> list[str]:
    """Each way into each process that isn't closed."""
    found: list[str] = []
    for pid in pids:
        for name in _WAYS:
            path = f"/proc/{pid}/{name}"
            try:
                if name in _LISTED:
                    os.listdir(path)
                elif name == "exe":
                    os.readlink(path)
                else:
                    with open(path, "rb") as file:
                        if name != "mem" and not file.read(1):
                            continue  # it has ended: there is nothing left to see
                found.append(path)
            except (OSError, OverflowError):
                continue
        try:
            os.kill(pid, 0)
            found.append(f"signals to {pid}")
        except OSError:
            pass
    return found


def read_secrets(roots: list[str], secrets: list[str]) -> list[str]:
    """Files that can be opened below these folders, and command lines that hold a secret."""
    wanted = [each.encode() for each in secrets]
    found: list[str] = []
    for root in roots:
        for folder, _, names in os.walk(root):
            if len(found) > _ENOUGH:
                break
            for name in names[:_ENOUGH]:
                path = os.path.join(folder, name)
                try:
                    # A FIFO would keep us waiting.
                    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                        text = file.read(1_000_000)
                except OSError:
                    continue
                found.append(path + (" with a secret" if any(each in text for each in wanted) else ""))
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    text = file.read()
            except OSError:
                continue
            if any(each in text for each in wanted):
                found.append(f"/proc/{entry}/cmdline with a secret")
    return found


def become_superuser(clusters: list[tuple[int, int]]) -> list[str]:
    """The whole way: into the cluster's folder through its process, trust all users, reload, log in."""
    return [found for pid, port in clusters if (found := _take_over(pid, port))]


def _take_over(pid: int, port: int) -> str:
    path = f"/proc/{pid}/cwd/pg_hba.conf"
    try:
        with open(path, "r+") as file:
            before = file.read()
            file.seek(0)
            file.write("host all all 127.0.0.1/32 trust\n" + before)
    except OSError:
        return ""
    try:
        os.kill(pid, signal.SIGHUP)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                with psycopg.connect(
                    host="127.0.0.1", port=port, user="postgres", dbname="postgres"
                ) as connection:
                    row = connection.execute("SHOW is_superuser").fetchone()
                return f"superuser of the cluster on port {port}: {row}"
            except psycopg.Error:
                time.sleep(0.1)
        return f"{path} was changed"
    finally:
        with open(path, "w") as file:
            file.write(before)
        os.kill(pid, signal.SIGHUP)


def log_in(tries: list[str]) -> list[str]:
    found: list[str] = []
    for dsn in tries:
        try:
            with psycopg.connect(dsn, connect_timeout=5):
                found.append(dsn)
        except psycopg.Error:
            pass
    return found


def connect_unix(paths: list[str]) -> list[str]:
    found: list[str] = []
    for path in paths:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            with socket.socket(socket.AF_UNIX, kind) as connection:
                try:
                    connection.connect("\0" + path[1:] if path.startswith("@") else path)
                    found.append(path)
                except OSError:
                    continue
    return found


def take_ports(ports: list[int], seconds: float) -> list[int]:
    """Those that one could listen on at some moment within that time."""
    taken: set[int] = set()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for port in ports:
            with socket.socket() as rude:
                rude.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    rude.bind(("127.0.0.1", port))
                    rude.listen()
                    taken.add(port)
                except OSError:
                    continue
    return sorted(taken)


def be_silent(ports: list[int], connections: int, seconds: float) -> int:
    """Connections that say nothing, opened again when they are closed; how many were open at the end."""
    held: list[socket.socket] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for port in ports:
            for _ in range(connections // len(ports)):
                try:
                    held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                except OSError:
                    break
        for connection in held[: -2 * connections]:
            connection.close()
        held = held[-2 * connections :]
    return len(held)


# The attacks


def _each_neighbour(function: str, **given: Any) -> Verdict:
    """Held when the function, called by each of them, finds nothing."""
    who = (("nobody", NOBODY), ("another user", OTHER_USER))
    answers = as_users(__name__, function, [(uid, given) for _, uid in who])
    return all_of(
        (name, broken(f"reaches {_brief(found)}"[:300]) if found else held("permission denied"))
        for (name, _), found in zip(who, answers, strict=True)
    )


@attack(
    "neighbour",
    PROC,
    "environ, mem, cwd, root, fd and more of every process of the stack, and signals to it",
    "permission denied for each",
    quick=True,
    only_root=True,
)
def proc_is_closed(stack: AttackedStack) -> Verdict:
    return _each_neighbour("look_into", pids=_alive(stack.processes))


def _brief(found: list[str]) -> str:
    return f"{len(found)} ways, such as {', '.join(found[:4])}" if len(found) > 4 else ", ".join(found)


@attack(
    "neighbour",
    PROC,
    "pg_hba.conf through /proc/PID/cwd of a Postgres, then a login as its superuser",
    "permission denied",
    quick=True,
    only_root=True,
)
def postgres_is_not_taken_over(stack: AttackedStack) -> Verdict:
    import httpx

    clusters = [
        (stack.handle.pids["postgres-state"], httpx.URL(stack.handle.state_dsn).port),
        (stack.handle.pids["postgres-data"], httpx.URL(stack.handle.data_owner_dsn).port),
    ]
    return _each_neighbour("become_superuser", clusters=clusters)


@attack(
    "neighbour",
    PROC,
    "every account of the stack into processes of the other accounts (an operator into Postgres, Spark, a sandbox)",
    "permission denied: no two kinds share an account",
    quick=True,
    only_root=True,
)
def accounts_are_apart(stack: AttackedStack) -> Verdict:
    kinds: dict[str, list[int]] = {}
    for pid in _alive(stack.processes):
        kinds.setdefault(_kind(stack, pid), []).append(pid)
    calls: list[tuple[int, str, list[int]]] = []
    for name, pids in kinds.items():
        others = [pid for kind, them in kinds.items() if kind != name for pid in them]
        calls += [
            (uid, name, _alive(others)) for uid in sorted({uid_of(pid) for pid in _alive(pids)} - {0, -1})
        ]
    answers = as_users(__name__, "look_into", [(uid, {"pids": others}) for uid, _, others in calls])
    verdicts: list[tuple[str, Verdict]] = []
    for (uid, name, _), found in zip(calls, answers, strict=True):
        seen = sorted({_kind(stack, int(m[1])) for each in found if (m := re.search(r"(\d+)", each))})
        verdicts.append((name, broken(f"uid {uid} gets into {seen}") if found else held("permission denied")))
    return all_of(verdicts)


def _kind(stack: AttackedStack, pid: int) -> str:
    """What a process is for: which cluster, operators of which worker, Spark, a sandbox."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        chain = [pid]
        while chain[-1] not in (0, 1, stack.pid):
            stat = Path(f"/proc/{chain[-1]}/stat").read_text().rpartition(")")[2].split()
            chain.append(int(stat[1]))
    except OSError:
        return "gone"
    part = next((name for name, known in stack.handle.pids.items() if known in chain[:-1]), "supervisor")
    if "java" in line.split(" ")[0]:
        return "spark"
    if "pyspark" in line:
        return "spark"
    if uid_of(pid) in (0, os.geteuid()):
        return f"platform ({part})"
    return part


@attack(
    "neighbour",
    DISK,
    "every file below the home, the temporary folders and the command lines",
    "nothing of the stack can be opened; no secret is in a command line",
    quick=True,
    only_root=True,
)
def the_disk_is_closed(stack: AttackedStack) -> Verdict:
    roots = [str(stack.home), "/var/lib/tracelake", "/run/tracelake", *_temporary(stack)]
    return _each_neighbour("read_secrets", roots=roots, secrets=stack.secrets)


def _temporary(stack: AttackedStack) -> list[str]:
    """Folders that processes of the stack made where all users may make some."""
    ours = {uid_of(pid) for pid in _alive(stack.processes)} - {0}
    entries = [entry for place in ("/tmp", "/var/tmp", "/dev/shm") for entry in os.scandir(place)]
    found = [entry.path for entry in entries if entry.stat(follow_symlinks=False).st_uid in ours]
    return [path for path in found if not stack.home.is_relative_to(path)]


@attack(
    "neighbour",
    DISK,
    "the modes of the home and of what is in it: it was there before, and open to all users",
    "0700, and no file for others",
    quick=True,
)
def the_home_is_private(stack: AttackedStack) -> Verdict:
    stack.query("SELECT 1", export=True)
    mode = stack.home.stat().st_mode & 0o777
    if mode & 0o077:
        return broken(f"the home is {mode:o}")
    loose = []
    for path in stack.home.rglob("*"):
        try:
            found = path.lstat().st_mode
        except OSError:
            continue
        if (
            path.is_file()
            and found & 0o077
            and path.relative_to(stack.home).parts[0] in ("objects", "keys", "logs")
        ):
            loose.append(f"{path.relative_to(stack.home)} {found & 0o777:o}")
    secret = [each for each in loose if "export" in each or each.startswith("keys")]
    return broken(f"open to others: {', '.join(secret[:3])}") if secret else held(f"the home is {mode:o}")


@attack(
    "neighbour",
    LOOPBACK,
    "the databases without a password, with the role's name, an empty one, other databases, other roles",
    "password authentication failed",
    quick=True,
)
def databases_ask_for_a_password(stack: AttackedStack) -> Verdict:
    import httpx

    roles = ("postgres", "writer", "staging", "reader", "queue", "catalog", "audit", "nobody", "root")
    users = ["postgres", "nobody", "root", *(f"tracelake_{name}" for name in roles)]
    tries = [
        f"postgresql://{user}:{password}@127.0.0.1:{httpx.URL(dsn).port}/{database}?sslmode=disable"
        for dsn in (stack.handle.state_dsn, stack.handle.data_owner_dsn)
        for user in users
        for password in ("", user, "postgres")
        for database in ("postgres", "tracelake_state", "tracelake_data", "template1")
    ]
    uid = OTHER_USER if os.geteuid() == 0 else None
    found = as_user(uid, __name__, "log_in", tries=tries)
    return broken(f"logs in by {found}") if found else held(f"{len(tries)} logins are refused")


@attack(
    "neighbour",
    LOOPBACK,
    "listening on the ports of a Query Service that was killed, and on those of Postgres, while it is started again",
    "address in use: the supervisor holds them",
)
def ports_are_not_taken_over(stack: AttackedStack) -> Verdict:
    uid = OTHER_USER if os.geteuid() == 0 else None
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(
            as_user, uid, __name__, "take_ports", ports=_ports_of_the_stack(stack), seconds=6
        )
        for _ in range(3):
            stack.crash("query")
        taken = taking.result()
    return broken(f"listens on {taken}") if taken else held("address in use")


@attack(
    "neighbour",
    LOOPBACK,
    "thousands of connections to every port of the stack that say nothing",
    "who has a credential is served, by the databases too",
    quick=True,
    only_root=True,
)
def silence_keeps_nobody_out(stack: AttackedStack) -> Verdict:
    ports = _ports_of_the_stack(stack)
    with ThreadPoolExecutor(1) as pool:
        silent = pool.submit(
            as_user, OTHER_USER, __name__, "be_silent", ports=ports, connections=3000, seconds=4
        )
        served = 0
        while not silent.done():
            try:
                for dsn in (stack.handle.state_dsn, stack.handle.data_owner_dsn):
                    with psycopg.connect(dsn, connect_timeout=10):
                        served += 1
                if stack.query("SELECT 1").status_code != 200:
                    return broken("a query was refused")
            except (psycopg.Error, OSError) as error:
                return broken(f"after {served} connections: {error}"[:300])
    return held(f"{served} connections and as many queries were served meanwhile")


def _ports_of_the_stack(stack: AttackedStack) -> list[int]:
    handle = stack.handle
    addresses = (
        handle.user_url,
        handle.internal_url,
        handle.query_url,
        handle.state_dsn,
        handle.data_owner_dsn,
    )
    return [port for each in addresses if (port := urlsplit(each).port) is not None]


@attack("neighbour", LOOPBACK, "Spark's ports without the token, with another", "refused")
def spark_asks_for_its_token(stack: AttackedStack) -> Verdict:
    from tests.support.attack.http import ports_of

    ports = [
        port
        for pid in _alive(stack.processes)
        if _kind(stack, pid) == "spark"
        for port in _ports(pid, ports_of)
    ]
    if not ports:
        return held("Spark listens on no port")
    found = as_user(OTHER_USER if os.geteuid() == 0 else None, _SPARK, "talk_to_spark", ports=ports)
    return broken(f"a session on {found}") if found else held(f"{len(ports)} ports, no session")


def _ports(pid: int, ports_of: Any) -> list[int]:
    try:
        return list(ports_of(pid))
    except OSError:
        return []


@attack(
    "neighbour",
    LOOPBACK,
    "every unix socket of the machine, named and abstract, of the stack",
    "refused",
    quick=True,
    only_root=True,
)
def unix_sockets_are_closed(stack: AttackedStack) -> Verdict:
    inodes: set[str] = set()
    for pid in _alive(stack.processes):
        try:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry)):
                    inodes.add(match[1])
        except OSError:
            continue
    paths = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and fields[6] in inodes:
            paths.append(fields[7])
    if not paths:
        return held("none has a name")
    return _each_neighbour("connect_unix", paths=paths)


@attack(
    "neighbour",
    PROC,
    "the same user's other programs: environ and memory of the workers, the Dispatcher and the Query Service",
    "they can't be looked into, even by their own user",
    quick=True,
)
def wrappers_can_not_be_dumped(stack: AttackedStack) -> Verdict:
    if os.geteuid() == 0:
        return held("root may look into everything")
    pids = [pid for name, pid in stack.handle.pids.items() if name.startswith(("worker", "sink", "delivery"))]
    found = [each for each in look_into(pids) if "environ" in each or "/mem" in each]
    return broken(f"reads {found}") if found else held("permission denied")
