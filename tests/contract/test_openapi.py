"""Every endpoint driven from its own OpenAPI document: no 5xx, and nothing that the document doesn't say.

Both ports and the Query Service are served for real, over a real database. Requests come from the document,
right and wrong ones; in about half of the right ones, ids are replaced by those of things that exist, so that the
steps behind the routes are reached. The same requests in every run; ``make test-long`` sends eight times as many.
"""

from __future__ import annotations

import asyncio
import io
import os
import threading
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode
from schemathesis.checks import negative_data_rejection, positive_data_acceptance
from schemathesis.core.parameters import ParameterLocation

from tests.support.databases import ORG, build_state_template
from tests.support.postgres import SharedPostgres
from tests.support.query_port import grant_roles, query_settings
from tests.support.query_port import served as served_app
from tests.support.surfaces import WORKER_TOKEN, open_surfaces
from tracelake.dispatcher.api.apps import INTERNAL_ROUTES, USER_ROUTES, describe
from tracelake.dispatcher.runtimes import RuntimeRegistry
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.entropy import Entropy
from tracelake.objects.directory import DirectoryStore
from tracelake.query.api import describe as describe_query_service
from tracelake.query.app import open_surface
from tracelake.store.db import Database, open_pool
from tracelake.store.jobs import JobDefinitions
from tracelake.tokens.signing import PemKeyring

DAG = """
name: driven
jobs:
  - {{ name: src, activation: source, runtime: dispatcher, source: {{ kind: manual }}, outputs: 1 }}
  - {{ name: clock, activation: source, source: {{ kind: cron, schedule: "0 3 * * *" }}, outputs: 1 }}
  - {{ name: calls, activation: source, source: {{ kind: webhook }}, outputs: 1 }}
  - {{ name: always, activation: source, runtime: ecs_python, operator: noop, source: {{ kind: always_on }},
       outputs: [{{ name: rows, storage: postgres }}], update_strategy: replace }}
  - name: easy
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{{ from: {{ job: src, output: 0 }} }}]
    outputs: 1
    execution_strategy: PerPartition
  - name: cold
    activation: reactive
    runtime: ecs_python
    operator: mine
    inputs: [{{ from: {{ job: src, output: 0 }} }}]
    outputs: [{{ name: rows, storage: parquet }}, {{ name: note, storage: none }}]
    execution_strategy: PerPartition
    update_strategy: replace
    config: {{ n: {n} }}
  - name: follow
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{{ from: {{ job: always, output: 0 }} }}]
    outputs: 1
    execution_strategy: PerUpdate
publish:
  cold_rows: {{ from: {{ job: cold, output: 0 }} }}
  alerts: {{ storage: postgres, write_mode: buffered, schema: {{ columns: {{ key: text }}, unique: [key] }} }}
"""
schemathesis.serializer.alias("application/zip", "application/octet-stream")


def zipped(text: str) -> bytes:
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w") as archive:
        archive.writestr("main.py", text)
    return into.getvalue()


BUNDLES = [zipped("one"), zipped("two"), b"PK", zipped("three")[:-1]]
FILES = [DAG.format(n=0), DAG.format(n=1), "name: other\njobs: []\n", "name: driven\njobs:\n  - {name: x}\n"]


TASK_SCOPED = (
    "/v1/task/complete",
    "/v1/task/events",
    "/v1/task/heartbeat",
    "/v1/task/buffer-publish",
    "/v1/task/query",
    "/v1/task/source-body",
)


@dataclass
class Served:
    """Both ports, and things that exist behind them; each kind of caller has running attempts of its own."""

    internal_url: str
    user_url: str
    query_url: str
    user_token: str = field(repr=False)
    claims: list[dict[str, Any]] = field(default_factory=list, repr=False)
    known: dict[str, list[Any]] = field(default_factory=dict)

    def own_claim(self, path: str) -> dict[str, Any]:
        return self.claims[TASK_SCOPED.index(path)]

    def other_claims(self) -> list[dict[str, Any]]:
        return self.claims[len(TASK_SCOPED) :]


