"""Functions that want out, through the whole platform: each attempt fails, the task says so, the invoker goes on.

A hostile function tries its way out and reports what it reached by *returning*; when everything was refused it
raises ``Refused``. So ``Completed`` is an escape and ``Failed`` with ``Refused`` is the proof. After each of them a
well-behaved function runs on the same invoker.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.dev_stack import descendants, eventually
from tests.support.functions import python_bundle, zip_of
from tests.support.processes import WorkerProcess
from tests.support.site import Databases
from tests.support.worker_scene import WorkerScene, open_scene
from tracelake.contracts.user_api import TaskDetail
from tracelake.domain.errors import Invalid
from tracelake.embedded.postgres import Cluster

pytestmark = pytest.mark.xdist_group("hostile_bundles")

GOOD = python_bundle("def handler(event, context):\n    print('still here')\n")

PROBE = """
import json, os, socket, sys, urllib.request, urllib.error

class Refused(Exception):
    pass

def call(path, body, **headers):
    request = urllib.request.Request(
        os.environ["TRACE_DISPATCHER_URL"] + path, json.dumps(body).encode() if body is not None else None, headers
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode("utf-8", "replace")

def handler(event, context):
    found = attempt(event, event["config"])
    if found:
        print("ESCAPED", found)
        return None
    raise Refused("nothing was reached")
"""


class Stage:
    """One installation with one invoker that all hostile functions meet."""

    def __init__(self, scene: WorkerScene, invoker: WorkerProcess) -> None:
        self.scene = scene
        self.invoker = invoker
        self._number = 0

    def push(self, bundle: bytes) -> str:
        detail, _ = self.scene.client.push_bundle(io.BytesIO(bundle))
        return detail.bundle

    def start(self, bundle: bytes, *, timeout_seconds: int = 20, **config: Any) -> str:
        self._number += 1
        dag = f"hostile_{self._number}"
        self.scene.deploy(
            dag,
            "udf",
            runtime="lambda",
            udf={"bundle": self.push(bundle), "entrypoint": "main.handler"},
            config=config,
            timeout_seconds=timeout_seconds,
            max_attempts=1,
        )
        self.scene.trigger(dag)
        return dag

    def run(self, bundle: bytes, **more: Any) -> TaskDetail:
        return self.scene.ended(self.start(bundle, **more))

    def probe(self, source: str, **config: Any) -> TaskDetail:
        return self.run(python_bundle(PROBE + textwrap.dedent(source)), **config)

    def log(self, task: TaskDetail) -> Path:
        return self.invoker.home / "logs" / "tasks" / str(task.task_id) / f"{task.attempt}.log"

    def goes_on(self) -> None:
        task = self.run(GOOD)
        assert task.status == "Completed", task.error_message
        assert self.invoker.exit_code is None


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("hostile")
    with (
        Cluster(folder / "state", name="hostile") as cluster,
        open_scene(Databases.create(cluster), folder) as scene,
        scene.working("invoker", runtime="lambda") as invoker,
    ):
        yield Stage(scene, invoker)


def refused(stage: Stage, task: TaskDetail) -> None:
    log = stage.log(task)
    said = log.read_text(errors="replace")[-2000:] if log.exists() else ""
    assert task.status == "Failed", f"{task.error_message}: {said}"
    assert task.error_message == "Refused: nothing was reached", f"{task.error_message}: {said}"
    stage.goes_on()


def test_what_a_probe_reaches_is_seen_here(stage: Stage) -> None:
    """Otherwise all the others would prove nothing."""
    task = stage.probe("def attempt(event, config):\n    return call('/v1/task/heartbeat', {})[0]\n")
    assert task.status == "Completed"
    assert "ESCAPED" in stage.log(task).read_text()


def test_the_worker_token_is_nowhere_to_be_found(stage: Stage) -> None:
    token = stage.scene.replica.worker_headers["X-Trace-Worker-Token"]
    source = """
    def attempt(event, config):
        wanted = "".join(config["halves"]).encode()
        places = [f"/proc/{pid}/{name}" for pid in os.listdir("/proc") if pid.isdigit()
                  for name in ("environ", "cmdline", "mem", "maps")]
        for top in ("/etc", "/run", "/tmp", "/var", "/opt/tracelake", "/home", "/srv", "/mnt"):
            for folder, _, names in os.walk(top):
                places += [os.path.join(folder, name) for name in names]
        for place in places:
            try:
                with open(place, "rb") as file:
                    if wanted in file.read(1_000_000) and not place.endswith("/mem"):
                        return place
            except OSError:
                pass
        return None
    """
    # In two halves: the event itself is where the function would find it first.
    refused(stage, stage.probe(source, halves=[token[:12], token[12:]]))


def test_other_ports_of_the_machine_are_out_of_reach(stage: Stage) -> None:
    source = """
    def attempt(event, config):
        for host, port in config["ports"]:
            try:
                socket.create_connection((host, port), timeout=2).close()
                return f"{host}:{port}"
            except OSError:
                pass
        return None
    """
    replica = stage.scene.replica
    urls = [replica.internal_url, replica.user_url]
    ports: list[tuple[str, int]] = [("127.0.0.1", int(url.rpartition(":")[2])) for url in urls]
    database = httpx.URL(stage.scene.databases.state_dsn.replace("postgresql", "http", 1))
    ports += [("127.0.0.1", database.port or 5432), ("169.254.169.254", 80), ("::1", ports[0][1])]
    refused(stage, stage.probe(source, ports=ports))


def test_the_gateway_leads_to_the_tasks_own_endpoints_and_nowhere_else(stage: Stage) -> None:
    source = """
    def attempt(event, config):
        token = {"X-Trace-Task-Capability": event["capability_token"], "X-Trace-Worker-Token": "tlw_" + "x" * 40}
        body = {"task_id": event["task_id"], "worker_id": "me"}
        for path in ("/internal/task-claim", "/internal/events", "/internal/jwks/task", "/internal/bundle",
                     "/v1/dags", "/v1/tasks", "/v1/bundles", "/metrics", "/healthz", "/openapi.json", "/",
                     "/v1/task/../../internal/jwks/task", "/v1/task/%2e%2e/%2e%2e/internal/jwks/task",
                     "//internal/jwks/task", "/v1/task//../../internal/jwks/task",
                     "/2018-06-01/runtime/../../internal/jwks/task"):
            for sent in (body, None):
                status, text = call(path, sent, **token)
                if status not in (404, 405):
                    return f"{path}: {status} {text}"
        return None
    """
    refused(stage, stage.probe(source))


def test_a_token_is_good_for_its_own_task_only(stage: Stage) -> None:
    """Another task is running, and its whole fence is known."""
    sleeper = python_bundle("import time\ndef handler(event, context):\n    time.sleep(600)\n")
    dag = stage.start(sleeper, timeout_seconds=60)
    victim = stage.scene.until(dag, "the start", lambda shown: shown.status == "Running")
    source = """
    def attempt(event, config):
        token = {"X-Trace-Task-Capability": event["capability_token"], "Content-Type": "application/json"}
        fence = {"task_id": config["victim"], "attempt": 1, "lease_token": event["lease_token"]}
        for name, more in (("heartbeat", {}), ("events", {"events": [{"cursor": 1}]}),
                           ("complete", {"status": "Completed"}), ("complete", {"status": "Failed"})):
            for own in ({}, {"attempt": 2}, {"task_id": event["task_id"], "attempt": 7},
                        {"task_id": event["task_id"], "lease_token": config["victim"]}):
                status, text = call("/v1/task/" + name, {**fence, **more, **own}, **token)
                if status not in (403, 409, 422):
                    return f"{name} {own}: {status} {text}"
        for status, text in (call("/v1/task/heartbeat", fence), call("/v1/task/heartbeat", fence, **{
                "X-Trace-Task-Capability": event["capability_token"][:-4] + "AAAA"})):
            if status != 401:
                return f"no token: {status} {text}"
        return None
    """
    refused(stage, stage.probe(source, victim=str(victim.task_id)))
    assert stage.scene.task(dag).status == "Running"
    stage.scene.client.cancel(victim.task_id)


def test_nothing_outside_of_tmp_can_be_written(stage: Stage) -> None:
    source = """
    def attempt(event, config):
        for place in ("/", "/var/task", "/opt/tracelake", "/opt/tracelake/python", "/usr", "/etc", "/dev", "/proc",
                      "/proc/self/root", "/var/task/../..", "/run", *config["folders"]):
            try:
                with open(os.path.join(place, "written"), "w"):
                    return place
            except OSError:
                pass
        for place in ("/var/task/main.py", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger"):
            try:
                with open(place, "a"):
                    return place
            except OSError:
                pass
        return None
    """
    refused(stage, stage.probe(source, folders=[str(stage.invoker.home), str(stage.scene.folder)]))


def test_host_files_and_processes_are_not_there(stage: Stage) -> None:
    source = """
    def attempt(event, config):
        for place in config["places"]:
            if os.path.exists(place) or os.path.exists("/proc/1/root" + place):
                return place
        if len([name for name in os.listdir("/proc") if name.isdigit()]) > 4:
            return "processes"
        for pid in config["pids"]:
            try:
                os.kill(pid, 0)
                return f"pid {pid}"
            except OSError:
                pass
        return None
    """
    home = stage.invoker.home
    places = [
        home,
        stage.scene.folder / "dispatcher",
        "/root",
        "/home",
        "/etc/shadow",
        "/etc/hostname",
        "/sys/kernel",
    ]
    refused(stage, stage.probe(source, places=[str(place) for place in places], pids=[stage.invoker.pid]))


def test_no_other_process_can_be_traced_and_no_namespace_made(stage: Stage) -> None:
    source = """
    def attempt(event, config):
        import ctypes, subprocess
        libc = ctypes.CDLL(None, use_errno=True)
        child = subprocess.Popen(["sleep", "5"])
        try:
            if libc.ptrace(16, child.pid, 0, 0) == 0:
                return "ptrace"
            if libc.unshare(0x10000000) == 0:
                return "a user namespace"
            if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0:
                return "a mount"
            for family, kind in ((socket.AF_PACKET, socket.SOCK_RAW), (socket.AF_INET, socket.SOCK_RAW)):
                try:
                    socket.socket(family, kind)
                    return "a raw socket"
                except OSError:
                    pass
        finally:
            child.kill()
            child.wait()
        return None
    """
    refused(stage, stage.probe(source))


@pytest.mark.parametrize(
    ("source", "seconds", "said"),
    [
        pytest.param("while True:\n        pass", 2, "timed out after 2 s", id="endless loop"),
        pytest.param("held = []\n    while True: held.append(b'x' * 2**24)", 20, "emory", id="memory hog"),
        pytest.param("while True:\n        os.fork()", 3, "", id="fork bomb"),
        pytest.param("os.kill(os.getpid(), 9)", 20, "signal 9", id="ends itself"),
        pytest.param("os.close(1); os.close(2); os._exit(0)", 20, "exit code 0", id="closes all"),
        pytest.param("raise SystemExit", 20, "", id="exits"),
        pytest.param("open('/tmp/x', 'wb').write(b'0' * 2**30)", 20, "", id="fills tmp"),
        pytest.param("return 'x' * 7_000_000", 20, "bytes", id="returns too much"),
    ],
)
def test_a_function_that_takes_all_it_can_fails_alone(
    stage: Stage, source: str, seconds: int, said: str
) -> None:
    bundle = python_bundle(f"import os\ndef handler(event, context):\n    {source}\n")
    task = stage.run(bundle, timeout_seconds=seconds)
    assert task.status == "Failed"
    assert task.error_message is not None
    assert said in task.error_message
    stage.goes_on()


@pytest.mark.parametrize(
    "source", ["1/0", "import os\nos._exit(7)", "import os\nos.abort()", "raise SystemExit(0)"]
)
def test_a_function_that_dies_at_its_start_fails_alone(stage: Stage, source: str) -> None:
    task = stage.run(python_bundle(source + "\ndef handler(event, context):\n    pass\n"))
    assert task.status == "Failed"
    assert task.error_message
    stage.goes_on()


def test_a_child_that_was_kept_alive_is_gone_after_the_end(stage: Stage) -> None:
    before = set(descendants(stage.invoker.pid))
    source = """
    import os, time
    def handler(event, context):
        for _ in range(5):
            if os.fork() == 0:
                os.setsid()
                time.sleep(600)
    """
    task = stage.run(python_bundle(textwrap.dedent(source)))
    assert task.status == "Completed"

    def only_ours() -> bool:
        return len(set(descendants(stage.invoker.pid)) - before) <= 3

    eventually("nothing of it is left", only_ours)
    stage.goes_on()


def test_a_gigabyte_of_output_is_cut_and_costs_the_function_alone(stage: Stage) -> None:
    source = """
    import sys
    def handler(event, context):
        for _ in range(1024):
            sys.stdout.write("x" * 2**20)
    """
    task = stage.run(python_bundle(textwrap.dedent(source)), timeout_seconds=120)
    assert task.status == "Completed", task.error_message
    assert stage.log(task).stat().st_size < 40 * 1024 * 1024
    stage.goes_on()


@pytest.mark.parametrize("name", ["../main.py", "/main.py", "a/../../main.py"])
def test_a_zip_that_leads_elsewhere_is_not_even_taken(stage: Stage, name: str) -> None:
    with pytest.raises(Invalid, match="leads out of the bundle"):
        stage.push(zip_of({name: "x = 1"}))
    stage.goes_on()
