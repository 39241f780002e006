"""``python -m tests.support.attack [--only PATTERN] [--list] [--json] [--quick]`` (or: ``make attack``)"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.attack.attack import Attack, Result, attacks, carry_out
from tests.support.attack.stack import AttackedStack, attacked_stack, running_stack


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make attack", description="Attack a running stack, in every way known."
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="attacks with such a name"
    )
    parser.add_argument("--quick", action="store_true", help="those that are a part of make test")
    parser.add_argument("--list", action="store_true", help="say what would be tried, and try nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object per attack instead of the table")
    parser.add_argument("--as-user", action="store_true", help="as root: only again as a user without power")
    parser.add_argument("--as-root", action="store_true", help="as root: not again as a user")
    parser.add_argument("--attach", type=Path, metavar="HOME", help="a stack that runs already, on this home")
    options = parser.parse_args()
    # A user who ends it early wants its processes gone, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = attacks(options.only, quick=options.quick)
    if options.list:
        for each in chosen:
            _say(json.dumps(_described(each)) if options.json else f"{each.by}/{each.name}: {each.tried}")
        return 0
    if not chosen:
        _say(f"no attack is called {', '.join(options.only)}; --list names them")
        return 2
    results = [] if options.as_user else _attack(chosen, options.attach, options.json)
    broken = _summary(results, "root" if os.geteuid() == 0 else "an ordinary user", options.json)
    if os.geteuid() == 0 and not options.as_root and options.attach is None:
        broken = _again_as_user(options) or broken
    return 1 if broken else 0


def _attack(chosen: Sequence[Attack], attach: Path | None, as_json: bool) -> list[Result]:
    results: list[Result] = []
    with _stack(attach) as stack:
        for each in chosen:
            if reason := left_out(each, stack):
                _note(f"{each.by}/{each.name}: left out, {reason}")
                continue
            result = carry_out(each, stack)
            results.append(result)
            if as_json:
                _say(json.dumps({**result.as_json(), "user": os.geteuid()}))
            else:
                _note(f"{'ok    ' if result.ok else 'BROKEN'} {result.by}/{result.name} ({result.seconds} s)")
    return results


def left_out(each: Attack, stack: AttackedStack) -> str:
    """Empty for an attack that can be tried here."""
    if each.only_root and os.geteuid() != 0:
        return "a process of another user can only be started by root"
    if each.needs_functions and not stack.runs_functions:
        return "functions don't run here"
    return ""


@contextmanager
def _stack(attach: Path | None) -> Iterator[AttackedStack]:
    if attach is not None:
        with running_stack(attach) as stack:
            yield stack
        return
    with tempfile.TemporaryDirectory(prefix="tracelake-attack-") as folder:
        # Others may come as far as the home, whose own mode has to keep them out.
        os.chmod(folder, 0o755)
        with attacked_stack(Path(folder)) as stack:
            yield stack


def _summary(results: Sequence[Result], who: str, as_json: bool) -> int:
    broken = sum(not each.ok for each in results)
    if results and not as_json:
        _say(table(results))
        _say(f"as {who}: {len(results)} attacks, {broken} broken")
    return broken


def table(results: Sequence[Result]) -> str:
    """Markdown, so that it can be put into a report as it is."""
    lines = ["| attack | class | tried | expected | happened | |", "|---|---|---|---|---|---|"]
    for each in results:
        cells = (f"{each.by}/{each.name}", each.on, each.tried, each.expected, _cut(each.happened))
        escaped = " | ".join(cell.replace("|", "\\|") for cell in cells)
        lines.append(f"| {escaped} | {'ok' if each.ok else 'BROKEN'} |")
    return "\n".join(lines)


def _again_as_user(options: argparse.Namespace) -> bool:
    """The same as a user who owns nothing: another sandbox, another view, no second user."""
    again = ["-m", "tests.support.attack", *(f"--only={pattern}" for pattern in options.only)]
    again += ["--json"] if options.json else []
    again += ["--quick"] if options.quick else []
    with tempfile.TemporaryDirectory(prefix="tracelake-attack-user-") as folder:
        launcher = ["-m", "tests.support.unprivileged", folder, sys.executable]
        return subprocess.run([sys.executable, *launcher, *again], check=False).returncode != 0


def _described(each: Attack) -> dict[str, str]:
    return {"name": each.name, "by": each.by, "on": each.on, "tried": each.tried, "expected": each.expected}


def _cut(text: str, most: int = 220) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _note(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
