"""Attacks by functions, which are trusted with nothing. A function prints what it reached, or raises
``Refused``."""

from __future__ import annotations

import io
import json
import struct
import textwrap
import zipfile
from typing import TYPE_CHECKING, Any

from tests.support.attack.attack import Verdict, all_of, attack, broken, held
from tests.support.attack.stack import COLD, Ran
from tests.support.functions import link_in_zip, python_bundle, zip_of
from tracelake.domain.errors import TracelakeError

if TYPE_CHECKING:
    from tests.support.attack.stack import AttackedStack

GATEWAY = "the gateway speaks for the running attempt alone"
IDENTITY = "identities are tuples, not joined text"
SANDBOX = "functions are kept from everything"
QUOTAS = "nobody fills the disk for others"

PROBE = """
import http.client, json, os, socket, urllib.parse

class Refused(Exception):
    pass

def raw(request):
    at = urllib.parse.urlsplit(os.environ["TRACE_DISPATCHER_URL"])
    with socket.create_connection((at.hostname, at.port), timeout=10) as connection:
        connection.sendall(request)
        connection.settimeout(10)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
            if len(answer) > 1_000_000:
                break
        return answer

def call(path, body=None, method="POST", **headers):
    at = urllib.parse.urlsplit(os.environ["TRACE_DISPATCHER_URL"])
    connection = http.client.HTTPConnection(at.hostname, at.port, timeout=15)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")
    finally:
        connection.close()

def handler(event, context):
    found = attempt(event, event["config"])
    if found:
        print("REACHED", found)
        return None
    raise Refused("nothing was reached")
"""


def _probe(stack: AttackedStack, source: str, **more: Any) -> Verdict:
    ran = stack.function(PROBE + textwrap.dedent(source), **more)
    return _refused(ran)


def _refused(ran: Ran) -> Verdict:
    if ran.failed and ran.why == "Refused: nothing was reached":
        return held("nothing was reached")
    reached = [line for line in ran.log.splitlines() if "REACHED" in line]
    return broken(f"{reached or ran.log[-300:]} ({ran.task.status}: {ran.why})"[:400])


@attack(
    "function",
    GATEWAY,
    "another running task's token and fence, through its own gateway",
    "401 or 403; the other task goes on",
    quick=True,
)
def the_gateway_takes_no_other_token(stack: AttackedStack) -> Verdict:
    leak = """
    import json, time
    def handler(event, context):
        fence = [event["capability_token"], event["task_id"], event["attempt"], event["lease_token"]]
        # Turned around: the worker takes the secrets of an attempt out of its log.
        print("TOKEN", json.dumps(fence)[::-1].encode().hex(), flush=True)
        time.sleep(8)
    """
    dag = stack.start_function(leak, timeout_seconds=30)
    victim = stack.until(dag, "Running")
    from tests.support.dev_stack import eventually

    line = eventually("the other task has started", lambda: _line(stack.log(victim), "TOKEN "))
    fence = json.loads(bytes.fromhex(line).decode()[::-1])
    source = """
    def attempt(event, config):
        token, task, attempt, lease = config["fence"]
        mine = [event["capability_token"], event["task_id"], event["attempt"], event["lease_token"]]
        for use in ((token, task, attempt, lease), (token, mine[1], mine[2], mine[3]), (mine[0], task, attempt, lease)):
            body = {"task_id": use[1], "attempt": use[2], "lease_token": use[3]}
            for name, more in (("heartbeat", {}), ("complete", {"status": "Failed", "error_message": "hostile"})):
                if use[0] == mine[0] and use[1] == mine[1]:
                    continue
                status, text = call("/v1/task/" + name, {**body, **more}, **{"X-Trace-Task-Capability": use[0]})
                if status < 400 or status >= 500:
                    return f"{name}: {status} {text}"
            status, text = call("/v1/task/query", {"sql": "SELECT 1"}, **{"X-Trace-Task-Capability": token})
            if status < 400 or status >= 500:
                return f"query: {status} {text}"
        return None
    """
    verdict = _probe(stack, source, config={"fence": fence})
    ended = stack.ended(dag)
    return broken(f"the other task: {ended.why}") if ended.failed else verdict


