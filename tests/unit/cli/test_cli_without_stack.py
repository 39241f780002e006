"""Every command where no stack runs: one line on stderr that says how to start one, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.main import get_command

from tracelake.cli import failures
from tracelake.cli.main import app

TASK = "0190b6c1-7e7a-7d3c-9c0e-5a3b0f6f2f11"
NEEDS_A_STACK: dict[str, tuple[str, ...]] = {
    "backfill": ("a/b", "--from", "0", "--to", "9"),
    "buffers drop": ("a", "1"),
    "buffers list": (),
    "buffers replay": ("a", "1"),
    "buffers show": ("a",),
    "bundle list": (),
    "bundle push": ("FOLDER",),
    "bundle show": ("sha256:" + "0" * 64,),
    "cancel": (TASK,),
    "dag deploy": ("FILE",),
    "dag list": (),
    "dag plan": ("FILE",),
    "dag rollback": ("a", "--yes"),
    "dag show": ("a",),
    "dag versions": ("a",),
    "datasets": (),
    "datasets gaps": ("blocks",),
    "datasets show": ("a/b/c",),
    "deliveries drop": ("a/b", "1"),
    "deliveries list": (),
    "deliveries pause": ("a/b",),
    "deliveries replay": ("a/b",),
    "deliveries resume": ("a/b",),
    "deliveries show": ("a/b",),
    "deploy": ("FILE",),
    "explain": ("blocks:0-9",),
    "outbox failed": (),
    "outbox replay": (),
    "pause": ("a/b",),
    "plan": ("FILE",),
    "query": ("SELECT 1",),
    "resume": ("a/b",),
    "retry": (TASK,),
    "sources list": (),
    "sources next": ("a/b",),
    "sources run": ("a/b",),
    "sources secret": ("a/b",),
    "status": (),
    "task show": (TASK,),
    "tasks": (),
    "trigger": ("a/b", "--cursor", "1"),
    "verify": ("blocks",),
}
NEEDS_NONE = {
    *("dev", "devchain", "dispatcher", "doctor", "init", "keys list", "keys rotate", "logs"),
    *("database install", "database restored", "database rotate", "rpc status", "schema"),
}
"""They start something, or look at what is on this machine."""
SERVES_ONE = {"delivery", "query-service", "scheduler", "sink", "worker"}
"""They are given a stack by other options than people are; tests of their own see to them."""


def commands(group: typer.core.TyperGroup, path: str = "") -> list[str]:
    """Everything that can be called, groups that do something by themselves included."""
    found: list[str] = []
    for name, child in group.commands.items():
        if isinstance(child, typer.core.TyperGroup):
            found += [f"{path}{name}"] if child.invoke_without_command else []
            found += commands(child, f"{path}{name} ")
        else:
            found.append(f"{path}{name}")
    return found


def test_of_every_command_it_is_known_whether_it_needs_a_stack() -> None:
    root = get_command(app)
    assert isinstance(root, typer.core.TyperGroup)
    assert set(commands(root)) == {*NEEDS_A_STACK, *NEEDS_NONE, *SERVES_ONE}


@pytest.mark.parametrize("command", NEEDS_A_STACK)
def test_without_a_stack_it_says_in_one_line_how_to_start_one(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRACELAKE_URL", "TRACELAKE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    file, folder, home = tmp_path / "dag.yaml", tmp_path / "function", tmp_path / "no home"
    file.write_text("name: x\njobs: []\n")
    folder.mkdir()
    (folder / "main.py").write_text("def handler(event, context): ...\n")
    given = {"FILE": str(file), "FOLDER": str(folder)}
    arguments = [given.get(each, each) for each in NEEDS_A_STACK[command]]
    with pytest.raises(SystemExit) as ended:
        failures.run(lambda: app([*command.split(), *arguments, "--home", str(home)]), debug=False)
    output = capsys.readouterr()
    assert (ended.value.code, output.out) == (3, "")
    [line] = output.err.splitlines()
    assert f"tracelake dev --home '{home}'" in line
    assert not home.exists()


@pytest.mark.parametrize("command", [("show", "blocks"), ("gaps", "blocks")])
def test_options_before_a_subcommand_of_datasets_are_its_own(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    given = ["datasets", "--home", str(before), *command]
    for arguments, home in ((given, before), ([*given, "--home", str(after)], after)):
        with pytest.raises(SystemExit) as ended:
            failures.run(lambda arguments=arguments: app(arguments), debug=False)
        assert ended.value.code == 3
        assert f"tracelake dev --home {home}" in capsys.readouterr().err


def test_an_option_that_a_subcommand_of_datasets_lacks_is_refused_before_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        failures.run(lambda: app(["datasets", "--after", "x", "show", "blocks"]), debug=False)
    assert ended.value.code == 2
    assert "--after" in capsys.readouterr().err
