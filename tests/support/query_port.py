"""``QueryPort``: a Query Service over a Dispatcher's steps, with real ports, slots and files, in the test's own
process.

    async with open_steps(state_dsn, folder) as ctx, open_query_port(ctx, state_dsn) as port:
        await port.talk.deploy(...)
        await port.commit(await port.talk.lease("work"), table, 0, 9)
        answer = await port.ask("SELECT count(*) FROM transfers")
"""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import httpx
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.support.conversation import Conversation, Lease
from tests.support.databases import ORG, PASSWORD, role_dsn
from tests.support.surfaces import Surfaces, open_surfaces
from tracelake import objects
from tracelake.contracts.dispatcher_api import ClaimResponse, OutputIn
from tracelake.contracts.manifest import Manifest, ManifestFile
from tracelake.contracts.query_api import TASK_QUERY_PATH, USER_QUERY_PATH
from tracelake.dispatcher.runtimes import RuntimeRegistry
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.entropy import Entropy
from tracelake.hot.install import READER_ROLE
from tracelake.objects.directory import DirectoryStore
from tracelake.query.app import open_surface
from tracelake.query.run_query import QueryRunner
from tracelake.query.settings import QueryLimits, QuerySettings
from tracelake.serving.listener import Listener
from tracelake.settings import Secret
from tracelake.store.db import Database, open_pool
from tracelake.store.jobs import JobDefinitions
from tracelake.store.query_roles import AUDIT_ROLE, CATALOG_ROLE, install_query_roles
from tracelake.tokens.signing import PemKeyring

JWKS = "/internal/jwks/task"
SMALL = QueryLimits(seconds=10.0, wait_seconds=10.0, threads=1, memory_bytes=256 * 1024 * 1024)

ENDLESS = """
    WITH numbers AS (SELECT unnest(generate_series(1, 1000000)) AS n)
    SELECT sum(a.n + b.n + c.n) FROM numbers a, numbers b, numbers c
"""
"""A query that no time limit is long enough for."""


@dataclass
class QueryPort:
    """``http`` speaks to the Query Service without a credential; ``key_fetches`` are its looks at the keys."""

    talk: Conversation
    surfaces: Surfaces
    settings: QuerySettings
    runner: QueryRunner
    http: httpx.AsyncClient
    key_fetches: list[float] = field(default_factory=list)

    @property
    def object_root(self) -> Path:
        return Path(self.settings.objects.removeprefix("file://"))

    @property
    def url(self) -> str:
        return str(self.http.base_url)

    @property
    def person(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.surfaces.user_token}"}

    async def ask(self, sql: str, *, accept: str | None = None, **more: Any) -> httpx.Response:
        headers = self.person | ({} if accept is None else {"Accept": accept})
        return await self.http.post(USER_QUERY_PATH, json={"sql": sql, **more}, headers=headers)

    async def ask_as(self, token: str, sql: str, **more: Any) -> httpx.Response:
        headers = {"X-Trace-Task-Capability": token}
        return await self.http.post(TASK_QUERY_PATH, json={"sql": sql, **more}, headers=headers)

    async def rows(self, sql: str, **more: Any) -> list[list[Any]]:
        answer = await self.ask(sql, **more)
        assert answer.status_code == 200, answer.text
        rows: list[list[Any]] = answer.json()["rows"]
        return rows

    async def claim(self, job: str, start: int, *, by: str = "src") -> ClaimResponse:
        """The task that a trigger of ``by`` makes for ten blocks, with the token that only its attempt is given."""
        before = set(await self.talk.tasks(job))
        await self.talk.trigger(start, start + 9, job=by)
        [task_id] = set(await self.talk.tasks(job)) - before
        return await self.talk.claim(task_id)

    async def commit(self, lease: Lease, table: pa.Table, start: int, end: int) -> None:
        await self.talk.complete(lease, parquet_output(lease, table, start, end))

    async def audit(self) -> list[dict[str, Any]]:
        rows = await self.talk.query("SELECT * FROM catalog.query_audit ORDER BY at, query_id")
        return [dict(row) for row in rows]


