"""The command line by itself: what it loads, what it needs, what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from tracelake.cli.doctor import Verdict, check_clock, check_home, check_port
from tracelake.cli.failures import EXTRAS, explain
from tracelake.cli.main import app
from tracelake.cli.show import cell, scope
from tracelake.dev.supervisor import delay_before_restart

HEAVY = ("httpx", "rich", "msgspec", "structlog", "asyncio", "tracelake.dispatcher", *EXTRAS)


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def without(*modules: str) -> str:
    """The command line on a machine that lacks some modules."""
    return (
        f"import sys; sys.modules.update(dict.fromkeys({modules!r}))\n"
        "from tracelake.cli.main import main; main()"
    )


def leaves(command: typer.core.TyperGroup, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, child in command.commands.items():
        below = leaves(child, (*path, name)) if isinstance(child, typer.core.TyperGroup) else []
        found += below if below else [(*path, name)]
    return found


def test_the_command_line_starts_without_loading_what_only_some_commands_need() -> None:
    loaded = python(
        f"import sys, tracelake.cli.main\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert loaded.stdout == "[]\n", loaded.stderr


def test_every_command_has_examples() -> None:
    root = get_command(app)
    assert isinstance(root, typer.core.TyperGroup)
    commands = leaves(root)
    assert ("task", "show") in commands
    for path in commands:
        command: object = root
        for name in path:
            assert isinstance(command, typer.core.TyperGroup)
            command = command.commands[name]
        assert isinstance(command, typer.core.TyperCommand)
        assert command.help is not None
        _, _, examples = command.help.partition("Examples:")
        assert f"tracelake {' '.join(path)}" in examples, path


def test_the_page_on_the_command_line_names_every_command() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
    root = get_command(app)
    assert isinstance(root, typer.core.TyperGroup)
    assert [" ".join(path) for path in leaves(root) if f"`{' '.join(path)}`" not in page] == []


def test_every_command_that_prints_has_json() -> None:
    services = ("delivery", "dev", "dispatcher", "query-service", "scheduler", "sink", "worker")
    silent = {*((name,) for name in services), ("schema",)}
    root = get_command(app)
    assert isinstance(root, typer.core.TyperGroup)
    for path in set(leaves(root)) - silent:
        command: object = root
        for name in path:
            assert isinstance(command, typer.core.TyperGroup)
            command = command.commands[name]
        assert isinstance(command, typer.core.TyperCommand)
        assert any("--json" in each.opts for each in command.params), path


@pytest.mark.parametrize(
    ("module", "command", "extra"),
    [
        ("asyncpg", ("dispatcher", "--home", "HOME"), "dispatcher"),
        ("uvicorn", ("dev", "--home", "HOME"), "dispatcher"),
        ("psycopg", ("dev", "--home", "HOME"), "embedded"),
        ("cryptography", ("keys", "list", "--home", "HOME"), "dispatcher"),
    ],
)
def test_a_missing_extra_is_named(module: str, command: tuple[str, ...], extra: str, tmp_path: Path) -> None:
    done = python(without(module), *(str(tmp_path) if each == "HOME" else each for each in command))
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert f"pip install 'tracelake[{extra}]'" in line


def test_commands_over_the_api_need_no_extra(tmp_path: Path) -> None:
    done = python(without(*EXTRAS), "tasks", "--url", "http://127.0.0.1:9", "--token", "x")
    assert done.returncode == 3, done.stderr
    assert python(without(*EXTRAS), "doctor", "--home", str(tmp_path)).returncode in (0, 1)


def test_the_unexpected_is_one_line() -> None:
    [line] = explain(RuntimeError("first\nsecond"))
    assert "RuntimeError: first" in line
    assert "--debug" in line


def test_control_characters_of_others_do_not_reach_the_terminal() -> None:
    assert cell("a\x1b[2Jb\r\nc\u202e") == "a [2Jb  c "


def test_scopes_read_as_ranges() -> None:
    assert (scope(0, 9), scope(None, 9), scope(None, None)) == ("0-9", "..9", None)


def test_restarts_slow_down_and_never_stop() -> None:
    delays = [delay_before_restart(deaths) for deaths in range(1, 1000)]
    assert delays == sorted(delays)
    assert (delays[0], delays[-1]) == (0.25, 10.0)


@pytest.mark.parametrize(("off", "verdict"), [(0, Verdict.OK), (60, Verdict.WARNING), (-60, Verdict.WARNING)])
def test_a_clock_that_is_off_is_found_in_both_directions(off: int, verdict: Verdict) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert check_clock(now + timedelta(seconds=off), now, now + timedelta(seconds=1)).verdict is verdict


def test_a_home_to_be_made_is_judged_by_the_folder_that_is_there(tmp_path: Path) -> None:
    home, disk = check_home(tmp_path / "not" / "yet")
    assert (home.verdict, disk.check) == (Verdict.OK, "disk")
    assert not (tmp_path / "not").exists()


def test_a_taken_port_is_a_warning_with_a_remedy() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        finding = check_port("user", taken.getsockname()[1])
    assert finding.verdict is Verdict.WARNING
    assert finding.remedy is not None
