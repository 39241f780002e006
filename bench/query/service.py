"""A Query Service as people run it, over files that were committed as outputs of a task."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil

from tests.support.conversation import Conversation, Lease, dag, reactive, source
from tests.support.databases import build_state_template, role_dsn
from tests.support.query_port import grant_roles, open_steps
from tests.support.surfaces import create_token
from tracelake.contracts.dispatcher_api import OutputIn
from tracelake.contracts.manifest import Manifest, ManifestFile
from tracelake.embedded.postgres import Cluster
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.schemas import TABLES
from tracelake.kernel import parent_death_hook
from tracelake.store import users
from tracelake.store.db import Transaction
from tracelake.store.query_roles import AUDIT_ROLE, CATALOG_ROLE
from tracelake.tables.stored_types import schema_hash

TABLES_HERE = (ChainTable.LOGS, ChainTable.BLOCKS)
DAG = dag(
    source(),
    reactive("work", "src", outputs=[{"name": str(table), "storage": "parquet"} for table in TABLES_HERE]),
    publish={str(table): {"from": {"job": "work", "output": at}} for at, table in enumerate(TABLES_HERE)},
)


@dataclass(frozen=True, slots=True)
class Running:
    """``files`` are where the committed ones lie, for those who read them without the service."""

    url: str
    pid: int
    token: str
    files: Mapping[ChainTable, Sequence[str]]

    def cpu_seconds(self) -> float:
        """Of the service and everything below it, forks that have ended included."""
        family = psutil.Process(self.pid)
        return sum(sum(each.cpu_times()[:4]) for each in (family, *family.children(recursive=True)))


@contextmanager
def running(
    folder: Path, made: Mapping[ChainTable, list[ManifestFile]], *, slots: int, threads: int
) -> Iterator[Running]:
    with Cluster(folder / "postgres", name="state") as cluster:
        cluster.ensure_database("state")
        dsn = cluster.dsn("state")
        build_state_template(dsn)
        token, files = asyncio.run(_committed(dsn, folder, made))
        given = {
            "TRACELAKE_CATALOG_DSN": role_dsn(dsn, CATALOG_ROLE),
            "TRACELAKE_AUDIT_DSN": role_dsn(dsn, AUDIT_ROLE),
            "TRACELAKE_OBJECTS": str(folder / "objects"),
            "TRACELAKE_QUERY_THREADS": str(threads),
            "TRACELAKE_QUERY_WAIT_SECONDS": "60",
        }
        with _process(folder, given, slots) as (url, pid):
            yield Running(url, pid, token, files)


async def _committed(
    dsn: str, folder: Path, made: Mapping[ChainTable, list[ManifestFile]]
) -> tuple[str, Mapping[ChainTable, Sequence[str]]]:
    async def make_user(tx: Transaction) -> str:
        user_id = await users.ensure_user(tx, await users.ensure_org(tx), "bench")
        return await create_token(tx, user_id, "bench")

    await grant_roles(dsn)
    async with open_steps(dsn, folder) as ctx:
        talk = Conversation(ctx)
        await talk.deploy(DAG)
        last = max(file.max_block or 0 for file in made[ChainTable.LOGS])
        await talk.trigger(0, last)
        lease = await talk.lease("work")
        outputs = [_output(lease, at, made[table], last) for at, table in enumerate(TABLES_HERE)]
        await talk.complete(lease, *outputs)
        token = await ctx.db.run(make_user)
    found = {
        table: [urlsplit(file.location).path for file in output.manifest.files]
        for table, output in zip(TABLES_HERE, outputs, strict=True)
        if output.manifest is not None
    }
    return token, found


def _output(lease: Lease, at: int, made: list[ManifestFile], last: int) -> OutputIn:
    """The files in the attempt's staging place, where they stay; linked, since nobody changes them."""
    staging = lease.payload.outputs[at].staging
    assert staging is not None
    files = []
    for file in made:
        there = Path(urlsplit(file.location).path)
        here = Path(urlsplit(staging).path) / there.name
        here.parent.mkdir(parents=True, exist_ok=True)
        _link(there, here)
        files.append(msgspec.structs.replace(file, location=staging + there.name))
    manifest = Manifest(files=tuple(files), schema_hash=schema_hash(TABLES[TABLES_HERE[at]].arrow))
    return OutputIn(at, location=staging, start=0, end=last, row_count=manifest.row_count, manifest=manifest)


def _link(there: Path, here: Path) -> None:
    try:
        os.link(there, here)
    except OSError:
        here.write_bytes(there.read_bytes())


@contextmanager
def _process(folder: Path, given: Mapping[str, str], slots: int) -> Iterator[tuple[str, int]]:
    ready, log = folder / "query.json", folder / "query.log"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRACELAKE_")}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tracelake", "query-service", "--home", str(folder)),
                *("--port", "0", "--slots", str(slots), "--ready-file", str(ready)),
            ],
            env={**inherited, **given},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=parent_death_hook(signal.SIGINT),
        )
    try:
        while not ready.exists():
            if process.poll() is not None:
                raise RuntimeError(f"the Query Service ended: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield str(json.loads(ready.read_bytes())["url"]), process.pid
    finally:
        process.terminate()
        process.wait(10)