def transfers(blocks: Sequence[int], value: int = 1) -> pa.Table:
    """A small table with a block, a hash and an amount in every row."""
    return pa.table(
        {
            "block_number": pa.array(blocks, pa.int64()),
            "hash": pa.array([block.to_bytes(4, "big") for block in blocks], pa.binary()),
            "value": pa.array([block * value for block in blocks], pa.int64()),
        }
    )


def parquet_output(lease: Lease, table: pa.Table, start: int, end: int, index: int = 0) -> OutputIn:
    """One file in the attempt's staging place, as a worker would write and report it."""
    output = lease.payload.outputs[index]
    assert output.staging is not None
    location = f"{output.staging}{output.name}_{start}_{end}.parquet"
    into = io.BytesIO()
    pq.write_table(table, into, compression="zstd")
    content = into.getvalue()
    path = Path(urlsplit(location).path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    blocks = pc.min_max(table.column("block_number")).as_py() if table.num_rows else {}
    file = ManifestFile(
        location=location,
        rows=table.num_rows,
        bytes=len(content),
        content_hash=_sha256(content),
        min_block=blocks.get("min"),
        max_block=blocks.get("max"),
    )
    manifest = Manifest(files=(file,), schema_hash=_sha256(str(table.schema).encode()))
    return OutputIn(
        index, location=output.staging, start=start, end=end, row_count=table.num_rows, manifest=manifest
    )


def _sha256(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


async def grant_roles(state_dsn: str) -> None:
    connection = await asyncpg.connect(state_dsn)
    try:
        await install_query_roles(
            connection, dsn=Secret(state_dsn), catalog_password=PASSWORD, audit_password=PASSWORD
        )
    finally:
        await connection.close()


def query_settings(
    state_dsn: str, data_dsn: str | None, object_root: Path, internal_url: str, **more: Any
) -> QuerySettings:
    return QuerySettings(
        catalog_dsn=Secret(role_dsn(state_dsn, CATALOG_ROLE)),
        audit_dsn=Secret(role_dsn(state_dsn, AUDIT_ROLE)),
        data_read_dsn=None if data_dsn is None else Secret(role_dsn(data_dsn, READER_ROLE)),
        objects=objects.address(object_root),
        export_root=object_root.parent / "exports",
        internal_url=internal_url,
        **{"port": 0, "slots": 1, "limits": SMALL, **more},
    )


@asynccontextmanager
async def open_steps(state_dsn: str, folder: Path) -> AsyncIterator[StepContext]:
    """For a module's tests together: a service takes longer to start than most of them to run."""
    pool = await open_pool(state_dsn, min_size=1, max_size=8)
    try:
        yield StepContext(
            db=Database(pool),
            entropy=Entropy(),
            definitions=JobDefinitions(),
            objects=DirectoryStore(folder / "objects"),
            signer=PemKeyring(folder / "keys"),
            runtimes=RuntimeRegistry(),
            org_id=ORG,
        )
    finally:
        await pool.close()


@asynccontextmanager
async def open_query_port(
    ctx: StepContext, state_dsn: str, data_dsn: str | None = None, **settings: Any
) -> AsyncIterator[QueryPort]:
    await grant_roles(state_dsn)
    assert ctx.objects.local is not None
    root = ctx.objects.local.folder
    fetches: list[float] = []
    async with (
        open_surfaces(ctx) as surfaces,
        served(_counting(surfaces.internal_app, fetches)) as internal_url,
    ):
        chosen = query_settings(state_dsn, data_dsn, root, internal_url, **settings)
        async with (
            open_surface(chosen) as (surface, runner),
            served(surface) as url,
            httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as http,
        ):
            yield QueryPort(Conversation(ctx), surfaces, chosen, runner, http, fetches)


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """An application on a port of its own, until the end."""
    listener = Listener("test", "127.0.0.1", 0)
    serving = asyncio.create_task(listener.serve(app))
    try:
        await listener.started()
        yield listener.url
    finally:
        listener.stop()
        await serving
        listener.close()


def _counting(app: Any, fetches: list[float]) -> Any:
    async def counted(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == JWKS:
            fetches.append(asyncio.get_running_loop().time())
        await app(scope, receive, send)

    return counted
