"""Parts of ``tracelake dev`` inherit no login, token or secret that is another part's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tracelake.dev.home import Home
from tracelake.dev.parts import (
    DELIVERY,
    DISPATCHER,
    QUERY,
    SCHEDULER,
    SINK,
    WORKER,
    delivery_spec,
    inherited,
    sink_spec,
)
from tracelake.serving.local_sockets import HeldPort

LOGINS = (
    "TRACELAKE_STATE_DSN",
    "TRACELAKE_QUEUE_PASSWORD",
    "TRACELAKE_DATA_OWNER_DSN",
    "TRACELAKE_DATA_WRITE_DSN",
    "TRACELAKE_TOKEN",
)
OWN: dict[str, set[str]] = {
    SCHEDULER: set(),
    SINK: set(),
    DELIVERY: {"TRACELAKE_SECRET_HOOK", "TRACELAKE_SECRETS_FILE", "TRACELAKE_DELIVERY_ALLOW"},
    WORKER: {
        "TRACELAKE_SECRET_HOOK",
        "TRACELAKE_SECRETS_FILE",
        "TRACELAKE_SPARK_CONF",
        "TRACELAKE_RPC_POOLS",
    },
    QUERY: {"TRACELAKE_QUERY_SECONDS", "TRACELAKE_EXPORT_ROOT"},
}
READ = set.union(*OWN.values())


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.startswith("TRACELAKE_")]:
        monkeypatch.delenv(name)
    for name in (*LOGINS, *READ, "TRACELAKE_HTTP_BODY_SECONDS", "ANYTHING_ELSE"):
        monkeypatch.setenv(name, "x")


@pytest.mark.parametrize("part", OWN)
def test_a_part_inherits_what_it_reads_and_what_is_not_the_platforms(part: str) -> None:
    found = {name for name in inherited(part) if name.startswith("TRACELAKE_")}
    assert found == {*OWN[part], "TRACELAKE_HTTP_BODY_SECONDS"}
    assert {"ANYTHING_ELSE", "PATH"} <= inherited(part).keys()


def test_the_dispatcher_inherits_its_settings_and_no_secret_of_operators_or_deliveries() -> None:
    found = inherited(DISPATCHER)
    assert "TRACELAKE_QUEUE_PASSWORD" in found
    assert {"TRACELAKE_SECRET_HOOK", "TRACELAKE_SECRETS_FILE"}.isdisjoint(found)


def test_parts_are_started_with_that_and_the_addresses_of_the_stack(tmp_path: Path) -> None:
    port = HeldPort(0)
    given = {"TRACELAKE_QUEUE_DSN": "of the stack"}
    try:
        for spec in (delivery_spec, sink_spec):
            started = spec(Home(tmp_path), port, environment=given)
            assert {**inherited(started.name), **given} == started.env()
    finally:
        port.close()
