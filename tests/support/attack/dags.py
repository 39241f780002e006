"""Attacks by an owner of a user token: DAG files, triggers and queries that try to break the platform."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from tests.support.attack.attack import Verdict, all_of, attack, broken, held
from tests.support.attack.stack import COLD
from tests.support.worker_scene import MANUAL_SOURCE
from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.errors import TracelakeError

if TYPE_CHECKING:
    from tests.support.attack.stack import AttackedStack

BOUNDS = "what one task may emit is bounded"
FILES = "a DAG file is data"
NAMES = "names are names"


@attack(
    "dag",
    BOUNDS,
    "an event of 2^63 blocks for range_splitter in chunks of one block, with a timeout of 3 s",
    "the trigger or the task is refused with a reason, in its time; the state database doesn't grow without end",
    quick=True,
)
def a_huge_range_ends_in_time(stack: AttackedStack) -> Verdict:
    dag = stack.name("split")
    splitter = stack.job(
        "range_splitter",
        runtime="dispatcher",
        name="work",
        outputs=1,
        config={"chunk_size": 1},
        timeout_seconds=3,
    )
    stack.deploy(dag, [splitter])
    try:
        stack.client.trigger(dag, "src", start=0, end=MAX_BLOCK)
    except TracelakeError as error:
        return held(f"{error.status} {error.reason}")
    deadline = time.monotonic() + 20
    try:
        while time.monotonic() < deadline:
            task = stack.task(dag, "work")
            if task is not None and task.status in ("Failed", "Completed", "Canceled"):
                events = _events(stack, dag)
                outcome = f"{task.status}: {task.error_message}; {events} events"
                return held(outcome) if task.status == "Failed" and events <= 100_000 else broken(outcome)
            time.sleep(0.1)
        events = _events(stack, dag)
        return broken(f"runs on after 20 s with a timeout of 3 s; {events} events so far")
    finally:
        task = stack.task(dag, "work")
        if task is not None and task.status not in ("Failed", "Completed", "Canceled"):
            stack.client.cancel(task.task_id)


def _events(stack: AttackedStack, dag: str) -> int:
    [work] = [each for each in stack.client.datasets(dag=dag).datasets if each.job == "work"]
    with stack.admin(stack.handle.state_dsn) as connection:
        query = "SELECT count(*) FROM event WHERE dataset_version = %s"
        row = connection.execute(query, [work.dataset_version]).fetchone()
        return int(row[0]) if row else -1


@attack(
    "dag",
    BOUNDS,
    "the same with chunks of 10,000 blocks over 10^12 blocks, and a range_aggregator of 2^63",
    "refused with a reason, in time",
)
def a_large_range_ends_in_time(stack: AttackedStack) -> Verdict:
    dag = stack.name("split")
    splitter = stack.job(
        "range_splitter", runtime="dispatcher", outputs=1, config={"chunk_size": 10_000}, timeout_seconds=5
    )
    stack.deploy(dag, [splitter])
    try:
        stack.client.trigger(dag, "src", start=0, end=10**12)
    except TracelakeError as error:
        return held(f"{error.status} {error.reason}")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        task = stack.task(dag, "work")
        if task is not None and task.status in ("Failed", "Completed", "Canceled"):
            outcome = f"{task.status}: {task.error_message}"
            return held(outcome) if task.status == "Failed" else broken(outcome)
        time.sleep(0.1)
    task = stack.task(dag, "work")
    if task is not None:
        stack.client.cancel(task.task_id)
    return broken("runs on after 30 s with a timeout of 5 s")


def _bomb() -> bytes:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    return "\n".join([*lines, "name: bomb", "jobs: *a11"]).encode()


def _deploys(text: bytes) -> dict[str, bytes]:
    good = json.dumps({"name": "x", "jobs": [MANUAL_SOURCE]})
    return {
        "bomb of aliases": _bomb(),
        "deep nesting": b"name: x\njobs: " + b"[" * 50_000 + b"]" * 50_000,
        "deep blocks": b"\n".join(b" " * n + b"a:" for n in range(3000)),
        "python object": b"name: !!python/object/apply:os.system ['id']\njobs: []",
        "unknown tag": b"name: !hostile x\njobs: []",
        "keys twice": b"name: x\nname: y\njobs: []",
        "merge": b"name: x\njobs: [{<<: *x}]",
        "not utf-8": b"name: \xff\xfe\njobs: []",
        "null": good.replace('"x"', '"x\\u0000"').encode(),
        "huge": b"name: x\njobs: []\n# " + b"x" * 20_000_000,
        "huge number": b"name: x\njobs: []\nversion: " + b"9" * 100_000,
        "infinite": b"name: x\njobs: [{name: a, timeout_seconds: .inf}]",
        "empty": b"",
        "a list": b"[]",
        "two documents": b"name: x\njobs: []\n---\nname: y\njobs: []",
        **({"given": text} if text else {}),
    }


@attack(
    "dag",
    FILES,
    "YAML bombs, deep nesting, tags, doubled keys, 20 MB",
    "4xx with a reason, at once",
)
def hostile_files_are_refused(stack: AttackedStack) -> Verdict:
    verdicts: list[tuple[str, Verdict]] = []
    for name, body in _deploys(b"").items():
        for path in ("/v1/dags", "/v1/dags/plan"):
            answer = stack.user("POST", path, content=body)
            ok = 400 <= answer.status_code < 500 and "reason" in answer.text
            verdicts.append(
                (
                    name,
                    held(str(answer.status_code))
                    if ok
                    else broken(f"{answer.status_code} {answer.text[:100]}"),
                )
            )
    return all_of(verdicts)


ODD_NAMES = (
    "../x",
    "a/b",
    "a b",
    "a\nb",
    "a\x00b",
    ".",
    "..",
    "-x",
    "a%2fb",
    "ünïcode",
    "a\u202eb",
    "x" * 300,
    "",
    "'; DROP TABLE dag; --",
    "${env:HOME}",
    "{x}",
    "a;b",
    "con\\x",
    "A",
    "a.b",
    "a__b",
    "\ud800",
)


@attack(
    "dag",
    NAMES,
    "DAG, job, output and dataset names with slashes, dots, quotes, controls, 300 letters",
    "422 naming the field, or a name like any other: never 5xx, never another place",
)
def odd_names_are_refused(stack: AttackedStack) -> Verdict:
    verdicts: list[tuple[str, Verdict]] = []
    for name in ODD_NAMES:
        job = stack.job("noop", outputs=[{"name": "out", "storage": "none"}])
        bodies: dict[str, Any] = {
            "dag": {"name": name, "jobs": [MANUAL_SOURCE]},
            "job": {"name": "n", "jobs": [MANUAL_SOURCE, {**job, "name": name}]},
            "output": {"name": "n", "jobs": [MANUAL_SOURCE, {**job, "outputs": [{"name": name}]}]},
            "dataset": {
                "name": "n",
                "jobs": [MANUAL_SOURCE, job],
                "publish": {name: {"from": {"job": "work"}}},
            },
        }
        for where, body in bodies.items():
            answer = stack.user("POST", "/v1/dags/plan", content=json.dumps(body).encode())
            ok = answer.status_code < 500
            verdicts.append(
                (f"{where} {name[:20]!r}", held(str(answer.status_code)) if ok else broken(answer.text[:80]))
            )
    return all_of(verdicts)


@attack(
    "dag",
    NAMES,
    "another DAG that publishes the victim's dataset, reads its private output, takes its buffer",
    "409 or 422 with a reason",
    quick=True,
)
def datasets_are_not_taken_over(stack: AttackedStack) -> Verdict:
    job = stack.job("noop", outputs=[{"name": "out", "storage": "parquet"}])
    schema = {"columns": {"org_id": "uuid", "key": "text"}, "unique": ["org_id", "key"]}
    tries: dict[str, dict[str, Any]] = {
        "same name": {"publish": {COLD: {"from": {"job": "work", "output": 0}}}},
        "same buffer": {
            "publish": {"notes": {"storage": "postgres", "write_mode": "buffered", "schema": schema}}
        },
        "buffer over table": {
            "publish": {COLD: {"storage": "postgres", "write_mode": "buffered", "schema": schema}}
        },
    }
    verdicts: list[tuple[str, Verdict]] = []
    for name, more in tries.items():
        body = {"name": stack.name("taken"), "jobs": [MANUAL_SOURCE, job], **more}
        answer = stack.user("POST", "/v1/dags", content=json.dumps(body).encode())
        ok = 400 <= answer.status_code < 500
        verdicts.append(
            (
                name,
                held(f"{answer.status_code} {answer.json().get('reason')}")
                if ok
                else broken(answer.text[:120]),
            )
        )
    return all_of(verdicts)


@attack(
    "dag",
    NAMES,
    "identifiers of config that end up in SQL: sort_by, indexes, where, unique_key, column names",
    "refused with a reason, or quoted: nothing else is run",
)
def config_is_no_sql(stack: AttackedStack) -> Verdict:
    evil = 'x"; DROP TABLE data.hostile; --'
    verdicts: list[tuple[str, Verdict]] = []
    for name, config, storage in (
        ("sort_by", {"sort_by": [evil]}, "parquet"),
        ("indexes", {"indexes": [evil]}, "postgres"),
        ("column", {"sql": f"SELECT block_number, 1 AS `{evil}` FROM scope_blocks"}, "postgres"),
    ):
        dag = stack.name("config")
        sql = {"sql": "SELECT block_number FROM scope_blocks", **config}
        job = stack.job(
            "sql_transform", runtime="ecs_spark", config=sql, outputs=[{"name": "out", "storage": storage}]
        )
        try:
            stack.deploy(dag, [job])
        except TracelakeError as error:
            verdicts.append((name, held(error.reason)))
            continue
        stack.client.trigger(dag, "src", start=0, end=1)
        ran = stack.ended(dag, "work")
        quoted = not ran.failed and name == "column"
        verdicts.append(
            (name, held("quoted" if quoted else ran.why[:80]) if ran.failed or quoted else broken("accepted"))
        )
    for where in (
        "1 = 1; DROP TABLE x",
        "x = (SELECT 1)",
        "pg_sleep(1) = 1",
        "x = 'a' OR read_text('/etc/passwd') = ''",
        "x" * 100_000,
    ):
        job = stack.job("noop", inputs=[{"from": {"job": "src", "output": 0}, "where": where}])
        body = {"name": "n", "jobs": [MANUAL_SOURCE, job]}
        answer = stack.user("POST", "/v1/dags/plan", content=json.dumps(body).encode())
        ok = 400 <= answer.status_code < 500
        verdicts.append(
            (f"where {where[:20]}", held(str(answer.status_code)) if ok else broken(answer.text[:80]))
        )
    return all_of(verdicts)


@attack(
    "dag",
    "secrets go to whom they were declared for",
    "a function that asks for secrets, an operator that asks for the platform's own variables",
    "refused at the deploy, or the task fails without a value",
    quick=True,
)
def platform_settings_are_no_secrets(stack: AttackedStack) -> Verdict:
    names = (
        "TRACELAKE_WORKER_TOKEN",
        "WORKER_TOKEN",
        "PATH",
        "LD_PRELOAD",
        "PYTHONPATH",
        "TRACE_LEASE_TOKEN",
    )
    verdicts: list[tuple[str, Verdict]] = []
    for name in names:
        try:
            ran = stack.operate(f"import os\nreport(value=os.environ.get({name!r}, ''))", secrets=[name])
        except TracelakeError as error:
            verdicts.append((name, held(error.reason)))
            continue
        if ran.failed:
            verdicts.append((name, held(ran.why[:60])))
        else:
            verdicts.append((name, broken(f"the task got {len(ran.report('value'))} characters")))
    return all_of(verdicts)


@attack(
    "dag",
    "sizes that people type are bounded",
    "numbers beyond reason in a DAG: timeouts, attempts, chunk sizes, outputs, jobs",
    "422 naming the field",
)
def sizes_of_a_dag_are_bounded(stack: AttackedStack) -> Verdict:
    verdicts: list[tuple[str, Verdict]] = []
    splitter = stack.job("range_splitter", runtime="dispatcher", outputs=1, config={"chunk_size": 2**70})
    bodies: dict[str, Any] = {
        "timeout": {**stack.job("noop"), "timeout_seconds": 10**12},
        "negative timeout": {**stack.job("noop"), "timeout_seconds": -1},
        "attempts": {**stack.job("noop"), "max_attempts": 10**9},
        "outputs": {**stack.job("noop"), "outputs": 10**6},
        "chunk size": splitter,
        "heartbeat": {**stack.job("noop"), "heartbeat_timeout_seconds": 10**12},
    }
    for name, job in bodies.items():
        body = json.dumps({"name": "n", "jobs": [MANUAL_SOURCE, job]}).encode()
        answer = stack.user("POST", "/v1/dags/plan", content=body)
        ok = 400 <= answer.status_code < 500
        verdicts.append((name, held(str(answer.status_code)) if ok else broken(answer.text[:80])))
    for body_of in (
        {"cursor": 2**63},
        {"start": 5, "end": 1},
        {"start": -1, "end": 1},
        {"cursor": 1e300},
        {"cursor": "1"},
    ):
        answer = stack.user("POST", "/v1/sources/victim/src/trigger", json=body_of)
        ok = 400 <= answer.status_code < 500
        verdicts.append(
            (f"trigger {body_of}", held(str(answer.status_code)) if ok else broken(answer.text[:80]))
        )
    return all_of(verdicts)
