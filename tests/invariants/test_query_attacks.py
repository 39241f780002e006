"""The attack corpus against real slots: refused or ended by its limits, nothing leaked, the next query answered.

The gate alone meets all of it in ``tests/unit/query/test_query_gate.py``; here are a few of each kind, and all
bombs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
import pytest_asyncio

from tests.support.query_attacks import Attack, others, refused_at_the_root, refused_in_disguise
from tracelake.domain.errors import TracelakeError
from tracelake.query.engine.attach import AttachedRelation
from tracelake.query.engine.restrict import MIB, SlotLimits
from tracelake.query.engine.slots import Slots

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("sandbox")]

SECONDS = 1.0
LIMITS = SlotLimits(seconds=SECONDS, memory_bytes=128 * MIB, spill_bytes=16 * MIB, threads=1)
IN_FILE, IN_ENVIRONMENT, IN_MEMORY = "canary-of-a-file", "canary-of-the-environment", "canary-of-the-service"
VARIABLE = "TRACELAKE_CANARY"
EVENTS = pa.table({"id": [1, 2, 3], "kind": ["a", "b", None]})
BUSY = 30.0
"""For a machine that is busy with something else; what an attack may take is counted by the slots."""


@dataclass
class Site:
    slots: Slots
    file: Path

    async def ends(self, attack: Attack) -> str:
        """How it ended, with everything that was said about it."""
        sql = attack.rendered(file=str(self.file), env=VARIABLE)
        params = [param.replace("@FILE@", str(self.file)) for param in attack.params]
        try:
            async with asyncio.timeout(BUSY):
                return f"answered {await self.answer(sql, params)}"
        except TracelakeError as error:
            return f"{error.reason} {error.message}"

    async def answer(self, sql: str, params: Sequence[str] = ()) -> list[tuple[str, list[object]]]:
        """The columns: two of them may have one name."""
        async with self.slots.take(BUSY) as slot:
            await slot.parse(sql, params)
            with _events() as events:
                result = await slot.run([events], max_rows=100, max_bytes=MIB)
            table = await result.table()
            return [(name, table.column(at).to_pylist()) for at, name in enumerate(table.column_names)]


def _events() -> AttachedRelation:
    descriptor = os.memfd_create("events")
    with open(descriptor, "wb", closefd=False) as file, pa.ipc.new_stream(file, EVENTS.schema) as writer:
        writer.write_table(EVENTS)
    return AttachedRelation("events", EVENTS.schema, tables=[descriptor])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    file = tmp_path_factory.mktemp("canary") / "secret.csv"
    file.write_text(f"id,kind\n1,{IN_FILE}\n")
    file.chmod(0o644)
    os.environ[VARIABLE] = IN_ENVIRONMENT
    kept = [IN_MEMORY]
    slots = await Slots.open(2, LIMITS)
    try:
        yield Site(slots, file)
    finally:
        await slots.close()
        del os.environ[VARIABLE], kept


async def _all_end(site: Site, attacks: list[Attack]) -> dict[Attack, str]:
    """Two at a time, as there are slots; the plain query after them is answered."""
    ends: dict[Attack, str] = {}
    waiting = iter(attacks)

    async def attacker() -> None:
        for attack in waiting:
            ends[attack] = await site.ends(attack)

    await asyncio.gather(attacker(), attacker())
    assert await site.answer("SELECT count(*) AS n, max(kind) AS k FROM events") == [("n", [3]), ("k", ["b"])]
    said = "\n".join(ends.values())
    for canary in (IN_FILE, IN_ENVIRONMENT, IN_MEMORY):
        assert canary not in said
    return ends


async def test_each_hostile_piece_is_refused_and_tells_nothing(site: Site) -> None:
    ends = await _all_end(site, [*refused_at_the_root(of_each_kind=2), *refused_in_disguise(every=150)])
    assert [
        (attack, end) for attack, end in ends.items() if end.split()[0] not in ("QueryRefused", "SqlSyntax")
    ] == []


async def test_no_relation_is_found_that_was_not_attached(site: Site) -> None:
    ends = await _all_end(site, [attack for attack in others() if attack.end == "unresolved"])
    assert {end.split()[0] for end in ends.values()} == {"QueryFailed"}


async def test_whoever_asks_for_too_much_is_stopped_and_only_that_one(site: Site) -> None:
    greedy = [attack for attack in others() if attack.end == "limited"]
    ends = await _all_end(site, greedy)
    assert len(ends) == len(greedy)
    known = {
        "answered",
        "QueryTooDeep",
        "QueryTimeout",
        "QueryOutOfMemory",
        "QueryFailed",
        "QueryCrashed",
        "ResultTooLarge",
        "ResultTooWide",
    }
    assert {end.split()[0] for end in ends.values()} <= known
    bombs = [
        end.split()[0] for attack, end in ends.items() if attack.kind in ("recursive bomb", "cross join")
    ]
    assert set(bombs) <= {"QueryTimeout", "QueryOutOfMemory"}


async def test_what_the_corpus_looks_for_is_there(site: Site) -> None:
    """A canary that nobody could find would prove nothing."""
    assert IN_FILE in site.file.read_text()
    assert os.environ[VARIABLE] == IN_ENVIRONMENT
    assert (await site.answer("SELECT kind AS k FROM events WHERE id = 1")) == [("k", ["a"])]
