"""The Query Service refuses to run queries that nothing holds, and tells nobody where its databases are."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import duckdb
import pytest

from tracelake import kernel
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.query.catalog import Catalog
from tracelake.query.engine import confinement
from tracelake.query.engine.child import failure
from tracelake.query.engine.restrict import SlotLimits
from tracelake.query.hot_rows import HotDatabase
from tracelake.query.settings import QueryLimits, tuned
from tracelake.sandbox.sandbox import Sandbox
from tracelake.settings import Secret

NOWHERE = Secret("postgresql://some_role@127.0.0.1:1/some_database")


@pytest.fixture
def no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse() -> NoReturn:
        raise Unavailable("SandboxUnavailable", "bwrap isn't\ninstalled")

    monkeypatch.setattr(Sandbox, "open", refuse)


@pytest.mark.usefixtures("no_sandbox")
async def test_without_sandbox_and_landlock_nothing_is_served_unless_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "landlock_version", lambda: 0)
    with pytest.raises(Unavailable) as refused:
        await confinement.best_confinement(SlotLimits())
    assert refused.value.reason == "NotConfined"
    for word in ("bubblewrap", "Landlock", "TRACELAKE_QUERY_UNCONFINED=1"):
        assert word in refused.value.message
    assert "\n" not in refused.value.message
    accepted = await confinement.best_confinement(SlotLimits(), unconfined=True)
    assert not accepted.confined


@pytest.mark.usefixtures("no_sandbox")
async def test_without_a_sandbox_but_with_landlock_it_serves_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "landlock_version", lambda: 4)
    held = await confinement.best_confinement(SlotLimits())
    assert not held.confined
    assert "Landlock" in held.description


def test_running_unconfined_is_said_by_exactly_one_word() -> None:
    limits = QueryLimits()
    assert tuned(limits, {}) == tuned(limits, {"TRACELAKE_QUERY_UNCONFINED": "0"}) == limits
    assert tuned(limits, {"TRACELAKE_QUERY_UNCONFINED": "1"}) == replace(limits, unconfined=True)
    with pytest.raises(Invalid, match="TRACELAKE_QUERY_UNCONFINED"):
        tuned(limits, {"TRACELAKE_QUERY_UNCONFINED": "yes"})


async def test_a_database_that_is_away_is_not_described_to_whoever_asks() -> None:
    hot = HotDatabase(NOWHERE)
    with pytest.raises(Unavailable) as data:
        await hot.check()
    await hot.close()
    catalog = await Catalog.open(NOWHERE)
    with pytest.raises(Unavailable) as state:
        await catalog.check()
    await catalog.close()
    for error in (data.value, state.value):
        for detail in ("127.0.0.1", "some_role", "some_database", "port"):
            assert detail not in error.message


def test_a_function_that_could_not_allocate_needed_too_much_memory() -> None:
    unallocated = duckdb.InternalException("INTERNAL Error: Memory allocation failure\n\nStack Trace:\n")
    assert failure(unallocated).reason == "QueryOutOfMemory"
    assert failure(duckdb.InternalException("INTERNAL Error: index 5")).reason == "QueryCrashed"
    quoted = duckdb.ConversionException("Conversion Error: 'INTERNAL Error: Memory allocation failure'")
    assert failure(quoted).reason == "QueryFailed"
