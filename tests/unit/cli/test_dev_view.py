"""What a person sees of a stack's start: a table on a terminal, lines elsewhere."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from tracelake.cli.dev import LinesView, TableView
from tracelake.dev.supervisor import PartProgress, PartState

STARTED = [
    PartProgress(name="postgres-state", state=PartState.READY, seconds=1.24),
    PartProgress(name="dispatcher", state=PartState.STARTING),
    PartProgress(name="sink", state=PartState.WAITING, why="dispatcher"),
    PartProgress(name="query", state=PartState.DIED, seconds=0.5, why="was killed by SIGKILL"),
    PartProgress(name="worker-lambda", state=PartState.READY, seconds=2.0, again=True),
    PartProgress(name="worker-ecs_spark", state=PartState.FAILED, why="no Java\x1b[2J" + "!" * 99),
]
DEAD = PartProgress(
    name="query",
    state=PartState.DIED,
    seconds=1.0,
    why="ended with exit code 1 (no \x1b]0;x\x07)",
    log_tail=("one", "two"),
)


def test_a_terminal_gets_a_row_per_part() -> None:
    console = Console(file=StringIO(), width=80)
    view = TableView(console, now=lambda: 7.0)
    for news in STARTED:
        view.part(news)
    with console.capture() as captured:
        console.print(view.render())
    view.close()
    assert [line.rstrip().split(None, 1) for line in captured.get().splitlines()] == [
        ["postgres-state", "ready in 1.2 s"],
        ["dispatcher", "starting … 0 s"],
        ["sink", "waits for dispatcher"],
        ["query", "was killed by SIGKILL; again in 0.5 s"],
        ["worker-lambda", "restarted in 2.0 s"],
        ["worker-ecs_spark", f"failed: no Java [2J{'!' * 42}…"],
    ]


@pytest.mark.parametrize("on_terminal", [False, True])
def test_a_death_is_told_in_lines_once_everything_was_up(
    on_terminal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    view = TableView(Console(file=StringIO())) if on_terminal else LinesView()
    view.close()
    view.part(DEAD)
    view.part(PartProgress(name="query", state=PartState.STARTING, again=True))
    view.part(PartProgress(name="query", state=PartState.READY, seconds=3.0, again=True))
    said = capsys.readouterr()
    assert said.out == ""
    assert "\x1b" not in said.err
    first, *rest = said.err.splitlines()
    assert first.startswith("tracelake dev: query ended with exit code 1")
    assert first.endswith("; starting it again in 1 s")
    assert rest == [
        "tracelake dev:   query reported: one",
        "tracelake dev:   query reported: two",
        "tracelake dev: query runs again after 3.0 s",
    ]
