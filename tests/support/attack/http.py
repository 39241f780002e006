"""Attacks by clients that reach a port: without any credential, and with wrong ones."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tests.support.attack.attack import Verdict, all_of, attack, broken, held

if TYPE_CHECKING:
    from tests.support.attack.stack import AttackedStack

LIMITS = "requests are bounded before authentication"
SURFACES = "three surfaces, three identities"
METRICS = "metrics need a credential"
TOKENS = "a token is checked, not believed"
INVOKER = "a neighbour can't keep functions from running"

_FLOOD = 32 * 2**20
_PATIENCE = 75.0
"""For a connection that says nothing more: longer than any limit of ours on a head or a body."""


def listeners(stack: AttackedStack) -> dict[str, tuple[str, int]]:
    """Our own HTTP servers that listen on TCP, by name."""
    found = {
        name: ("127.0.0.1", httpx.URL(url).port or 80)
        for name, url in (
            ("user", stack.handle.user_url),
            ("internal", stack.handle.internal_url),
            ("query", stack.handle.query_url),
        )
    }
    if (port := invoker_port(stack)) is not None:
        found["invoker"] = ("127.0.0.1", port)
    return found


def invoker_port(stack: AttackedStack) -> int | None:
    """None when functions don't run here, or the invoker listens on no port."""
    pid = stack.handle.pids.get("worker-lambda")
    monitored = {httpx.URL(url).port for url in stack.handle.metrics.values()}
    return next((port for port in ports_of(pid) if port not in monitored), None) if pid else None


def monitoring(stack: AttackedStack) -> dict[str, tuple[str, int]]:
    """One of the ports that a part has for its metrics alone; all of them are served alike."""
    ports = [port for url in stack.handle.metrics.values() if (port := httpx.URL(url).port)]
    return {"metrics": ("127.0.0.1", ports[-1])}


def ports_of(pid: int) -> list[int]:
    """The TCP ports on which a process listens; none where its own user may not look at what it has open."""
    inodes: set[str] = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry)):
                inodes.add(match[1])
    except OSError:
        return []
    return [port for port, inode in _listening() if inode in inodes]


def _listening() -> Iterator[tuple[int, str]]:
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                yield int(fields[1].rpartition(":")[2], 16), fields[9]


def rss(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0


@contextmanager
def _connected(address: tuple[str, int], source: str = "127.0.0.1") -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=10, source_address=(source, 0)) as connection:
        yield connection


def _answer(connection: socket.socket, seconds: float = 10.0) -> bytes:
    """What comes until the other side is done, or says nothing for a while."""
    connection.settimeout(seconds)
    answer = b""
    try:
        while piece := connection.recv(65536):
            answer += piece
    except OSError:
        pass
    return answer


def _pid_of(stack: AttackedStack, name: str) -> int:
    part = {"user": "dispatcher", "internal": "dispatcher", "query": "query", "invoker": "worker-lambda"}[
        name
    ]
    return stack.handle.pids[part]


@attack(
    "http",
    LIMITS,
    "a head of 32 MiB in one header, in 100,000 headers, and in the request line, to every listener",
    "431 (or 400, 414) after at most 32 KiB, and no memory",
    quick=True,
)
def huge_heads_are_refused(stack: AttackedStack) -> Verdict:
    verdicts: list[tuple[str, Verdict]] = []
    line = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
    heads = {
        "one header": (line + b"X-Big: ", b"a" * 65536),
        "many headers": (line, b"".join(b"X-%d: b\r\n" % number for number in range(6000))),
        "request line": (b"GET /", b"a" * 65536),
        "folded": (line + b"X-Big: a", b"\r\n a" * 16384),
    }
    for listener, address in listeners(stack).items():
        pid = _pid_of(stack, listener)
        for name, (start, piece) in heads.items():
            before = rss(pid)
            sent = 0
            with _connected(address) as connection:
                connection.sendall(start)
                try:
                    while sent < _FLOOD:
                        if _readable([connection], 0):
                            break
                        sent += connection.send(piece)
                except OSError:
                    pass
                answer = _answer(connection, 2.0)
            grown = rss(pid) - before
            status = answer[9:12].decode("ascii", "replace")
            tried = f"{listener} {name}"
            if sent >= _FLOOD // 2 or grown > _FLOOD // 2:
                verdicts.append(
                    (tried, broken(f"takes {sent >> 20} MiB, grows by {grown >> 20} MiB, says {status!r}"))
                )
            elif status and status not in ("431", "400", "414", "413"):
                verdicts.append((tried, broken(f"says {status}")))
            else:
                verdicts.append((tried, held(status or "closed")))
    return all_of(verdicts)


