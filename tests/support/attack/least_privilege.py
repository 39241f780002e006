"""Inspects a running stack and reports everything that the threat model's tables don't list.

The tables are in ``docs/threat-model.md``, under the headings below, and nowhere else. A cell's text in
backticks is a pattern (``*`` matches anything); text outside of them is for people.

    Processes    process, command line, user, credentials in its environment
    Roles        cluster, role, attributes, member of
    Grants       database, role, on, privileges
    Files        path below the home, mode, owner
    Sockets      process, address
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psycopg

from tests.support.attack.attack import Verdict, attack, broken, held
from tracelake.postgres import sqlfiles
from tracelake.sandbox import accounts

if TYPE_CHECKING:
    from tests.support.attack.stack import AttackedStack

PAGE = Path(__file__).parents[3] / "docs" / "threat-model.md"
_SQL = sqlfiles.load("tests.support.attack", "least_privilege.sql")
_QUOTED = re.compile(r"`([^`]+)`")
_SOCKET = re.compile(r"socket:\[(\d+)\]")


@attack(
    "installation",
    "least privilege, as it is written down",
    "every process, role, grant, file and socket of the running stack, compared with the threat model's tables",
    "each is listed there, with no more rights than listed",
    quick=True,
)
def everything_is_listed(stack: AttackedStack) -> Verdict:
    if not PAGE.exists():
        return held("the documentation isn't installed here")
    found = unlisted(stack, tables(PAGE.read_text(encoding="utf-8")))
    return (
        broken(f"{len(found)} not listed: " + "; ".join(found[:12])) if found else held("all of it is listed")
    )


Row = Mapping[str, str]


def tables(page: str) -> dict[str, list[Row]]:
    """The first table under each heading, by the names of its columns."""
    found: dict[str, list[Row]] = {}
    for section in re.split(r"^#+ ", page, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        lines = [line.strip() for line in body.splitlines() if line.strip().startswith("|")]
        if len(lines) > 2:
            header = _cells(lines[0])
            found[title.strip()] = [dict(zip(header, _cells(line), strict=True)) for line in lines[2:]]
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


def patterns(cell: str) -> list[str]:
    return _QUOTED.findall(cell)


def matches(text: str, cell: str) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns(cell))


def unlisted(stack: AttackedStack, page: Mapping[str, list[Row]]) -> list[str]:
    """One line for each thing that no row covers."""
    walk = _Walk(stack, page)
    return sorted({*walk.processes(), *walk.databases(), *walk.files()})


@dataclass(slots=True)
class _Walk:
    stack: AttackedStack
    page: Mapping[str, list[Row]]
    uids: dict[str, set[int]] = field(default_factory=dict)

    # Processes, what they hold in their environment, and where they listen

    def processes(self) -> Iterator[str]:
        for pid in self.stack.processes:
            try:
                line = _command_line(pid)
                uid, environment = _uid(pid), _environment(pid)
                sockets = list(_listening(pid))
            except (OSError, IndexError):
                continue
            if not line:
                continue
            row = self._row_of(line, uid)
            if row is None:
                yield f"process (uid {uid}): {line[:160]}"
                continue
            self.uids.setdefault(row["process"], set()).add(uid)
            yield from self._credentials(row, environment, line)
            for address in sockets:
                if not self._listed(row["process"], address):
                    yield f"socket of {row['process']}: {address}"
        yield from self._shared_accounts()

    def _row_of(self, line: str, uid: int) -> Row | None:
        """Host and operator have one command line, and another user."""
        fitting = [each for each in self.page["Processes"] if matches(line, each["command line"])]
        return next((each for each in fitting if _is_user(uid, each)), None)

    def _shared_accounts(self) -> Iterator[str]:
        if os.geteuid() != 0:
            return
        seen: dict[int, str] = {}
        for name, uids in self.uids.items():
            for uid in uids - {0}:
                other = seen.setdefault(uid, name)
                if other != name:
                    yield f"account {uid} is shared by {other} and {name}"

    def _credentials(self, row: Row, environment: Mapping[str, str], line: str) -> Iterator[str]:
        allowed = patterns(row["credentials in its environment"])
        for name, value in environment.items():
            secret = any(each in value for each in self.stack.secrets)
            ours = name.startswith(("TRACELAKE_", "TRACE_", "SPARK_"))
            if (secret or (ours and _looks_secret(name, value))) and not any(
                fnmatchcase(name, each) for each in allowed
            ):
                yield f"environment of {row['process']}: {name}"
        if any(each in line for each in self.stack.secrets):
            yield f"command line of {row['process']} holds a secret"

    def _listed(self, process: str, address: str) -> bool:
        return any(
            each["process"] == process and matches(address, each["address"]) for each in self.page["Sockets"]
        )

    # Roles and what they may

    def databases(self) -> Iterator[str]:
        state, data = self.stack.handle.state_dsn, self.stack.handle.data_owner_dsn
        queue = state.replace("/tracelake_state", "/tracelake_queue")
        for cluster, dsn in (("state", state), ("data", data)):
            with psycopg.connect(dsn, autocommit=True) as connection:
                yield from self._roles(cluster, connection.execute(_SQL.roles).fetchall())
        for dsn in (state, queue, data):
            database = urlsplit(dsn).path.strip("/")
            with psycopg.connect(dsn, autocommit=True) as connection:
                yield from self._grants(database, connection.execute(_SQL.grants).fetchall())
                for kind, name, owner in connection.execute(_SQL.owners).fetchall():
                    yield from self._grants(database, [(kind, name, owner, ["owner"])])

    def _roles(self, cluster: str, found: Iterable[tuple[Any, ...]]) -> Iterator[str]:
        for role, attributes, member_of in found:
            row = next(
                (
                    each
                    for each in self.page["Roles"]
                    if matches(cluster, each["cluster"]) and matches(role, each["role"])
                ),
                None,
            )
            if row is None:
                yield f"role of {cluster}: {role} ({attributes})"
                continue
            if more := set(_words(attributes)) - set(_words(row["attributes"])):
                yield f"role of {cluster}: {role} is {', '.join(sorted(more))}"
            for group in member_of:
                if not matches(group, row["member of"]):
                    yield f"role of {cluster}: {role} is a member of {group}"

    def _grants(self, database: str, found: Iterable[tuple[Any, ...]]) -> Iterator[str]:
        for kind, name, role, privileges in found:
            allowed: set[str] = set()
            for row in self.page["Grants"]:
                if (
                    matches(database, row["database"])
                    and matches(role, row["role"])
                    and matches(f"{kind} {name}", row["on"])
                ):
                    allowed |= set(_words(row["privileges"]))
            if more := set(privileges) - allowed:
                yield f"grant in {database}: {role} on {kind} {name}: {', '.join(sorted(more))}"

    # Files

    def files(self) -> Iterator[str]:
        home = self.stack.home
        mode = stat.S_IMODE(home.stat().st_mode)
        if mode & 0o077:
            yield f"file: the home itself is {mode:04o}"
        for path in home.rglob("*"):
            try:
                found = path.lstat()
            except OSError:
                continue
            name = str(path.relative_to(home))
            row = next(
                (each for each in self.page["Files"] if matches(name, each["path below the home"])), None
            )
            if row is None:
                yield f"file: {name} ({stat.S_IMODE(found.st_mode):04o}, uid {found.st_uid})"
                continue
            allowed = int(row["mode"], 8)
            mode = stat.S_IMODE(found.st_mode)
            if stat.S_ISREG(found.st_mode):
                mode &= ~0o111
            if mode & ~allowed and not stat.S_ISLNK(found.st_mode):
                yield f"file: {name} is {mode:04o}, not {allowed:04o}"
            ours = found.st_uid == os.geteuid()
            account = accounts.is_ours(found.st_uid)
            if not (ours or (account and "`account`" in row["owner"])):
                yield f"file: {name} belongs to uid {found.st_uid}"


def _is_user(uid: int, row: Row) -> bool:
    """Who isn't root has no accounts to give: then everything runs as the user who started it."""
    if os.geteuid() == 0 and "`account`" in row["user"]:
        return accounts.is_ours(uid)
    return uid == os.geteuid()