@pytest.fixture(scope="module")
def served(postgres_cluster: SharedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    dsn = postgres_cluster.clone("state", build_state_template)
    ready: list[Served] = []
    servers: list[uvicorn.Server] = []
    up = threading.Event()
    folder = tmp_path_factory.mktemp("openapi")
    thread = threading.Thread(target=lambda: asyncio.run(serve(dsn, folder, ready, servers, up)))
    thread.start()
    try:
        assert up.wait(30)
        [found] = ready
        populate(found)
        yield found
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(30)
        postgres_cluster.drop(dsn)


async def serve(
    dsn: str, folder: Path, ready: list[Served], servers: list[uvicorn.Server], up: threading.Event
) -> None:
    pool = await open_pool(dsn, min_size=1, max_size=8)
    ctx = StepContext(
        db=Database(pool),
        entropy=Entropy(),
        definitions=JobDefinitions(),
        objects=DirectoryStore(folder / "objects"),
        signer=PemKeyring(folder / "keys"),
        runtimes=RuntimeRegistry(),
        org_id=ORG,
    )
    await grant_roles(dsn)
    handle = folder / "dispatcher.json"
    settings = replace_fields(
        query_settings(dsn, None, folder / "objects", ""), internal_url=None, dispatcher_file=handle
    )
    async with (
        open_surface(settings) as (surface, _),
        served_app(surface) as query_url,
        open_surfaces(ctx, query_url=query_url) as api,
    ):
        servers += [
            uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", ws="none"))
            for app in (api.internal_app, api.user_app)
        ]
        serving = [asyncio.create_task(server.serve()) for server in servers]
        while not all(server.started for server in servers):
            await asyncio.sleep(0.01)
        urls = [f"http://127.0.0.1:{s.servers[0].sockets[0].getsockname()[1]}" for s in servers]
        handle.write_bytes(msgspec.json.encode({"internal_url": urls[0]}))
        ready.append(Served(*urls, query_url, api.user_token))
        up.set()
        await asyncio.gather(*serving)
    await pool.close()


def populate(served: Served) -> None:
    person = {"Authorization": f"Bearer {served.user_token}"}
    worker = {"X-Trace-Worker-Token": WORKER_TOKEN}
    deployed = httpx.post(f"{served.user_url}/v1/dags", content=FILES[0], headers=person)
    assert deployed.status_code == 201, deployed.text
    for start in range(0, 400, 10):
        scope = {"start": start, "end": start + 9}
        url = f"{served.user_url}/v1/sources/driven/src/trigger"
        assert httpx.post(url, json=scope, headers=person).status_code == 202
    tasks = httpx.get(f"{served.user_url}/v1/tasks?limit=1000", headers=person).json()["tasks"]
    for task in tasks[:40]:
        body = {"task_id": task["task_id"], "worker_id": "w", "claim_key": "k"}
        claim = httpx.post(f"{served.internal_url}/internal/task-claim", json=body, headers=worker).json()
        assert claim["status"] == "Claimed"
        served.claims.append(claim)
    pushed = httpx.post(f"{served.user_url}/v1/bundles", content=BUNDLES[0], headers=person)
    assert pushed.status_code == 201, pushed.text
    outputs = [output for job in deployed.json()["jobs"] for output in job["outputs"]]
    served.known = {
        "task_id": [task["task_id"] for task in tasks],
        "dataset_uuid": [output["dataset_uuid"] for output in outputs],
        "dataset_version": [output["dataset_version"] for output in outputs],
        "dataset": ["cold_rows", "alerts"],
        "name": ["cold_rows", "alerts", outputs[0]["dataset_uuid"]],
        "dag": ["driven"],
        "bundle": [pushed.json()["bundle"]],
        "sha256": [pushed.json()["bundle"].removeprefix("sha256:")],
        "job": ["src", "easy", "cold", "always", "follow"],
        "input_index": [0],
        "sql": ["SELECT 1 AS one", "SELECT * FROM cold_rows", "SELECT", "SELECT ?"],
    }


def make_real(case: schemathesis.Case, served: Served, claims: list[dict[str, Any]]) -> bytes | None:
    """In about half of the well-formed requests, name things that exist. Files are returned as they are."""
    draw = zlib.crc32(repr((case.path_parameters, case.query, case.body)).encode())
    if case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE or draw % 2:
        return None
    claim = claims[draw // 2 % len(claims)]
    for part in (case.path_parameters, case.query, case.body):
        replace(part, served, claim, draw // 2)
    match case.media_type:
        case "application/yaml":
            return FILES[draw // 2 % len(FILES)].encode()
        case "application/zip":
            return BUNDLES[draw // 2 % len(BUNDLES)]
    return None


def replace(value: Any, served: Served, claim: dict[str, Any], draw: int) -> None:
    if isinstance(value, list):
        for item in value:
            replace(item, served, claim, draw)
    elif isinstance(value, dict):
        for name in value:
            if "attempt" in value and name in ("task_id", "attempt", "lease_token"):
                value[name] = claim[name]
            elif name in ("events", "outputs") and value[name]:
                value[name] = [scoped(name, entry, claim, draw) for entry in value[name][:3]]
            elif name in served.known and value[name] is not None:
                value[name] = served.known[name][draw % len(served.known[name])]
            else:
                replace(value[name], served, claim, draw)


def scoped(kind: str, entry: dict[str, Any], claim: dict[str, Any], draw: int) -> dict[str, Any]:
    """An event or an output of the claimed task, with some of what was generated left in it."""
    output = claim["task"]["outputs"][draw % len(claim["task"]["outputs"])]
    span = claim["task"]["inputs"][0] if claim["task"]["inputs"] else {}
    scopes: list[dict[str, Any]] = [
        {name: span[name] for name in ("start", "end") if name in span},
        {"cursor": draw % 1000},
        {name: entry[name] for name in ("start", "end", "cursor") if name in entry},
    ]
    if kind == "outputs":
        return {"output_index": output["output_index"], **scopes[draw // 2 % 3]}
    scopes.append({"id": f"i{draw % 5}", "invalidate": {"start": draw % 300, "end": draw % 300 + 20}})
    ids = {name: output[name] for name in ("dataset_uuid", "dataset_version")}
    return {**ids, **scopes[draw // 2 % 4]}


def described(document: bytes) -> tuple[dict[str, Any], Any]:
    """The document of a port before it is served: operations become tests while tests are collected."""
    parsed = msgspec.json.decode(document)
    return parsed, schemathesis.openapi.from_dict(parsed)


INTERNAL_DOCUMENT, internal_schema = described(describe("internal", INTERNAL_ROUTES))
USER_DOCUMENT, user_schema = described(describe("user", USER_ROUTES))
QUERY_DOCUMENT, query_schema = described(describe_query_service())
EXAMPLES = int(os.environ.get("TRACELAKE_OPENAPI_EXAMPLES", "0"))
bounded = settings(
    max_examples=EXAMPLES or 12,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def declined(case: schemathesis.Case) -> list[Any]:
    """A well-formed request may ask for something that isn't there, so its acceptance isn't checked. One that
    was to lack its credential is given it here, so its rejection isn't; ``ignored_auth`` sees to that."""
    headers = case.meta.components.get(ParameterLocation.HEADER) if case.meta else None
    spoilt = headers is not None and headers.mode is GenerationMode.NEGATIVE
    return [positive_data_acceptance, *([negative_data_rejection] if spoilt else [])]


@internal_schema.parametrize()
@bounded
def test_the_internal_port_does_what_its_document_says(case: schemathesis.Case, served: Served) -> None:
    headers = {"X-Trace-Worker-Token": WORKER_TOKEN}
    claims = served.other_claims()
    if case.path in TASK_SCOPED:
        claims = [served.own_claim(case.path)]
        headers = {"X-Trace-Task-Capability": claims[0]["capability_token"]}
    make_real(case, served, claims)
    case.call_and_validate(base_url=served.internal_url, headers=headers, excluded_checks=declined(case))


@user_schema.parametrize()
@bounded
def test_the_user_port_does_what_its_document_says(case: schemathesis.Case, served: Served) -> None:
    headers = {"Authorization": f"Bearer {served.user_token}"}
    file = make_real(case, served, served.claims)
    more = {} if file is None else {"data": file}
    case.call_and_validate(base_url=served.user_url, headers=headers, excluded_checks=declined(case), **more)


@query_schema.parametrize()
@bounded
def test_the_query_service_does_what_its_document_says(case: schemathesis.Case, served: Served) -> None:
    headers = {"Authorization": f"Bearer {served.user_token}"}
    if case.path in TASK_SCOPED:
        headers = {"X-Trace-Task-Capability": served.own_claim(case.path)["capability_token"]}
    make_real(case, served, served.claims)
    case.call_and_validate(base_url=served.query_url, headers=headers, excluded_checks=declined(case))


def test_the_documents_that_drive_these_tests_are_the_served_ones(served: Served) -> None:
    assert httpx.get(f"{served.internal_url}/openapi.json").json() == INTERNAL_DOCUMENT
    assert httpx.get(f"{served.user_url}/openapi.json").json() == USER_DOCUMENT
    assert httpx.get(f"{served.query_url}/openapi.json").json() == QUERY_DOCUMENT