@attack(
    "http",
    LIMITS,
    "300 requests that are never finished: half a head, half a body, a byte per second, to every listener",
    "closed within a minute; others are answered meanwhile",
)
def unfinished_requests_are_closed(stack: AttackedStack) -> Verdict:
    token = stack.handle.user_token.encode()
    starts = {
        "nothing": b"",
        "half a head": b"POST /v1/dags HTTP/1.1\r\nHost: x\r\nX-More: ",
        "half a body": b"POST /v1/dags HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nx",
        "half a chunk": b"POST /v1/query HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nx",
        "with a token": b"POST /v1/dags HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + token
        + b"\r\nContent-Length: 100000\r\n\r\nname",
    }  # fmt: skip
    with ExitStack() as all_open:
        opened: dict[socket.socket, str] = {}
        for listener, address in listeners(stack).items():
            for name, start in starts.items():
                for _ in range(15):
                    try:
                        connection = all_open.enter_context(_connected(address, "127.0.0.7"))
                        connection.sendall(start)
                    except OSError:
                        continue
                    opened[connection] = f"{listener} {name}"
        count = len(opened)
        deadline = time.monotonic() + _PATIENCE
        while opened and time.monotonic() < deadline:
            if time.monotonic() > deadline - _PATIENCE + 1 and not _serves(stack):
                return broken("others aren't answered meanwhile")
            for connection in _readable(list(opened), 0.5):
                if not _more(connection):
                    del opened[connection]
            for connection in [each for each, name in opened.items() if "half a head" in name]:
                # A byte now and then isn't progress.
                try:
                    connection.send(b"a")
                except OSError:
                    del opened[connection]
        if opened:
            left = sorted(set(opened.values()))
            return broken(f"{len(opened)} of {count} still open after {_PATIENCE:.0f} s: {', '.join(left)}")
        return held(f"all {count} were closed")


def _readable(connections: list[socket.socket], seconds: float) -> list[socket.socket]:
    """Also with more descriptors than ``select`` knows."""
    by_number = {each.fileno(): each for each in connections}
    poll = select.poll()
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(seconds * 1000)]


def _more(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(65536))
    except OSError:
        return False


def _serves(stack: AttackedStack) -> bool:
    try:
        return stack.user("GET", "/v1/dags").status_code == 200
    except httpx.HTTPError:
        return False


@attack(
    "http",
    LIMITS,
    "1,500 idle connections of one peer to each port",
    "capped; another peer is answered",
)
def connections_are_capped(stack: AttackedStack) -> Verdict:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    verdicts: list[tuple[str, Verdict]] = []
    try:
        for listener, address in listeners(stack).items():
            with ExitStack() as all_open:
                opened = []
                for _ in range(1500):
                    try:
                        opened.append(all_open.enter_context(_connected(address, "127.0.0.8")))
                    except OSError:
                        break
                time.sleep(1)
                closed = [each for each in _readable(opened, 0) if not _more(each)]
                alive = len(opened) - len(closed)
                if not _serves(stack):
                    verdicts.append((listener, broken("others aren't answered")))
                elif alive > 1024:
                    verdicts.append((listener, broken(f"{alive} connections of one peer are open")))
                else:
                    verdicts.append((listener, held("at most 1,024 of one peer, others are answered")))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return all_of(verdicts)


