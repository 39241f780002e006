"""The attacked stack: a real ``tracelake dev`` with all workers, victims in it, and ways to run hostile code.

The victims are a dataset in Parquet, one in Postgres and a buffered one. ``unharmed`` checks that they still
have their rows.
"""

from __future__ import annotations

import json
import os
import re
import signal
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg

from tests.support.attack.hostile import MARK
from tests.support.dev_stack import DevStack, descendants, eventually
from tests.support.functions import python_bundle
from tests.support.worker_scene import ENDED, MANUAL_SOURCE
from tracelake.client import Client
from tracelake.contracts.user_api import TaskDetail
from tracelake.dev.handle import DevHandle
from tracelake.domain.errors import TracelakeError
from tracelake.stack_connection import DEV_FILE, read_handle

OPERATORS = str(Path(__file__).with_name("hostile.py"))
COLD, HOT, BUFFER = "ledger", "hot_ledger", "notes"
ROWS = 10
CAPS = {"TRACELAKE_TASK_EVENTS": "20000"}
"""Small ones, so that an attack meets them soon."""
_TOTAL = sum(range(ROWS))
_NOTES = {"columns": {"org_id": "uuid", "key": "text", "note": "text"}, "unique": ["org_id", "key"]}
_WRITE = f"""
import pyarrow as pa
blocks = list(ctx.blocks)
table = pa.table({{"block_number": pa.array(blocks, pa.int64()), "amount": pa.array(blocks, pa.int64())}})
ctx.outputs["{COLD}"].write(table)
ctx.outputs["{HOT}"].stage(table)
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """A task that ended, and what its code reported."""

    task: TaskDetail
    log: str

    @property
    def failed(self) -> bool:
        return self.task.status == "Failed"

    @property
    def why(self) -> str:
        return (self.task.error_message or "").strip() or "(no reason given)"

    @property
    def reports(self) -> list[dict[str, Any]]:
        marked = (line.partition(MARK)[2] for line in self.log.splitlines() if MARK in line)
        return [json.loads(each) for each in marked]

    def report(self, name: str) -> Any:
        """The last value that was reported under this name."""
        values = [each[name] for each in self.reports if name in each]
        if not values:
            raise RuntimeError(f"no report of {name!r}: {self.task.status} {self.why} {self.log[-1500:]}")
        return values[-1]


class AttackedStack:
    def __init__(self, home: Path, handle: DevHandle, client: Client, pid: int) -> None:
        self.home = home
        self.handle = handle
        self.client = client
        self.pid = pid
        # The installation's own addresses, whatever proxy this machine has; one connection for all requests.
        self._http = httpx.Client(trust_env=False, timeout=60)
        self._number = 0
        self._tag = os.urandom(3).hex()

    # What runs here

    @property
    def processes(self) -> list[int]:
        return [self.pid, *descendants(self.pid)]

    def crash(self, part: str) -> None:
        """Kill a process of the stack; returns once another one is in its place."""
        before = self._pid_of(part)
        if before is not None:
            os.kill(before, signal.SIGKILL)
            eventually(f"another {part} runs", lambda: self._pid_of(part) not in (None, before))

    def _pid_of(self, part: str) -> int | None:
        handle = read_handle(self.home / DEV_FILE, DevHandle)
        return None if handle is None else handle.pids.get(part)

    @property
    def runs_functions(self) -> bool:
        return "worker-lambda" in self.handle.pids

    def admin(self, dsn: str) -> psycopg.Connection[Any]:
        """By the superuser, to look at what an attack has left."""
        return psycopg.connect(dsn, autocommit=True)

    @property
    def secrets(self) -> list[str]:
        """Credentials that no attack may see."""
        handle = self.handle
        dsns = (handle.state_dsn, handle.data_owner_dsn, handle.queue_dsn, handle.data_write_dsn)
        passwords = [httpx.URL(dsn).password for dsn in dsns]
        return [handle.worker_token, handle.user_token, *filter(None, passwords)]

    # Code of an attacker, as a task

    def name(self, stem: str = "dag") -> str:
        self._number += 1
        return f"{stem}_{self._tag}_{self._number}"

    def deploy(
        self, dag: str, jobs: Sequence[Mapping[str, Any]], publish: Mapping[str, Any] | None = None
    ) -> None:
        body = {"name": dag, "jobs": [MANUAL_SOURCE, *jobs], **({"publish": publish} if publish else {})}
        self.client.deploy(json.dumps(body).encode())

    def job(
        self, operator: str, *, runtime: str = "ecs_python", name: str = "work", **more: Any
    ) -> dict[str, Any]:
        return {
            "name": name,
            "activation": "reactive",
            "runtime": runtime,
            **({"operator": operator} if operator else {}),
            "inputs": [{"from": {"job": "src", "output": 0}}],
            "outputs": [{"name": "out", "storage": "none"}],
            "execution_strategy": "PerPartition",
            "timeout_seconds": 300,
            "max_attempts": 1,
            **more,
        }

    def operate(self, code: str, *, runtime: str = "ecs_python", **more: Any) -> Ran:
        """``code`` as an operator; ``ctx`` is its context, ``report`` how it says what it found."""
        dag = self.start_operator(code, runtime=runtime, **more)
        return self.ended(dag)

    def start_operator(self, code: str, *, runtime: str = "ecs_python", **more: Any) -> str:
        dag = more.pop("dag", None) or self.name()
        publish, given = more.pop("publish", None), more.pop("config", {})
        config = {**given, "code": textwrap.dedent(code)}
        self.deploy(dag, [self.job("attack_exec", runtime=runtime, config=config, **more)], publish)
        self.client.trigger(dag, "src", start=0, end=ROWS - 1)
        return dag

    def transform(self, *queries: str, storage: str = "parquet") -> list[Ran | str]:
        """Each as the SELECT of a DAG of its own, all at once; text is why a DAG was refused."""
        started: list[tuple[str, str]] = []
        for sql in queries:
            dag = self.name("sql")
            outputs = [{"name": "out", "storage": storage}]
            job = self.job("sql_transform", runtime="ecs_spark", config={"sql": sql}, outputs=outputs)
            try:
                self.deploy(dag, [job], {dag: {"from": {"job": "work", "output": 0}}})
                self.client.trigger(dag, "src", start=0, end=2)
                started.append((dag, ""))
            except TracelakeError as refused:
                started.append((dag, str(refused)))
        return [refused or self.ended(dag, "work") for dag, refused in started]

    def function(self, source: str, **more: Any) -> Ran:
        return self.ended(self.start_function(source, **more))

    def start_function(self, source: str, **more: Any) -> str:
        """``source`` is a module with a ``handler``; its output is what it prints."""
        dag, name = more.pop("dag", None) or self.name("fn"), more.pop("name", "work")
        publish = more.pop("publish", None)
        bundle = more.pop("bundle", None) or self.push(python_bundle(textwrap.dedent(source)))
        udf = {"bundle": bundle, "entrypoint": "main.handler"}
        given = {"timeout_seconds": 20, "max_attempts": 1, **more}
        self.deploy(dag, [self.job("", runtime="lambda", name=name, udf=udf, **given)], publish)
        self.client.trigger(dag, "src", start=0, end=ROWS - 1)
        return dag

    def push(self, bundle: bytes) -> str:
        import io

        return self.client.push_bundle(io.BytesIO(bundle))[0].bundle

    def task(self, dag: str, job: str | None = None) -> TaskDetail | None:
        found = self.client.tasks(dag=dag, job=job).tasks
        return self.client.task(found[0].task_id) if found else None

    def ended(self, dag: str, job: str | None = None) -> Ran:
        def look() -> TaskDetail | None:
            shown = self.task(dag, job)
            return shown if shown is not None and shown.status in ENDED else None

        task = eventually(f"the end of {dag}", look)
        return Ran(task, self.log(task))

    def until(self, dag: str, status: str) -> TaskDetail:
        def look() -> TaskDetail | None:
            shown = self.task(dag)
            return shown if shown is not None and shown.status == status else None

        return eventually(f"{dag} is {status}", look)

    def log(self, task: TaskDetail) -> str:
        path = self.home / "logs" / "tasks" / str(task.task_id) / f"{task.attempt}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # People

    def query(self, sql: str, **more: Any) -> httpx.Response:
        return self.user("POST", "/v1/query", json={"sql": sql, **more})

    def user(self, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.handle.user_token}", **more.pop("headers", {})}
        return self.request(method, self.handle.user_url + path, headers=headers, **more)

    def request(self, method: str, url: str, **more: Any) -> httpx.Response:
        """To any of its ports, by any client."""
        try:
            return self._http.request(method, url, **more)
        except httpx.RemoteProtocolError:
            # A connection that was kept open, and closed meanwhile.
            return self._http.request(method, url, **more)

    def close(self) -> None:
        self._http.close()

    # Victims

    def set_up_victims(self) -> None:
        outputs = [{"name": COLD, "storage": "parquet"}, {"name": HOT, "storage": "postgres"}]
        publish = {
            COLD: {"from": {"job": "work", "output": 0}},
            HOT: {"from": {"job": "work", "output": 1}},
            BUFFER: {"storage": "postgres", "write_mode": "buffered", "schema": _NOTES},
        }
        done = self.operate(_WRITE, dag="victim", outputs=outputs, publish=publish)
        if done.failed:
            raise RuntimeError(f"the victims can't be set up: {done.why} {done.log[-2000:]}")

    def unharmed(self) -> str:
        """Empty when the victims are as they were; otherwise what has changed."""
        changed: list[str] = []
        for name in (COLD, HOT):
            answer = self.query(f"SELECT count(*), sum(amount) FROM {name}")
            rows = answer.json().get("rows") if answer.status_code == 200 else answer.text
            if rows not in ([[ROWS, _TOTAL]], [[ROWS, str(_TOTAL)]]):
                changed.append(f"{name} is {rows}")
        return ", ".join(changed)

    def file_of(self, dataset: str) -> Path:
        [partition] = self.client.partitions(dataset).partitions
        found = re.search(r"file://[^\"']+\.parquet", partition_text(self, dataset))
        if found is None:
            raise RuntimeError(f"no file of {dataset} is known: {partition}")
        return Path(found[0].removeprefix("file://"))


def partition_text(stack: AttackedStack, dataset: str) -> str:
    return stack.user("GET", f"/v1/datasets/{dataset}/partitions").text


@contextmanager
def attacked_stack(folder: Path) -> Iterator[AttackedStack]:
    """On a home that was there before, and open to all users: the stack has to close it."""
    home = folder / "home"
    home.mkdir(parents=True)
    home.chmod(0o755)
    stack = DevStack(home, folder / "output", "--operators", OPERATORS, workers=True, **CAPS)
    try:
        handle = stack.until_ready()
        with Client(handle.user_url, handle.user_token) as client:
            attacked = AttackedStack(home, handle, client, stack.pid)
            attacked.set_up_victims()
            yield attacked
            attacked.close()
    finally:
        stack.close()


@contextmanager
def running_stack(home: Path) -> Iterator[AttackedStack]:
    """One that is already running, with our operators."""
    handle = read_handle(home / DEV_FILE, DevHandle)
    if handle is None:
        raise RuntimeError(f"no stack runs on {home}")
    with Client(handle.user_url, handle.user_token) as client:
        attacked = AttackedStack(home, handle, client, handle.pids["supervisor"])
        if not client.tasks(dag="victim").tasks:
            attacked.set_up_victims()
        yield attacked
