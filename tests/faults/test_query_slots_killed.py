"""A query that goes wrong ends alone: its process is killed and replaced, and the next query is answered."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import pytest_asyncio

from tracelake.domain.errors import Invalid
from tracelake.query.engine.confinement import PlainSlots
from tracelake.query.engine.restrict import MIB, SlotLimits
from tracelake.query.engine.slots import Slots

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("sandbox")]

LIMITS = SlotLimits(seconds=60.0, memory_bytes=128 * MIB, spill_bytes=16 * MIB)
RUNAWAYS = {
    "cross join": "SELECT count(*) FROM (SELECT unnest(generate_series(1, 1000000)) AS a) x, "
    "(SELECT unnest(generate_series(1, 1000000)) AS b) y WHERE hash(a, b) = 1",
    "one long function": "SELECT sum(levenshtein(repeat('ab', 20000 + i::INTEGER), repeat('ba', 20000))) "
    "FROM (SELECT unnest(generate_series(1, 100)) AS i)",
    "recursion": "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT max(n) FROM r",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["sandbox", "plain process"])
async def slots(request: pytest.FixtureRequest) -> AsyncIterator[Slots]:
    plain = PlainSlots(LIMITS, "asked for") if request.param == "plain process" else None
    opened = await Slots.open(1, LIMITS, confinement=plain)
    yield opened
    await opened.close()


async def ask(slots: Slots, sql: str) -> pa.Table:
    async with slots.take(30) as slot:
        await slot.parse(sql)
        return await (await slot.run([])).table()


def descendants(of: int) -> set[int]:
    """Every process that has this one above it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {of}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {of}


def ticks_of_engines() -> dict[int, int]:
    """The processor time of each process that has got an engine's threads."""
    found = {}
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if len(os.listdir(f"/proc/{pid}/task")) > LIMITS.threads:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found[pid] = int(fields[11]) + int(fields[12])
    return found


async def running_query() -> int:
    """Of the engines, the one that is at work. Making itself ready takes two or three ticks."""
    first: dict[int, int] = {}
    async with asyncio.timeout(30):
        while True:
            for pid, ticks in ticks_of_engines().items():
                if ticks - first.setdefault(pid, ticks) > 15:
                    return pid
            await asyncio.sleep(0.02)


async def until_gone(pids: set[int]) -> None:
    async with asyncio.timeout(30):
        while any(Path("/proc", str(pid)).exists() for pid in pids):
            await asyncio.sleep(0.01)


async def test_closing_leaves_no_process_and_no_descriptor() -> None:
    before = descendants(os.getpid())
    descriptors = len(os.listdir("/proc/self/fd"))
    for plain in (None, PlainSlots(LIMITS, "asked for")):
        opened = await Slots.open(2, LIMITS, confinement=plain)
        running = asyncio.ensure_future(ask(opened, RUNAWAYS["cross join"]))
        await running_query()
        await opened.close()
        with pytest.raises(Invalid):
            await running

    assert descendants(os.getpid()) <= before
    assert len(os.listdir("/proc/self/fd")) <= descriptors


async def test_a_query_over_its_time_is_killed_and_the_next_is_answered(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "limits", replace(LIMITS, seconds=0.5))
    for name, sql in RUNAWAYS.items():
        with pytest.raises(Invalid) as stopped:
            await ask(slots, sql)
        assert stopped.value.reason == "QueryTimeout", name
    monkeypatch.undo()
    assert (await ask(slots, "SELECT 1 AS a")).to_pylist() == [{"a": 1}]


async def test_a_query_that_needs_too_much_memory_ends_alone(slots: Slots) -> None:
    for sql in (
        "SELECT list(i || repeat('x', 1000)) FROM (SELECT unnest(generate_series(1, 10000000)) AS i)",
        "SELECT length(string_agg(repeat('x', 1000000), '')) FROM (SELECT unnest(generate_series(1, 3000)) AS i)",
    ):
        with pytest.raises(Invalid) as stopped:
            await ask(slots, sql)
        assert stopped.value.reason == "QueryOutOfMemory"
        assert (await ask(slots, "SELECT 1 AS a")).to_pylist() == [{"a": 1}]


async def test_a_crash_is_told_and_the_next_query_is_answered(slots: Slots) -> None:
    running = asyncio.ensure_future(ask(slots, RUNAWAYS["cross join"]))
    os.kill(await running_query(), signal.SIGKILL)

    with pytest.raises(Invalid) as stopped:
        await running

    assert stopped.value.reason == "QueryCrashed"
    assert (await ask(slots, "SELECT 1 AS a")).to_pylist() == [{"a": 1}]


async def test_a_query_whose_caller_goes_away_is_killed(slots: Slots) -> None:
    running = asyncio.ensure_future(ask(slots, RUNAWAYS["cross join"]))
    pid = await running_query()

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    await until_gone({pid})
    assert (await ask(slots, "SELECT 1 AS a")).to_pylist() == [{"a": 1}]


async def test_a_process_that_ends_while_idle_is_replaced(slots: Slots) -> None:
    await ask(slots, "SELECT 1 AS a")
    lost = set(slots._alive)
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    async with asyncio.timeout(30):
        while slots.free == 0 or lost & slots._alive:
            await asyncio.sleep(0.01)
    assert (await ask(slots, "SELECT 1 AS a")).to_pylist() == [{"a": 1}]


SERVICE = """
import asyncio
from tracelake.query.engine.restrict import SlotLimits
from tracelake.query.engine.confinement import PlainSlots
from tracelake.query.engine.slots import Slots

async def main():
    limits = SlotLimits()
    slots = await Slots.open(1, limits, confinement={confinement})
    async with slots.take(30) as slot:
        await slot.parse({sql!r})
        print("running", flush=True)
        await slot.run([])

asyncio.run(main())
"""


@pytest.mark.parametrize("confinement", ["None", "PlainSlots(limits, 'asked for')"])
async def test_a_killed_service_leaves_no_process(confinement: str) -> None:
    program = SERVICE.format(confinement=confinement, sql=RUNAWAYS["cross join"])
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        assert await asyncio.to_thread(service.stdout.readline) == b"running\n"
        left = descendants(service.pid)
        assert len(left) >= 2

        service.kill()

    await until_gone(left)
    PlainSlots(LIMITS, "asked for")
    assert not list(Path(tempfile.gettempdir()).glob(f"tracelake-query-{service.pid}-*"))