def _line(log: str, mark: str) -> str | None:
    return next((line.partition(mark)[2] for line in log.splitlines() if mark in line), None)


@attack(
    "function",
    GATEWAY,
    "HEAD, OPTIONS, TRACE, CONNECT, an unknown method, HTTP/0.9, pipelined and smuggled requests to the gateway",
    "an answer of 4xx, or the end of the connection; the gateway goes on and the log stays short",
    quick=True,
)
def the_gateway_survives_odd_requests(stack: AttackedStack) -> Verdict:
    source = r"""
    def attempt(event, config):
        token = event["capability_token"].encode()
        host = b"Host: x\r\nX-Trace-Task-Capability: " + token + b"\r\n"
        for method in (b"HEAD", b"OPTIONS", b"TRACE", b"CONNECT", b"FOO", b"GET"):
            for path in (b"/v1/task/heartbeat", b"/v1/task/query", b"/", b"*", b"/v1/task/"):
                for _ in range(5):
                    try:
                        raw(method + b" " + path + b" HTTP/1.1\r\n" + host + b"Connection: close\r\n\r\n")
                    except OSError:
                        pass
        for text in (b"GET /v1/task/heartbeat\r\n\r\n", b"\x00" * 100, b"POST /v1/task/heartbeat HTTP/1.1\r\n" + host +
                     b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /internal/jwks/task HTTP/1.1\r\n\r\n",
                     b"POST /v1/task/heartbeat HTTP/1.1\r\n" + host + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
                     b"POST /v1/task/../../internal/jwks/task HTTP/1.1\r\n" + host + b"Content-Length: 0\r\nConnection: close\r\n\r\n",
                     b"GET http://127.0.0.1/internal/jwks/task HTTP/1.1\r\n" + host + b"Connection: close\r\n\r\n"):
            try:
                answer = raw(text)
            except OSError:
                continue
            if b'"keys"' in answer:
                return answer[:200]
        body = {"task_id": event["task_id"], "attempt": event["attempt"], "lease_token": event["lease_token"]}
        status, text = call("/v1/task/heartbeat", body, **{"X-Trace-Task-Capability": event["capability_token"]})
        return None if status == 200 else f"the gateway is gone: {status} {text}"
    """
    log = stack.home / "logs" / "worker-lambda.log"
    before = log.stat().st_size if log.exists() else 0
    verdict = _probe(stack, source, timeout_seconds=60)
    grown = (log.stat().st_size if log.exists() else 0) - before
    lines = log.read_text(errors="replace")[-grown:] if grown else ""
    if "Traceback" in lines or '"exception"' in lines or grown > 100_000:
        return broken(f"the invoker's log has {grown} bytes more, and a traceback: {lines[-160:]}")
    return verdict


STATE = """
import os
seen = []
def handler(event, context):
    job = event["job"]["dag_name"] + "/" + event["job"]["name"]
    left = sorted(os.listdir("/tmp"))
    seen.append(job)
    print("SEEN", "|".join(seen), "TMP", "|".join(left), flush=True)
    open("/tmp/" + job.replace("/", "!"), "w").close()
"""


