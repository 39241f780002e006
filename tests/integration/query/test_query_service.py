"""The Query Service over its port: answers in each form, every outcome audited, nothing kept of what was asked."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytest_asyncio

from tests.support.conversation import dag, reactive, source
from tests.support.databases import build_state_template
from tests.support.postgres import SharedPostgres
from tests.support.query_port import ENDLESS, SMALL, QueryPort, open_query_port, open_steps, served, transfers
from tracelake.contracts.query_api import ARROW_STREAM, MAX_SQL_BYTES
from tracelake.query.app import open_surface
from tracelake.query.export import GROUP_ROWS

pytestmark = pytest.mark.asyncio(loop_scope="module")

DAG = dag(
    source(),
    source("clock"),
    reactive("work", "src", storage="parquet"),
    reactive("hidden", "src", storage="parquet"),
    reactive("reader", "clock", {"from": {"job": "work", "output": 0}, "trigger": False}),
    publish={"transfers": {"from": {"job": "work"}}, "secrets": {"from": {"job": "hidden"}}},
)


@pytest.fixture(scope="module")
def dsn(postgres_cluster: SharedPostgres) -> Iterator[str]:
    dsn = postgres_cluster.clone("state", build_state_template)
    yield dsn
    postgres_cluster.drop(dsn)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def port(dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[QueryPort]:
    folder = tmp_path_factory.mktemp("query")
    async with open_steps(dsn, folder) as ctx, open_query_port(ctx, dsn) as port:
        await port.talk.deploy(DAG)
        await port.talk.trigger(0, 9)
        for job, value in (("work", 10), ("hidden", 7)):
            await port.commit(await port.talk.lease(job), transfers(range(10), value), 0, 9)
        yield port


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tight(port: QueryPort) -> AsyncIterator[QueryPort]:
    """Another service on the same databases, which allows little."""
    limits = replace(SMALL, seconds=1.0, result_bytes=100_000, export_bytes=50_000)
    settings = replace(port.settings, limits=limits)
    async with (
        open_surface(settings) as (surface, runner),
        served(surface) as url,
        httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as http,
    ):
        yield replace(port, settings=settings, runner=runner, http=http)


async def last_audit(port: QueryPort) -> dict[str, Any]:
    return (await port.audit())[-1]


async def test_a_user_gets_rows_of_published_datasets_and_leaves_an_audit_row(port: QueryPort) -> None:
    sql = "SELECT block_number, hash, value FROM transfers WHERE block_number >= ? ORDER BY 1"
    answer = await port.ask(sql, params=[8])
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["columns"] == ["block_number", "hash", "value"]
    assert body["types"] == ["BIGINT", "BLOB", "BIGINT"]
    assert body["rows"] == [[8, "0x00000008", 80], [9, "0x00000009", 90]]
    assert (body["row_count"], body["truncated"]) == (2, False)
    [dataset] = body["datasets"]
    output = await port.talk.output("work")
    assert dataset == {
        "name": "transfers",
        "dataset_uuid": str(output["dataset_uuid"]),
        "dataset_version": str(output["dataset_version"]),
    }
    row = await last_audit(port)
    assert (row["caller"], row["outcome"], row["rows"]) == ("user", "completed", 2)
    assert row["sql_sha256"] == hashlib.sha256(sql.encode()).digest()
    assert (str(row["query_id"]), row["datasets"][0]["dataset_version"]) == (
        body["query_id"],
        dataset["dataset_version"],
    )
    assert row["bytes_scanned"] > 0


async def test_what_one_query_gave_can_be_asked_for_by_the_next(port: QueryPort) -> None:
    [[found]] = await port.rows("SELECT hash FROM transfers WHERE value = $value", params={"value": 30})
    assert await port.rows("SELECT value FROM transfers WHERE hash = ?", params=[{"blob": found}]) == [[30]]
    odd = await port.ask("SELECT ?", params=[{"blob": "0xz"}])
    assert (odd.status_code, odd.json()["reason"]) == (422, "InvalidParams")
    missing = await port.ask("SELECT ?, ?", params=[1])
    assert (missing.status_code, missing.json()["reason"]) == (422, "InvalidQuery")


async def test_rows_beyond_the_limit_are_left_out_and_that_is_said(port: QueryPort) -> None:
    for limit, rows, truncated in ((3, 3, True), (0, 0, True), (10, 10, False), (2_000_000_000, 10, False)):
        body = (await port.ask("SELECT value FROM transfers", limit=limit)).json()
        assert (len(body["rows"]), body["row_count"], body["truncated"]) == (rows, rows, truncated)
    body = (await port.ask("SELECT value FROM transfers WHERE block_number > 99")).json()
    assert (body["columns"], body["rows"], body["truncated"]) == (["value"], [], False)


async def test_an_arrow_stream_says_the_same_in_its_headers(port: QueryPort) -> None:
    answer = await port.ask("SELECT * FROM transfers ORDER BY 1", accept=ARROW_STREAM, limit=4)
    assert (answer.status_code, answer.headers["content-type"]) == (200, ARROW_STREAM)
    with pa.ipc.open_stream(answer.content) as reader:
        table = reader.read_all()
    assert table.column("value").to_pylist() == [0, 10, 20, 30]
    assert (answer.headers["x-trace-row-count"], answer.headers["x-trace-truncated"]) == ("4", "true")
    assert UUID(answer.headers["x-trace-query-id"]) == (await last_audit(port))["query_id"]
    empty = await port.ask(
        "SELECT * FROM transfers WHERE value < 0", accept=f"application/json;q=0.1,{ARROW_STREAM}"
    )
    with pa.ipc.open_stream(empty.content) as reader:
        assert reader.read_all().num_rows == 0
    preferred = await port.ask("SELECT 1", accept=f"application/json, {ARROW_STREAM};q=0.5")
    assert preferred.headers["content-type"] == "application/json"


async def test_a_task_sees_the_datasets_of_its_token_and_no_others(port: QueryPort) -> None:
    claim = await port.claim("reader", 100, by="clock")
    token = claim.capability_token
    assert token is not None
    for sql in (
        "SELECT sum(value) FROM transfers",
        "SELECT sum(value) FROM input_1",
        "SELECT sum(value) FROM TRANSFERS",
    ):
        answer = await port.ask_as(token, sql)
        assert (answer.status_code, answer.json()["rows"]) == (200, [[450]]), answer.text
    row = await last_audit(port)
    assert (row["caller"], row["task_id"], row["attempt"]) == ("task", claim.task_id, 1)
    there = await port.ask_as(token, "SELECT * FROM secrets")
    nowhere = await port.ask_as(token, "SELECT * FROM nothing")
    assert there.status_code == nowhere.status_code == 422
    assert there.json()["reason"] == nowhere.json()["reason"] == "InvalidQuery"
    assert there.json()["detail"].replace("secrets", "nothing") == nowhere.json()["detail"]


@pytest.mark.parametrize(
    ("sql", "status", "reason", "outcome"),
    [
        ("SELECT", 422, "InvalidQuery", "refused"),
        ("COPY transfers TO '/tmp/x'", 422, "QueryRefused", "refused"),
        ("SELECT * FROM read_parquet('/etc/passwd')", 422, "QueryRefused", "refused"),
        ("SELECT * FROM nothing", 422, "InvalidQuery", "refused"),
        ("SELECT nothing FROM transfers", 422, "InvalidQuery", "failed"),
        ("SELECT CAST(hash::varchar AS int) FROM transfers", 422, "InvalidQuery", "failed"),
        ("SELECT '" + "x" * MAX_SQL_BYTES + "'", 413, "QueryTooLarge", "refused"),
        ("SELECT '\ud800'", 400, None, None),
    ],
    ids=["syntax", "command", "table-function", "unknown", "no-column", "row", "long", "surrogate"],
)
async def test_what_ends_badly_is_explained_audited_and_quoted_nowhere(
    port: QueryPort, sql: str, status: int, reason: str | None, outcome: str | None
) -> None:
    body = b'{"sql": "SELECT \'\\ud800\'"}' if reason is None else None
    if body is not None:
        answer = await port.http.post("/v1/query", content=body, headers=port.person)
        assert 400 <= answer.status_code < 500
        return
    answer = await port.ask(sql)
    assert (answer.status_code, answer.json()["reason"]) == (status, reason), answer.text
    row = await last_audit(port)
    assert (row["outcome"], row["reason"], row["rows"]) == (outcome, reason, 0)
    assert row["sql_sha256"] == hashlib.sha256(sql.encode()).digest()
    assert sql not in str(row)
    assert (row["bytes_scanned"] > 0) == (outcome == "failed")
    assert (await port.rows("SELECT 1")) == [[1]]


async def test_malformed_requests_name_their_field_and_reach_no_slot(port: QueryPort) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sql": "SELECT 1", "limit": -1}, "limit"),
        ({"sql": "SELECT 1", "params": [0] * 1001}, "params"),
        ({"sql": ""}, "sql"),
        ({"sql": "SELECT 1", "nothing": 1}, "nothing"),
    ]
    before = await port.audit()
    for body, field in cases:
        answer = await port.http.post("/v1/query", json=body, headers=port.person)
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)
    assert await port.audit() == before


async def test_a_query_over_its_time_is_killed_and_the_next_one_answered(tight: QueryPort) -> None:
    answer = await tight.ask(ENDLESS)
    assert (answer.status_code, answer.json()["reason"]) == (422, "QueryTimedOut"), answer.text
    row = await last_audit(tight)
    assert (row["outcome"], row["reason"]) == ("timeout", "QueryTimedOut")
    assert await tight.rows("SELECT 1") == [[1]]


async def test_a_client_that_goes_away_takes_its_query_with_it(port: QueryPort) -> None:
    asking = asyncio.create_task(port.ask(ENDLESS))
    await eventually_metric(port, "tracelake_query_slots_busy 1.0")
    asking.cancel()
    await asyncio.wait({asking})
    assert await port.rows("SELECT 1") == [[1]]
    canceled = [row for row in await port.audit() if row["outcome"] == "canceled"]
    assert [row["reason"] for row in canceled] == ["Disconnected"]
    assert (
        'tracelake_queries_total{caller="user",outcome="canceled"} 1.0'
        in (await port.http.get("/metrics")).text
    )


BOMBS = {
    "nulls in a list": "SELECT list_resize([NULL], 20000000)",
    "a list that is allowed": "SELECT list_resize([NULL], 1000000)",
    "columns of nulls": " ".join(["SELECT", ",".join(["NULL"] * 5000), "FROM range(8192)"]),
    "rows of nulls": " ".join(["SELECT", ",".join(["NULL"] * 100), "FROM range(20000)"]),
    "long names": "".join(["SELECT list_transform(range(20000), lambda x: {'", "n" * 10_000, "': NULL})"]),
}


async def test_a_result_of_values_without_bytes_is_bounded_and_others_are_served_meanwhile(
    port: QueryPort,
) -> None:
    ends = {}
    for name, sql in BOMBS.items():
        for accept in ("application/json", ARROW_STREAM):
            asking = asyncio.create_task(port.ask(sql, accept=accept, limit=1_000_000))
            while not asking.done():
                assert (await port.http.get("/healthz")).status_code == 200
            answer = await asking
            ends[name] = "answered" if answer.status_code == 200 else answer.json()["reason"]
    assert ends == {
        "nulls in a list": "ResultTooLarge",
        "a list that is allowed": "answered",
        "columns of nulls": "ResultTooWide",
        "rows of nulls": "answered",
        "long names": "ResultTooLarge",
    }


async def eventually_metric(port: QueryPort, line: str) -> None:
    async with asyncio.timeout(20):
        while line not in (await port.http.get("/metrics")).text:
            await asyncio.sleep(0.02)


async def test_an_export_is_a_complete_file_in_the_callers_own_folder(port: QueryPort) -> None:
    many = GROUP_ROWS * 2 + 5
    sql = f"SELECT unnest(generate_series(1, {many})) AS n, 'x' AS s"
    body = (await port.ask(sql, export=True)).json()
    assert (body["row_count"], body["truncated"]) == (many, False), body
    row = await last_audit(port)
    assert body["location"].endswith(f"/exports/users/{row['user_id']}/{body['query_id']}.parquet")
    path = Path(urlsplit(body["location"]).path)
    file = pq.ParquetFile(path)
    assert (file.metadata.num_rows, path.stat().st_size) == (many, body["bytes"])
    assert file.metadata.num_row_groups >= 3
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert (row["exported_to"], row["rows"]) == (body["location"], many)
    claim = await port.claim("reader", 200, by="clock")
    assert claim.capability_token is not None
    answer = await port.ask_as(claim.capability_token, "SELECT * FROM input_1", export=True)
    assert f"/exports/tasks/{claim.task_id}/1/" in answer.json()["location"]
    assert not list(port.object_root.glob("exports*"))
    refused = await port.ask("SELECT INTERVAL 1 DAY AS d", export=True)
    assert (refused.status_code, refused.json()["reason"]) == (422, "ExportUnsupported")
    assert "'d' is INTERVAL" in refused.json()["detail"]
    failed = await port.ask("SELECT CAST(hash::varchar AS int) FROM transfers", export=True)
    assert failed.status_code == 422
    assert not list(port.settings.export_root.glob(".writing/*"))
    assert len(list(port.settings.export_root.glob("**/*.parquet"))) == 2


async def test_results_beyond_their_bytes_are_cut_and_exports_refused(tight: QueryPort) -> None:
    sql = "SELECT unnest(generate_series(1, 20000)) AS n, uuid()::varchar || uuid()::varchar AS s"
    answer = await tight.ask(sql, limit=100_000)
    body = answer.json()
    assert body["truncated"]
    assert 0 < body["row_count"] == len(body["rows"]) < 5000
    assert len(answer.content) < 150_000
    stream = await tight.ask(sql, limit=100_000, accept=ARROW_STREAM)
    assert stream.headers["x-trace-truncated"] == "true"
    before = set(tight.settings.export_root.rglob("*.parquet"))
    refused = await tight.ask(sql, export=True)
    assert (refused.status_code, refused.json()["reason"]) == (422, "ExportTooLarge")
    assert set(tight.settings.export_root.rglob("*.parquet")) == before
    assert not list(tight.settings.export_root.glob(".writing/*"))


async def test_a_query_that_cannot_be_audited_has_no_answer(port: QueryPort) -> None:
    before = set(port.settings.export_root.rglob("*.parquet"))
    await port.talk.query("REVOKE INSERT ON catalog.query_audit FROM tracelake_audit")
    try:
        answer = await port.ask("SELECT value FROM transfers")
        assert (answer.status_code, answer.json()["reason"]) == (503, "AuditUnavailable")
        exported = await port.ask("SELECT value FROM transfers", export=True)
        assert exported.status_code == 503
        assert set(port.settings.export_root.rglob("*.parquet")) == before
        assert not list(port.settings.export_root.glob(".writing/*"))
        ready = await port.http.get("/readyz")
        assert (ready.status_code, "audit" in ready.json()["detail"]) == (503, True)
    finally:
        await port.talk.query("GRANT INSERT ON catalog.query_audit TO tracelake_audit")
    assert (await port.ask("SELECT value FROM transfers")).status_code == 200


async def test_readiness_says_what_holds_the_slots(port: QueryPort) -> None:
    ready = await port.http.get("/readyz")
    assert ready.status_code == 200, ready.text
    checks = ready.json()["checks"]
    assert checks.keys() == {"catalog", "audit", "slots"}
    assert len(checks["slots"]) > 10
    document = (await port.http.get("/openapi.json")).json()
    assert {"/v1/query", "/v1/task/query"} <= document["paths"].keys()


async def test_each_surface_takes_its_own_credential(port: QueryPort) -> None:
    claim = await port.claim("reader", 300, by="clock")
    assert claim.capability_token is not None
    task = {"X-Trace-Task-Capability": claim.capability_token}
    for path, headers in (("/v1/query", task), ("/v1/task/query", port.person), ("/v1/query", {})):
        answer = await port.http.post(path, content=b"{not json", headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"]
    revoked = await port.http.post(
        "/v1/query", json={"sql": "SELECT 1"}, headers={"Authorization": "Bearer tlu_x"}
    )
    assert revoked.json()["reason"] == "UserTokenInvalid"