@attack(
    "http",
    INVOKER,
    "400 idle connections to the invoker while functions run",
    "they run, on their first attempt",
    quick=True,
    needs_functions=True,
)
def idle_connections_stop_no_function(stack: AttackedStack) -> Verdict:
    port = invoker_port(stack)
    if port is None:
        return held("the invoker listens on no port")
    with ExitStack() as all_open:
        for _ in range(400):
            try:
                all_open.enter_context(_connected(("127.0.0.1", port), "127.0.0.1"))
            except OSError:
                break
        source = "def handler(event, context):\n    print('ran')\n"
        dags = [stack.start_function(source, max_attempts=2, retry={"base": 0, "max": 1}) for _ in range(3)]
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            tasks = [stack.task(dag) for dag in dags]
            used = [
                each for each in tasks if each is not None and (each.status == "Failed" or each.attempt > 1)
            ]
            if used:
                return broken(f"attempt {used[0].attempt}, {used[0].status}: {used[0].error_message}")
            if all(each is not None and each.status == "Completed" for each in tasks):
                return held("three functions ran, each on its first attempt")
            time.sleep(0.1)
    return broken("functions don't run while others hold connections")


@attack(
    "http",
    INVOKER,
    "an invocation of one's own, and a completion in the invoker's name, without a token",
    "401",
    quick=True,
    needs_functions=True,
)
def nobody_else_invokes(stack: AttackedStack) -> Verdict:
    port = invoker_port(stack)
    if port is None:
        return held("the invoker listens on no port")
    base = f"http://127.0.0.1:{port}"
    verdicts: list[tuple[str, Verdict]] = []
    for headers in ({}, {"X-Trace-Worker-Token": "x"}, {"X-Trace-Worker-Token": stack.handle.user_token}):
        for path in ("/2015-03-31/functions/x/invocations", "/", "/2018-06-01/runtime/invocation/next"):
            answer = httpx.post(
                base + path, headers={**headers, "X-Amz-Invocation-Type": "Event"}, content=b"{}"
            )
            ok = answer.status_code in (401, 404)
            verdicts.append((path, held(str(answer.status_code)) if ok else broken(str(answer.status_code))))
    return all_of(verdicts)


@attack(
    "http",
    METRICS,
    "/metrics without a credential on the user port, the query port, the invoker",
    "401 or 404",
    quick=True,
)
def metrics_name_nothing(stack: AttackedStack) -> Verdict:
    verdicts: list[tuple[str, Verdict]] = []
    named = ("ledger", "attack_exec", "sql_transform", "victim")
    stack.user("POST", "/v1/query", json={"sql": "SELECT * FROM ledger"})
    for listener, (host, port) in listeners(stack).items():
        for path in ("/metrics", "/metrics/", "/Metrics", "//metrics", "/v1/../metrics", "/metrics?x=1"):
            answer = _raw_get((host, port), path)
            leaked = [name for name in named if name in answer]
            if leaked or (listener == "user" and "# HELP" in answer):
                verdicts.append(
                    (f"{listener} {path}", broken(f"names {', '.join(leaked)} without a credential"))
                )
            else:
                verdicts.append((f"{listener} {path}", held(answer[9:12] or "closed")))
    return all_of(verdicts)


def _raw_get(address: tuple[str, int], path: str, headers: str = "") -> str:
    with _connected(address) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{headers}Connection: close\r\n\r\n".encode())
        return _answer(connection).decode("utf-8", "replace")


@attack(
    "http",
    SURFACES,
    "/internal and /v1/task on the user port by every spelling; the user's paths on the internal one",
    "404, never an answer of another surface",
    quick=True,
)
def surfaces_are_apart(stack: AttackedStack) -> Verdict:
    user = listeners(stack)["user"]
    internal = listeners(stack)["internal"]
    worker = f"X-Trace-Worker-Token: {stack.handle.worker_token}\r\n"
    person = f"Authorization: Bearer {stack.handle.user_token}\r\n"
    spelled = (
        "/internal/jwks/task",
        "//internal/jwks/task",
        "/internal//jwks/task",
        "/v1/../internal/jwks/task",
        "/v1/dags/../../internal/jwks/task",
        "/%69nternal/jwks/task",
        "/internal%2fjwks%2ftask",
        "/v1/%2e%2e/internal/jwks/task",
        "/INTERNAL/jwks/task",
        "/internal/jwks/task/",
        "/./internal/jwks/task",
        "/internal;x/jwks/task",
        "http://x/internal/jwks/task",
    )
    verdicts: list[tuple[str, Verdict]] = []
    for path in spelled:
        answer = _raw_get(user, path, worker + person)
        verdicts.append((path, broken("served") if '"keys"' in answer else held(answer[9:12])))
    for path in ("/v1/dags", "/v1/tasks", "/v1/datasets", "/v1/bundles"):
        answer = _raw_get(internal, path, worker + person)
        verdicts.append((path, broken("served") if answer[9:12] == "200" else held(answer[9:12])))
    return all_of(verdicts)