@attack(
    "function",
    IDENTITY,
    "jobs whose DAG and name give one text when joined: a_b/c and a/b_c, with one bundle",
    "an environment of its own for each: no memory and no /tmp of the other",
    quick=True,
)
def joined_names_share_nothing(stack: AttackedStack) -> Verdict:
    bundle = stack.push(python_bundle(STATE))
    tag = stack.name("col")
    pairs = [
        ((f"{tag}_team", "a_alerts"), (f"{tag}_team_a", "alerts")),
        ((f"{tag}x", "y_y_y"), (f"{tag}x_y", "y_y")),
        ((f"{tag}-t", "a-b"), (f"{tag}-t-a", "b")),
    ]
    verdicts: list[tuple[str, Verdict]] = []
    for first, second in pairs:
        logs = []
        try:
            for dag, job in (first, second, first):
                if stack.task(dag) is None:
                    stack.start_function("", dag=dag, name=job, bundle=bundle)
                    ran = stack.ended(dag)
                    logs.append((f"{dag}/{job}", ran))
        except TracelakeError as error:
            verdicts.append((f"{first}", held(f"such a name is refused: {error}"[:100])))
            continue
        for job, ran in logs:
            line = _line(ran.log, "SEEN ") or ""
            seen, _, left = line.partition(" TMP ")
            others = [
                each
                for each in (*seen.split("|"), *left.split("|"))
                if each and each.replace("!", "/") != job
            ]
            others = [each for each in others if "/" in each or "!" in each]
            verdicts.append(
                (
                    job,
                    broken(f"finds {others} of another job") if others else held("an environment of its own"),
                )
            )
    return all_of(verdicts)


@attack(
    "function",
    QUOTAS,
    "exports of its query results, 200 of them, then its end",
    "refused above a quota; nothing is kept after the attempt's own time",
)
def function_exports_have_a_quota(stack: AttackedStack) -> Verdict:
    source = """
    def attempt(event, config):
        kept = 0
        for number in range(200):
            status, text = call("/v1/task/query", {"sql": "SELECT * FROM ledger", "export": True},
                                **{"X-Trace-Task-Capability": event["capability_token"]})
            if status != 200:
                print("QUOTA", number, status, text[:200], flush=True)
                return None if 400 <= status < 500 else f"{status} {text}"
            kept += 1
        return f"{kept} exports are kept"
    """
    inputs = [{"from": {"job": "src", "output": 0}}, {"from": {"dataset": COLD}, "trigger": False}]
    return _probe(stack, source, inputs=inputs, timeout_seconds=120)


@attack(
    "function",
    QUOTAS,
    "events, published records and saved state without end",
    "refused with a reason at a cap; the task ends",
)
def function_emits_within_bounds(stack: AttackedStack) -> Verdict:
    source = """
    def attempt(event, config):
        fence = {"task_id": event["task_id"], "attempt": event["attempt"], "lease_token": event["lease_token"]}
        token = {"X-Trace-Task-Capability": event["capability_token"]}
        out = event["outputs"][0]
        named = {"dataset_uuid": out["dataset_uuid"], "dataset_version": out["dataset_version"]}
        accepted = 0
        for batch in range(40):
            events = [{**named, "start": n, "end": n} for n in range(batch * 1000, batch * 1000 + 1000)]
            status, text = call("/v1/task/events", {**fence, "events": events}, **token)
            if status != 200:
                print("CAP", accepted, status, text[:200], flush=True)
                return None if 400 <= status < 500 else f"{status} {text}"
            accepted += 1000
        return f"{accepted} events were accepted"
    """
    return _probe(stack, source, timeout_seconds=120)


