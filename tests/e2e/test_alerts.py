"""The alert example, end to end: a transfer is mined, a function raises the alert, a reorg retracts it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.alert_scene import CRITICAL, WARNING, AlertScene, alert_scene
from tests.support.dev_stack import eventually

pytestmark = pytest.mark.xdist_group("whole_stack")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AlertScene]:
    with alert_scene(tmp_path_factory.mktemp("alerts")) as opened:
        yield opened


def severities(scene: AlertScene, block: int) -> list[tuple[str, bool]]:
    """What stands in ``alert_events`` about a block, and whether it was retracted, by the Query Service."""
    table = scene.client.query(
        "SELECT severity, retracted_at FROM alert_events WHERE block_number = ? ORDER BY severity", [block]
    )
    return [(row["severity"], row["retracted_at"] is not None) for row in table.to_pylist()]


def incidents(scene: AlertScene) -> list[str]:
    return scene.client.query("SELECT state FROM incidents ORDER BY state").column("state").to_pylist()


@pytest.mark.parametrize("language", ["python", "node"])
def test_a_large_transfer_raises_an_alert_and_a_reorg_retracts_it(scene: AlertScene, language: str) -> None:
    scene.deploy(language)
    before = incidents(scene)
    block = scene.transfer(WARNING // 2, WARNING, CRITICAL)
    raised = [("critical", False), ("warning", False)]
    eventually("both alerts", lambda: severities(scene, block) == raised)
    eventually("the incident", lambda: incidents(scene) == sorted([*before, "open"]))
    scene.node.reorg(1)
    retracted = [("critical", True), ("warning", True)]
    eventually("the alerts are retracted", lambda: severities(scene, block) == retracted)
    eventually("the incident is withdrawn", lambda: incidents(scene) == sorted([*before, "withdrawn"]))
