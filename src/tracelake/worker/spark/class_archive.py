"""An archive of Spark's classes, which a server maps into memory instead of loading them from some hundred jars.

A cold server spends most of its first seconds on finding and checking classes; with the archive its start and its
first queries take about half of the CPU. Java checks that archive and jars belong together, and goes on without an
archive that doesn't fit.

    python -m tracelake.worker.spark.class_archive       makes it, once per installation of Python, Java and Spark

It belongs to the installation like the packages themselves: a user who may write there decides what runs anyway. A
server only reads it, since code of tasks runs in that process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.kernel import parent_death_hook
from tracelake.worker.spark.launch import archive_path, find_java, find_spark_home
from tracelake.worker.spark.server import SparkServer
from tracelake.worker.spark.settings import SparkSettings

if TYPE_CHECKING:
    import pyarrow as pa

    from tracelake.contracts.operator_protocol import SparkTarget

_SHORT_LIVED: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""For a JVM that ends soon; a server with other options uses the archive as well."""
_WRITTEN_WITHIN: Final = 120.0


async def make_archive(folder: Path) -> Path:
    """Run what every server runs, and have Java keep the classes that it took. ``folder`` is for the server."""
    java = find_java(os.environ, folder)
    if not any(java.home.glob("lib/server/classes*.jsa")):
        raise Unavailable(
            "NoClassArchive", f"{java.where} has a Java without an archive of its own to build on"
        )
    archive = archive_path(java, find_spark_home())
    archive.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    # Written beside and moved into place: a server that starts meanwhile must not find half of it.
    fresh = archive.with_name(f"{archive.name}.{os.getpid()}")
    settings = SparkSettings(
        master="local[2]", java_options=(f"-XX:ArchiveClassesAtExit={fresh}", *_SHORT_LIVED)
    )
    server = SparkServer(settings, _Programs(), folder / "spark")
    try:
        await server.start()
        try:
            await asyncio.to_thread(_use_what_operators_use, server.target, folder)
        finally:
            await server.stop()
        if not fresh.exists():
            raise Unavailable("NoClassArchive", "this Java wrote none")
        fresh.chmod(0o644)
        fresh.replace(archive)
    finally:
        fresh.unlink(missing_ok=True)
    return archive


def _use_what_operators_use(target: SparkTarget, folder: Path) -> None:
    """Queries with a shuffle, Python workers, Parquet both ways and SQL over a view: what is loaded is archived."""
    from tracelake.worker.spark.session import begin, open_session

    attempt = begin(open_session(target), str(uuid4()), 1, 1)
    spark, files = attempt.session, str(folder / "files")
    numbers = spark.range(1000).selectExpr("id", "id % 7 AS remainder", "cast(id AS string) AS text")
    numbers.groupBy("remainder").count().orderBy("remainder").toArrow()
    numbers.mapInArrow(_unchanged, numbers.schema).write.parquet(files)
    spark.read.parquet(files).createOrReplaceTempView("numbers")
    spark.sql(
        "SELECT a.remainder, count(*), max(b.text) FROM numbers a JOIN numbers b USING (id) GROUP BY a.remainder"
    ).toArrow()
    attempt.end()


def _unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


class _Programs:
    """Starts the server as our own user: no task's code will run in it."""

    async def start_program(
        self, argv: Sequence[str], env: Mapping[str, str], *, log: int, folder: Path
    ) -> _Program:
        os.mkdir(folder)
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=dict(env),
            cwd=folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=parent_death_hook(signal.SIGKILL),
        )
        return _Program(process)


class _Program:
    account = None

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def grant(self, writes: Sequence[str]) -> None:
        """It sees everything."""

    async def withdraw(self, writes: Sequence[str], *, force: bool = False) -> list[str]:
        return []

    async def kill(self) -> None:
        """In peace first: Java writes the archive at its own exit."""
        with suppress(ProcessLookupError):
            self._process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _WRITTEN_WITHIN)
            os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> int:
        return await self._process.wait()


def main() -> None:
    try:
        with tempfile.TemporaryDirectory(prefix="tracelake-spark-classes-") as folder:
            known = archive_path(find_java(os.environ, Path(folder)), find_spark_home())
            if known.exists():
                sys.stdout.write(f"The archive of Spark's classes is there: {known.name}\n")
                return
            archive = asyncio.run(make_archive(Path(folder)))
    except (TracelakeError, OSError) as error:
        sys.stderr.write(
            f"No archive of Spark's classes was made, so Spark will start more slowly: {error}\n"
        )
        sys.exit(1)
    sys.stdout.write(f"The archive of Spark's classes was made: {archive.name}\n")


if __name__ == "__main__":
    main()