@attack(
    "function",
    SANDBOX,
    "files, ports of the machine, other processes, namespaces, the metadata address, abstract sockets",
    "nothing is reached",
    quick=True,
)
def the_sandbox_is_closed(stack: AttackedStack) -> Verdict:
    source = """
    def attempt(event, config):
        import ctypes, subprocess
        for host, port in config["ports"]:
            try:
                socket.create_connection((host, port), timeout=1).close()
                return f"{host}:{port}"
            except OSError:
                pass
        for place in config["places"]:
            if os.path.exists(place) or os.path.exists("/proc/1/root" + place):
                return place
        for place in ("/", "/var/task", "/opt/tracelake", "/usr", "/etc", "/dev", "/proc", "/run"):
            try:
                open(os.path.join(place, "written"), "w").close()
                return "writes " + place
            except OSError:
                pass
        if len([name for name in os.listdir("/proc") if name.isdigit()]) > 4:
            return "processes"
        libc = ctypes.CDLL(None, use_errno=True)
        for flags in (0x10000000, 0x00020000, 0x20000000, 0x40000000):
            if libc.unshare(flags) == 0:
                return f"unshare {flags}"
        for family, kind in ((17, 3), (2, 3), (16, 3), (40, 1), (38, 5)):
            try:
                socket.socket(family, kind).close()
                return f"socket {family}"
            except OSError:
                pass
        for line in open("/proc/net/unix").read().splitlines()[1:]:
            name = line.split()[-1]
            if name.startswith("@"):
                return "abstract socket " + name
        return None
    """
    import httpx

    urls = (stack.handle.user_url, stack.handle.internal_url, stack.handle.query_url)
    ports = [["127.0.0.1", httpx.URL(url).port] for url in urls]
    ports += [
        ["127.0.0.1", httpx.URL(dsn).port] for dsn in (stack.handle.state_dsn, stack.handle.data_owner_dsn)
    ]
    ports += [["169.254.169.254", 80], ["::1", ports[0][1]]]
    return _probe(
        stack, source, config={"ports": ports, "places": [str(stack.home), "/root", "/home", "/etc/shadow"]}
    )


@attack(
    "function",
    SANDBOX,
    "data of other DAGs by its token: datasets that aren't inputs, other buffers, another's scratch",
    "422, 403 or 404",
    quick=True,
)
def a_function_reads_its_inputs_alone(stack: AttackedStack) -> Verdict:
    source = """
    def attempt(event, config):
        token = {"X-Trace-Task-Capability": event["capability_token"]}
        fence = {"task_id": event["task_id"], "attempt": event["attempt"], "lease_token": event["lease_token"]}
        for sql in ("SELECT * FROM ledger", "SELECT * FROM hot_ledger", "SELECT * FROM notes", "SELECT * FROM input_1",
                    "SELECT * FROM 'ledger'", "SELECT * FROM information_schema.tables"):
            status, text = call("/v1/task/query", {"sql": sql}, **token)
            if status < 400:
                return f"{sql}: {text}"
        status, text = call("/v1/task/buffer-publish", {**fence, "dataset": "notes", "records": [{"key": "x"}]}, **token)
        if status < 400 or status >= 500:
            return f"publish: {status} {text}"
        for uri in config["uris"]:
            status, text = call("/v1/task/buffer-publish", {**fence, "dataset": "notes", "batch_uri": uri}, **token)
            if status < 400 or status >= 500:
                return f"{uri}: {status} {text}"
        status, text = call("/v1/task/credentials", fence, **token)
        if status < 400:
            return f"credentials: {text}"
        return None
    """
    uris = [f"file://{stack.file_of(COLD)}", f"file://{stack.home}/secrets.json", "file:///etc/passwd"]
    return _probe(stack, source, config={"uris": uris})


@attack(
    "function",
    "a bundle is what it says it is",
    "zips with .., absolute names, links, devices, doubled names, bombs, forged sizes, 100,000 entries",
    "422 with a reason at the push, or a task that fails with one",
)
def hostile_zips_are_not_taken(stack: AttackedStack) -> Verdict:
    verdicts: list[tuple[str, Verdict]] = []
    for name, bundle in _zips().items():
        try:
            reference = stack.push(bundle)
        except TracelakeError as error:
            ok = 400 <= error.status < 500
            verdicts.append((name, held(error.reason) if ok else broken(f"{error.status} {error.message}")))
            continue
        ran = stack.function("", bundle=reference)
        verdicts.append((name, held(ran.why[:60]) if ran.failed else broken("was taken, and runs")))
    return all_of(verdicts)


