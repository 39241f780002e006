"""``examples/pressure`` on a stack: held, shown, kept, released. No worker runs, so a person ends the pressure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.dev_stack import DevStack, eventually

pytestmark = pytest.mark.xdist_group("cli")
EXAMPLE = Path(__file__).parents[2] / "examples" / "pressure" / "dag.yaml"


def said(stack: DevStack, *arguments: str | Path) -> str:
    done = stack.run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_holds_and_releases_and_keeps_what_it_was_asked_for(stack: DevStack) -> None:
    def held() -> set[str]:
        report = json.loads(said(stack, "status", "--json"))["pressure"]
        return {hold["job"] for hold in report["holds"] if hold["dag_name"] == "pressure"}

    def events() -> set[str]:
        page = json.loads(said(stack, "tasks", "--json", "--dag", "pressure", "--job", "chunks"))
        return {f"{task['start']}-{task['end']}" for task in page["tasks"]}

    said(stack, "deploy", EXAMPLE)
    said(stack, "trigger", "pressure/past", "--start", "0", "--end", "39")
    eventually("both producers are held", lambda: held() == {"past", "chunks"})
    said(stack, "trigger", "pressure/past", "--start", "40", "--end", "59")
    assert events() == {"0-39"}, "the second is kept"
    shown = said(stack, "status")
    assert "chunks is held by pressure of pressure/work (40 of 20 waiting" in shown
    assert "through chunks → work; released below 10" in shown
    said(stack, "pause", "pressure/work")
    eventually("all are released", lambda: not held())
    eventually("the kept event is routed", lambda: events() == {"0-39", "40-59"})