@attack(
    "http",
    SURFACES,
    "smuggled requests: two lengths, length and chunks, bare line feeds, spaces before a colon, in every listener",
    "400 and the end of the connection; the second request is never answered",
    quick=True,
)
def requests_are_not_smuggled(stack: AttackedStack) -> Verdict:
    inner = b"GET /healthz?smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    length = str(len(inner)).encode()
    head = b"POST /v1/nowhere HTTP/1.1\r\nHost: x\r\n"
    texts = {
        "two lengths": head + b"Content-Length: 0\r\nContent-Length: " + length + b"\r\n\r\n" + inner,
        "length and chunks": head
        + b"Content-Length: "
        + length
        + b"\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        + inner,
        "space before colon": head + b"Content-Length : " + length + b"\r\n\r\n" + inner,
        "odd encoding": head + b"Transfer-Encoding: xchunked\r\n\r\n" + inner,
        "signed length": head + b"Content-Length: +0\r\n\r\n" + inner,
        "chunk extension": head + b"Transfer-Encoding: chunked\r\n\r\n0" + b";a" * 20000 + b"\r\n\r\n",
        "huge chunk": head + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        "null in a header": b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-A: \x00\r\n\r\n",
        "line feed in a name": b"GET /healthz HTTP/1.1\r\nHost: x\r\nX\rA: 1\r\n\r\n",
    }
    verdicts: list[tuple[str, Verdict]] = []
    for listener, address in (listeners(stack) | monitoring(stack)).items():
        for name, text in texts.items():
            with _connected(address) as connection:
                connection.sendall(text)
                answer = _answer(connection, 1.0).decode("utf-8", "replace")
            statuses = re.findall(r"HTTP/1\.1 (\d{3})", answer)
            # Both lengths zero, or none: then the rest is a request of its own, in the open.
            smuggled = len(statuses) > 1 and name != "signed length"
            bad = smuggled or any(each.startswith("5") and each != "501" for each in statuses)
            verdicts.append(
                (
                    f"{listener} {name}",
                    broken(f"answers {statuses}") if bad else held("/".join(statuses) or "closed"),
                )
            )
    return all_of(verdicts)


