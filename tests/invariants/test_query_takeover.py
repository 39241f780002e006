"""A query's process that was taken over sees no other caller's query, and answers none."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from tests.support import slot_programs
from tracelake.query.engine.attach import AttachedRelation
from tracelake.query.engine.confinement import PlainSlots, SandboxedSlots
from tracelake.query.engine.restrict import MIB, SlotLimits
from tracelake.query.engine.slots import Slots
from tracelake.query.engine.template import Channel
from tracelake.sandbox.sandbox import Sandbox

pytestmark = pytest.mark.xdist_group("sandbox")

LIMITS = SlotLimits(seconds=10, memory_bytes=128 * MIB, spill_bytes=16 * MIB, threads=1)
SQUATTER = "query_squatter"
EVENTS = pa.table({"id": [1]})


@pytest.fixture(params=["sandbox", "plain process"])
async def slots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Slots]:
    slot_programs.bring_along(monkeypatch)
    held = (
        SandboxedSlots(await Sandbox.open(), LIMITS, SQUATTER)
        if request.param == "sandbox"
        else PlainSlots(LIMITS, "asked for", SQUATTER)
    )
    opened = await Slots.open(1, LIMITS, confinement=held)
    yield opened
    await opened.close()


async def ask(slots: Slots, sql: str, relations: Sequence[AttachedRelation] = ()) -> list[dict[str, Any]]:
    async with slots.take(30) as slot:
        await slot.parse(sql)
        rows: list[dict[str, Any]] = (await (await slot.run(relations)).table()).to_pylist()
        return rows


async def test_a_process_that_was_taken_over_gets_no_other_callers_query(slots: Slots) -> None:
    for how in ("stay", "forge", "unread"):
        memory = os.memfd_create("events")
        with open(memory, "wb", closefd=False) as file, pa.ipc.new_stream(file, EVENTS.schema) as writer:
            writer.write_table(EVENTS)
        with AttachedRelation("events", EVENTS.schema, tables=[memory]) as events:
            assert await ask(slots, f"SELECT '{how}'", [events]) == []
        for number in range(4):
            assert await ask(slots, f"SELECT {number} AS a") == [{"a": number}], how


async def test_input_that_comes_after_a_process_pretended_to_be_done_reaches_no_other_caller(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Channel.send_descriptors

    async def send_late(channel: Channel, descriptors: Sequence[int]) -> None:
        # Until the process has ended, and the next one would have been started.
        await asyncio.sleep(0.5)
        await send(channel, descriptors)

    monkeypatch.setattr(Channel, "send_descriptors", send_late)
    memory = os.memfd_create("events")
    with open(memory, "wb", closefd=False) as file, pa.ipc.new_stream(file, EVENTS.schema) as writer:
        writer.write_table(EVENTS)
    with AttachedRelation("events", EVENTS.schema, tables=[memory]) as events:
        assert await ask(slots, "SELECT 'unread'", [events]) == []
    for number in range(4):
        assert await ask(slots, f"SELECT {number} AS a") == [{"a": number}]


async def test_an_honest_process_is_followed_by_another_of_the_same_template(slots: Slots) -> None:
    await ask(slots, "SELECT 1 AS a")
    templates = set()
    for _ in range(6):
        async with slots.take(30) as slot:
            templates.add(slot._template)
    assert len(templates) <= slots.count + 1