def _words(text: str) -> list[str]:
    return [word for each in text.replace("`", "").split(",") if (word := each.strip()) and word != "—"]


def _looks_secret(name: str, value: str) -> bool:
    return bool(value) and (
        name.endswith(("_TOKEN", "_DSN", "_PASSWORD", "_SECRET", "_KEY")) or ("://" in value and "@" in value)
    )


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()


def _uid(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("Uid:", 1)[1].split()[0])


def _environment(pid: int) -> dict[str, str]:
    """Empty where not even its own user may look."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
    except PermissionError:
        return {}
    return dict(each.split("=", 1) for each in text.split("\0") if "=" in each)


def _listening(pid: int) -> Iterator[str]:
    """``tcp 127.0.0.1``, ``unix /path``: the port is any, the path as the kernel knows it."""
    inodes: set[str] = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if match := _SOCKET.fullmatch(os.readlink(entry)):
                inodes.add(match[1])
    except PermissionError:
        return
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                yield f"tcp {_address(fields[1].rpartition(':')[0])}"
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        # The flag of a socket that accepts connections.
        if fields[6] in inodes and fields[3] == "00010000":
            yield f"unix {fields[7] if len(fields) > 7 else 'without a name'}"


def _address(text: str) -> str:
    """As the kernel prints it: words of four bytes, each turned around."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    raw = b"".join(words)
    if len(raw) == 16 and raw[:12] == b"\0" * 10 + b"\xff\xff":
        raw = raw[12:]
    return ".".join(map(str, raw)) if len(raw) == 4 else raw.hex()
