"""No source of operators decides what runs for another source's operators, or for the built-in ones.

A hostile source has its first chance when it is loaded: it finds whatever the process that loads it has, and may
say, end and hang as it likes. ``test_operator_boundaries`` runs all of it again as a user without power.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.operator_scene import attempt, make_home, run_message, running_host
from tracelake.domain.backoff import Backoff
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.operators.registry import Registry
from tracelake.worker.host import host_check, operator_pool
from tracelake.worker.host.client import HostSpec, OperatorHost
from tracelake.worker.host.host_check import CheckProcess, operators_of, read_all
from tracelake.worker.host.operator_pool import OperatorPool, process_key

HOSTILE = """
import json, os, sys
from tracelake.operators.registry import operator

def frames():
    frame = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back

# Whatever descriptor the process has may be the one by which it says what it has found.
for descriptor in range(3, 64):
    try:
        os.write(descriptor, json.dumps({said!r}).encode())
        os.close(descriptor)
    except OSError:
        pass
for frame in frames():
    for name in ("registry", "self"):
        found = frame.f_locals.get(name)
        if "noop" in getattr(found, "_loaded", ()):
            found._loaded["noop"] = lambda ctx: print("not the built-in one")

@operator("hostile")
def hostile(ctx):
    pass

@operator("{claimed}")
def claimed(ctx):
    print("not the true one")
"""


@pytest.fixture
def spec(tmp_path: Path) -> HostSpec:
    return make_home(tmp_path)


def with_hostile(spec: HostSpec, tmp_path: Path, said: object, claimed: str) -> HostSpec:
    hostile = tmp_path / "hostile_operators.py"
    hostile.write_text(HOSTILE.format(said=said, claimed=claimed))
    # Before the others: who comes first must not have a say either.
    return replace(spec, operators=(str(hostile), *spec.operators))


async def ran(host: OperatorHost, operator: str) -> str:
    """What comes of an attempt as the wrapper runs it, by the process that it takes for that operator."""
    pool = OperatorPool(host, 1)
    process = await pool.take(process_key(run_message(operator).task))
    told = await attempt(process, "print('the true one')")
    await pool.close()
    return told.output


async def test_what_a_source_says_of_others_is_not_believed(spec: HostSpec, tmp_path: Path) -> None:
    hostile = str(tmp_path / "hostile_operators.py")
    claims = {"try_code": hostile, "noop": hostile, "hostile": hostile}
    said = {"operators": claims, "names": ["hostile"], "warnings": [], "sources": claims}
    async with running_host(with_hostile(spec, tmp_path, said, "try_code")) as host:
        assert host.operators["try_code"] == spec.operators[0]
        assert host.operators["hostile"] == hostile
        assert host.operators["noop"] is None
        assert await ran(host, "try_code") == "the true one\n"


@pytest.mark.parametrize("claimed", ["try_code", "noop"])
async def test_a_name_that_somebody_has_is_refused(spec: HostSpec, tmp_path: Path, claimed: str) -> None:
    said = {"names": ["hostile", claimed]}
    with pytest.raises(Invalid, match=f"two operators are called '{claimed}'"):
        await OperatorHost.start(with_hostile(spec, tmp_path, said, claimed))


async def test_a_process_with_a_source_runs_no_other_operators(spec: HostSpec, tmp_path: Path) -> None:
    changed = with_hostile(spec, tmp_path, {"names": ["hostile"]}, "try_code")
    # Here it leaves the channel alone, and is loaded as it would be for its own tasks.
    source = Path(changed.operators[0])
    source.write_text(source.read_text().replace("range(3, 64)", "()"))
    changed = replace(changed, operators=(changed.operators[0],))
    async with running_host(changed) as host:
        process = await host.spawn(changed.operators[0])
        read, write = os.pipe()
        await process.run(run_message("noop"), write)
        finished: Any = await process.receive()
        os.close(read)
        os.close(write)
        assert (finished.status, finished.retryable) == ("Failed", False)
        assert "UnknownOperator" in finished.error_message


def test_a_process_with_a_source_has_none_but_its_own_operators(tmp_path: Path) -> None:
    source = tmp_path / "own_operators.py"
    source.write_text(
        "from tracelake.operators.registry import operator\n@operator('own')\ndef own(ctx):\n    pass\n"
    )
    assert Registry.of(str(source)).names == ["own"]


@pytest.fixture
def pipes() -> Iterator[list[tuple[CheckProcess, int]]]:
    made = []
    for number in range(5):
        read, write = os.pipe()
        made.append((CheckProcess(f"source-{number}", 0, read, socket.socket()), write))
    yield made
    for prover, write in made:
        prover.close()
        os.close(write)


def test_a_source_that_hangs_crashes_or_talks_nonsense_is_left_out(
    pipes: list[tuple[CheckProcess, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_check, "_SECONDS", 0.5)
    said = (
        json.dumps({"names": ["good"]}).encode(),
        b"",
        b"\xff{",
        json.dumps({"names": ["../../etc"]}).encode(),
        json.dumps({"names": [f"n{number}" for number in range(300)]}).encode(),
    )
    for (_, write), text in zip(pipes, said, strict=True):
        os.write(write, text)
    hanging, _ = pipes[1]
    for prover, write in pipes:
        if prover is not hanging:
            os.dup2(os.open(os.devnull, os.O_WRONLY), write)
    read_all([prover for prover, _ in pipes])
    operators, failed = operators_of({"noop": "tracelake"}, [prover for prover, _ in pipes])
    assert operators == {"noop": None, "good": "source-0"}
    assert list(failed) == [f"source-{number}" for number in (1, 2, 3, 4)]
    assert "took more than" in failed["source-1"]


def test_a_source_that_talks_without_end_is_not_listened_to(pipes: list[tuple[CheckProcess, int]]) -> None:
    prover, write = pipes[0]
    os.set_blocking(write, False)
    while not prover.ended:
        os.write(write, b"x" * 4096)
        prover.read()
    assert len(prover.output) < 200_000


async def test_a_source_whose_processes_do_not_start_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operator_pool, "_PROCESS_BACKOFF", Backoff(0.1, 0.1))

    class Process:
        alive, use, runs, pid = True, None, 0, 1

        def __init__(self, source: str | None) -> None:
            self.source = source
            self.hosted: Any = type("Hosted", (), {"gone": asyncio.Future()})

        async def kill(self) -> None: ...

    class Host:
        sealed = True

        def __init__(self) -> None:
            self.operators = {"slow": "hangs", "broken": "fails", "noop": None}
            self.failed: dict[str, str] = {}

        async def died(self) -> None:
            await asyncio.Event().wait()

        def has_ended(self) -> bool:
            return False

        async def spawn(self, source: str | None) -> Process:
            if source == "hangs":
                await asyncio.Event().wait()
            if source == "fails":
                raise Unavailable("OperatorGone", "it ended while it was loaded")
            # Not at once, so that the others have every chance to be in the way.
            await asyncio.sleep(0.3)
            return Process(source)

    host: Any = Host()
    pool = OperatorPool(host, 1)
    async with asyncio.timeout(20):
        slow = asyncio.create_task(pool.take(process_key(run_message("slow").task)))
        broken = asyncio.create_task(pool.take(process_key(run_message("broken").task)))
        taken = [await pool.take(process_key(run_message("noop", number=number).task)) for number in range(3)]
        assert [process.source for process in taken] == [None, None, None]
        with pytest.raises(Unavailable, match="ended while it was loaded"):
            await broken
        assert not slow.done()
        await pool.close()
        with pytest.raises(Unavailable):
            await slow