def _b64(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def _tokens(stack: AttackedStack, claims: Mapping[str, Any]) -> dict[str, str]:
    import hashlib
    import hmac

    keys = httpx.get(stack.handle.internal_url + "/internal/jwks/task").json()["keys"]
    kid = keys[0].get("kid", "")
    body = _b64(claims)

    def signed(header: dict[str, Any], secret: bytes) -> str:
        text = f"{_b64(header)}.{body}"
        digest = hmac.new(secret, text.encode(), hashlib.sha256).digest()
        return f"{text}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"

    return {
        "none": f"{_b64({'alg': 'none', 'typ': 'JWT'})}.{body}.",
        "None": f"{_b64({'alg': 'None', 'kid': kid})}.{body}.AA",
        "no signature": f"{_b64({'alg': 'ES256', 'kid': kid})}.{body}.",
        "zero signature": f"{_b64({'alg': 'ES256', 'kid': kid})}.{body}." + "A" * 86,
        "hs256 by public key": signed({"alg": "HS256", "kid": kid}, json.dumps(keys[0]).encode()),
        "hs256 by x": signed({"alg": "HS256", "kid": kid}, keys[0].get("x", "").encode()),
        "own key": signed({"alg": "ES256", "kid": kid, "jwk": keys[0]}, b"x"),
        "jku": signed({"alg": "ES256", "kid": "other", "jku": "http://127.0.0.1:9/keys"}, b"x"),
        "kid of a file": signed({"alg": "HS256", "kid": "../../../../dev/null"}, b""),
        "kid of sql": signed({"alg": "HS256", "kid": "' OR 1=1 --"}, b""),
        "critical": signed({"alg": "ES256", "kid": kid, "crit": ["x"], "x": 1}, b"x"),
        "long": "a" * 20_000,
        "dots": "." * 100,
        "not a token": "null",
    }


@attack("http", TOKENS, "unsigned, self-signed, confused and malformed tokens", "401", quick=True)
def forged_tokens_are_refused(stack: AttackedStack) -> Verdict:
    task = "00000000-0000-4000-8000-000000000000"
    claims = {
        "sub": task,
        "task_id": task,
        "attempt": 1,
        "exp": 4102444800,
        "aud": "tracelake",
        "org_id": task,
    }
    fence = {"task_id": task, "attempt": 1, "lease_token": task}
    verdicts: list[tuple[str, Verdict]] = []
    for name, token in _tokens(stack, claims).items():
        header = {"X-Trace-Task-Capability": token}
        for url, body in (
            (stack.handle.internal_url + "/v1/task/heartbeat", fence),
            (stack.handle.query_url + "/v1/task/query", {"sql": "SELECT 1"}),
        ):
            answer = stack.request("POST", url, json=body, headers=header)
            ok = answer.status_code in (401, 431, 400)
            verdicts.append(
                (
                    name,
                    held(str(answer.status_code))
                    if ok
                    else broken(f"{answer.status_code} {answer.text[:80]}"),
                )
            )
    return all_of(verdicts)


@attack(
    "http",
    SURFACES,
    "every path of the OpenAPI documents without a credential, with the wrong one",
    "401 or 404",
    quick=True,
)
def every_route_asks_who(stack: AttackedStack) -> Verdict:
    verdicts: list[tuple[str, Verdict]] = []
    open_paths = {"/healthz", "/readyz", "/openapi.json", "/internal/jwks/task"}
    for surface, url in (("user", stack.handle.user_url), ("internal", stack.handle.internal_url)):
        found = httpx.get(f"{url}/openapi.json")
        if found.status_code != 200:
            verdicts.append((surface, held("no document without a credential")))
            continue
        for path, methods in found.json()["paths"].items():
            if path in open_paths or (path, surface) == ("/metrics", "internal"):
                continue
            filled = re.sub(r"\{[^}]+\}", "00000000-0000-4000-8000-000000000000", path)
            for method in methods:
                for headers in (
                    {},
                    {"Authorization": "Bearer x"},
                    {"X-Trace-Worker-Token": "x"},
                    {"X-Trace-Task-Capability": "x"},
                ):
                    answer = stack.request(method.upper(), url + filled, headers=headers)
                    ok = answer.status_code in (401, 404, 405)
                    seen = f"{method} {path}: {answer.status_code}"
                    verdicts.append(
                        (f"{surface} {path}", held(str(answer.status_code)) if ok else broken(seen))
                    )
    return all_of(verdicts)


@attack(
    "http",
    LIMITS,
    "JSON of 100,000 brackets, numbers of 10^6 digits, doubled keys, wrong encodings",
    "4xx with a reason",
)
def hostile_json_is_refused(stack: AttackedStack) -> Verdict:
    bodies = {
        "deep": b'{"sql": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "digits": b'{"sql": "SELECT 1", "limit": ' + b"9" * 1_000_000 + b"}",
        "exponent": b'{"sql": "SELECT 1", "limit": 1e999999}',
        "surrogate": b'{"sql": "SELECT \\ud800"}',
        "utf-16": '{"sql": "SELECT 1"}'.encode("utf-16"),
        "bom": b"\xef\xbb\xbf{}",
        "null": b'{"sql": "SELECT \\u0000"}',
        "unknown": b'{"sql": "SELECT 1", "hostile": 1}',
        "cut": b'{"sql": "SELECT',
        "params": json.dumps({"sql": "SELECT ?", "params": [1] * 5000}).encode(),
        "gzip": b"\x1f\x8b\x08\x00" + os.urandom(100),
    }
    verdicts: list[tuple[str, Verdict]] = []
    for name, body in bodies.items():
        headers = {
            "Content-Type": "application/json",
            **({"Content-Encoding": "gzip"} if name == "gzip" else {}),
        }
        answer = stack.user("POST", "/v1/query", content=body, headers=headers)
        ok = 400 <= answer.status_code < 500 and "reason" in answer.text
        verdicts.append(
            (
                name,
                held(str(answer.status_code)) if ok else broken(f"{answer.status_code} {answer.text[:80]}"),
            )
        )
    return all_of(verdicts)
