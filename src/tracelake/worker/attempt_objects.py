"""What one attempt sees of the objects, and what becomes of what it wrote.

Before it runs, its staging folders are made and shown to its process and to the Spark that it runs on. What it
reads is shown when it asks for the files of an input. When it has finished, its folders are taken from both again,
and what is in them becomes the platform's (``staging``): only then may it be reported. As root the files' owner is
what keeps operators from them; otherwise it is the mounts, and an attempt that still has something open for writing
in a folder that it should have left has failed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from tracelake.contracts.dispatcher_api import InputFile, OutputIn, TaskPayload
from tracelake.domain.errors import Conflict, Unavailable
from tracelake.worker.conversation import Process
from tracelake.worker.spark.engine import SparkEngine
from tracelake.worker.staging import close_staging, prepare_staging, take_over, version_folders

_BUSY_SECONDS = 3.0
_LOOK_SECONDS = 0.05


class AttemptObjects:
    def __init__(self, root: Path, task: TaskPayload, process: Process, engine: SparkEngine | None) -> None:
        self._root = root
        self._task = task
        self._process = process
        self._engine = engine
        self._places: list[str] = []
        self._seen: set[str] = set()

    async def prepare(self) -> None:
        """Its staging folders, where it may write from now on."""
        if all(output.staging is None for output in self._task.outputs):
            return
        owner = self._process.owner
        group = None if self._engine is None or owner is None else self._engine.group
        self._places = await asyncio.to_thread(prepare_staging, self._root, self._task.outputs, owner, group)
        if self._places:
            await self._process.grant([], self._places)
            if self._engine is not None:
                await self._engine.grant(self._places)

    async def reveal(self, files: Sequence[InputFile]) -> None:
        """The folders of files that it was told of, to be read."""
        folders = version_folders(self._root, (file.location for file in files))
        new = [folder for folder in folders if folder not in self._seen]
        if new:
            await self._process.grant(new, [])
            self._seen.update(new)

    async def take_over(self, outputs: Sequence[OutputIn]) -> None:
        """What it reports becomes the platform's, which it can't change any more; raises when it could."""
        if not self._places:
            return
        await self._withdraw()
        owners = {
            each
            for each in (self._process.owner, None if self._engine is None else self._engine.group)
            if each is not None
        }
        places, self._places = self._places, []
        try:
            await asyncio.to_thread(take_over, self._root, places, outputs, owners)
        except BaseException:
            self._places = places
            raise

    async def close(self) -> None:
        """Whatever it hasn't reported is nobody's, and stays out of everybody's sight. By now its process is gone,
        or has nothing of it to see."""
        if not self._places:
            return
        if self._engine is not None:
            await _from(self._engine, self._places, force=True)
        await _from(self._process, self._places, force=True)
        await asyncio.to_thread(close_staging, self._root, self._places)

    async def _withdraw(self) -> None:
        """As a user: until nothing is open there for writing. Tasks of Spark whose results nobody wants any more
        may take a moment to notice."""
        viewers: list[Process | SparkEngine] = [self._process]
        if self._engine is not None:
            viewers.append(self._engine)
        alike = os.geteuid() != 0
        loop = asyncio.get_running_loop()
        until = loop.time() + _BUSY_SECONDS
        for viewer in viewers:
            while busy := await _from(viewer, self._places, force=not alike):
                if loop.time() > until:
                    raise Conflict("OutputUnsafe", f"something is still open for writing in {busy[0]}")
                await asyncio.sleep(_LOOK_SECONDS)


async def _from(viewer: Process | SparkEngine, places: Sequence[str], *, force: bool) -> list[str]:
    """What is gone by now sees nothing."""
    try:
        return await viewer.withdraw(places, force=force)
    except Unavailable:
        return []