def _zips() -> dict[str, bytes]:
    main = {"main.py": "def handler(event, context): pass"}
    doubled = io.BytesIO()
    with zipfile.ZipFile(doubled, "w") as archive:
        archive.writestr("main.py", "x = 1")
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            archive.writestr("main.py", "x = 2")
    bomb = io.BytesIO()
    with (
        zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive,
        archive.open("main.py", "w", force_zip64=True) as file,
    ):
        for _ in range(600):
            file.write(b"\0" * 2**20)
    many = io.BytesIO()
    with zipfile.ZipFile(many, "w") as archive:
        for number in range(100_000):
            archive.writestr(f"{number}", "")
    device = io.BytesIO()
    with zipfile.ZipFile(device, "w") as archive:
        entry = zipfile.ZipInfo("dev")
        entry.external_attr = 0o020666 << 16
        archive.writestr(entry, "")
    good = zip_of(main)
    forged = bytearray(good)
    at = forged.rindex(b"PK\x01\x02")
    forged[at + 24 : at + 28] = struct.pack("<I", 3)
    return {
        "dots": zip_of({**main, "../evil.py": "x"}),
        "absolute": zip_of({**main, "/evil.py": "x"}),
        "inner dots": zip_of({**main, "a/../../evil.py": "x"}),
        "backslash": zip_of({**main, "..\\evil.py": "x"}),
        "link": link_in_zip("main.py", "/etc/passwd"),
        "device": device.getvalue(),
        "doubled": doubled.getvalue(),
        "bomb": bomb.getvalue(),
        "many": many.getvalue(),
        "forged size": bytes(forged),
        "cut": good[:-10],
        "not a zip": b"hostile",
        "empty": b"",
        "control character": zip_of({**main, "a\nb": "x"}),
    }


@attack(
    "function",
    SANDBOX,
    "another DAG's buffered dataset, and its own with a poisoned record",
    "403; the sink goes on and the record is in the dead letters or refused",
)
def poisoned_records_stop_nothing(stack: AttackedStack) -> Verdict:
    name = stack.name("poison")
    schema = {
        "columns": {"org_id": "uuid", "key": "text", "note": "text", "n": "bigint"},
        "unique": ["org_id", "key"],
    }
    source = """
    def attempt(event, config):
        token = {"X-Trace-Task-Capability": event["capability_token"]}
        fence = {"task_id": event["task_id"], "attempt": event["attempt"], "lease_token": event["lease_token"]}
        odd = [{"key": "a\\x00b"}, {"key": "\\ud800"}, {"key": "x", "n": 2**63}, {"key": "x", "n": 1e400}, {"key": ["x"]},
               {"key": "x", "org_id": "00000000-0000-0000-0000-000000000000"}, {"key": "x", "note": "y" * 2_000_000},
               {"key": "x", "hostile; DROP TABLE data": 1}, {"key": None}, {}, {"key": "x", "n": "1e9"}]
        for record in odd:
            status, text = call("/v1/task/buffer-publish", {**fence, "dataset": config["buffer"], "records": [record]}, **token)
            print("RECORD", status, text[:80], flush=True)
            if status >= 500:
                return f"{record}: {status} {text}"
        status, text = call("/v1/task/buffer-publish",
            {**fence, "dataset": config["buffer"], "records": [{"key": "good", "note": "good"}]}, **token)
        return None if status == 200 else f"a good record: {status} {text}"
    """
    publish = {name: {"storage": "postgres", "write_mode": "buffered", "schema": schema}}
    verdict = _probe(stack, source, publish=publish, config={"buffer": name})
    if not verdict.held:
        return verdict
    from tests.support.dev_stack import eventually

    def arrived() -> bool:
        answer = stack.query(f"SELECT count(*) FROM {name} WHERE key = 'good'")
        return answer.status_code == 200 and answer.json()["rows"] == [[1]]

    eventually("the good record is there", arrived)
    return held("odd records are refused, the good one is there")
