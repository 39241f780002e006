"""What the pages tell people to type and to watch is there: commands, metrics, headings that links point to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml
from typer.main import get_command

from scripts.reference.metrics_page import documented
from tracelake.cli.main import app

DOCS = Path(__file__).parents[2] / "docs"
RUNBOOK = (DOCS / "runbook.md").read_text(encoding="utf-8")


def commands(group: typer.core.TyperGroup, path: str = "tracelake") -> Iterator[str]:
    for name, child in group.commands.items():
        yield f"{path} {name}"
        if isinstance(child, typer.core.TyperGroup):
            yield from commands(child, f"{path} {name}")


def assert_accepted(root: typer.core.TyperGroup, words: list[str]) -> None:
    """There is such a command, and it has these options."""
    command: typer.core.TyperCommand | typer.core.TyperGroup = root
    left = list(words)
    while isinstance(command, typer.core.TyperGroup) and left and left[0] in command.commands:
        found = command.commands[left.pop(0)]
        assert isinstance(found, typer.core.TyperCommand | typer.core.TyperGroup)
        command = found
    options = {name for parameter in command.params for name in parameter.opts}
    assert command is not root, words
    assert {word for word in left if word.startswith("--")} <= options, words


def test_every_command_of_the_runbook_exists() -> None:
    root = get_command(app)
    assert isinstance(root, typer.core.TyperGroup)
    known = set(commands(root))
    groups = {name.split()[1] for name in known if name.count(" ") == 2}
    for first, second in re.findall(r"tracelake ([a-z][a-z-]+)(?: ([a-z][a-z-]+))?", RUNBOOK):
        named = f"tracelake {first} {second}" if first in groups and second else f"tracelake {first}"
        assert named in known, named


def test_every_option_of_the_runbook_exists() -> None:
    root = get_command(app)
    assert isinstance(root, typer.core.TyperGroup)
    for line in re.findall(r"^tracelake [^\n#]+", RUNBOOK, re.MULTILINE):
        assert_accepted(root, line.split()[1:])


def test_every_metric_of_the_runbook_exists() -> None:
    known = {name for each in documented() for name in (each.name, *each.samples)}
    table = RUNBOOK.partition("## What to watch")[2]
    named = set(re.findall(r"`(tracelake_[a-z_]+)`", table))
    assert named
    assert named <= known, named - known


def test_every_process_that_serves_metrics_is_told_of_where_processes_are_started_and_watched() -> None:
    monitoring = (DOCS.parent / "deploy" / "monitoring" / "README.md").read_text(encoding="utf-8")
    root = get_command(app)
    assert isinstance(root, typer.core.TyperGroup)
    serving = [
        name
        for name, command in root.commands.items()
        if any("--metrics-port" in parameter.opts for parameter in command.params)
    ]
    assert {"worker", "sink", "delivery", "scheduler"} <= set(serving)
    assert [name for name in serving if f"`{name}`" not in monitoring.replace("`tracelake ", "`")] == []
    watched = RUNBOOK.partition("## What to watch")[2]
    dev_help = root.commands["dev"].help or ""
    for name in ("worker", "sink", "delivery", "scheduler"):
        assert name in RUNBOOK.partition("## Upgrade")[0], name
        assert name in RUNBOOK.partition("## Upgrade")[2].partition("**When tables")[0], name
        assert name in watched.partition("Rules for all of this")[0], name
        assert name in dev_help, name
    assert "`tracelake_scheduler_acting`" in watched


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_every_heading_that_a_page_links_to_is_there(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s:]*\.md)?#([^)\s]+)\)", page.read_text(encoding="utf-8")):
        linked = (page.parent / target) if target else page
        assert anchor in set(anchors(linked)), f"{page.name} links to {target}#{anchor}"


def anchors(page: Path) -> Iterator[str]:
    for heading in re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
        yield kept.replace(" ", "-")


def test_the_compose_file_calls_commands_that_exist() -> None:
    root = get_command(app)
    assert isinstance(root, typer.core.TyperGroup)
    services = yaml.safe_load((DOCS.parent / "compose.yaml").read_text(encoding="utf-8"))["services"]
    commands = {service["command"].split()[0] for service in services.values()}
    assert commands >= {"dispatcher", "query-service", "sink", "scheduler", "delivery", "worker"}
    for service in services.values():
        assert_accepted(root, service["command"].split())
