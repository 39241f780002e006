"""Attacks as data: the attacker, the attempt, the expected outcome and the outcome."""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from tests.support.attack.stack import AttackedStack

Attacker: TypeAlias = Literal["operator", "function", "sql", "dag", "http", "neighbour", "installation"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``how`` is the refusal as the attacker met it, or what it reached."""

    held: bool
    how: str


def held(how: str) -> Verdict:
    return Verdict(True, how)


def broken(how: str) -> Verdict:
    return Verdict(False, how)


def all_of(verdicts: Iterable[tuple[str, Verdict]]) -> Verdict:
    """Several ways to one end: they hold when each does."""
    met = list(verdicts)
    reached = [f"{name}: {each.how}" for name, each in met if not each.held]
    if reached:
        return broken("; ".join(reached))
    return held("; ".join(dict.fromkeys(each.how for _, each in met)))


Try: TypeAlias = "Callable[[AttackedStack], Verdict]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    name: str
    by: Attacker
    on: str
    tried: str
    expected: str
    run: Try
    quick: bool
    only_root: bool
    """Needs a second user on the machine, whom only root can be."""
    needs_functions: bool


_ATTACKS: dict[str, Attack] = {}


def attack(
    by: Attacker,
    on: str,
    tried: str,
    expected: str,
    *,
    quick: bool = False,
    only_root: bool = False,
    needs_functions: bool = False,
) -> Callable[[Try], Try]:
    """The function's name is the attack's. ``quick`` ones are part of ``make test``."""

    def register(run: Try) -> Try:
        name = run.__name__
        if name in _ATTACKS:
            raise ValueError(f"two attacks are called {name}")
        _ATTACKS[name] = Attack(
            name=name,
            by=by,
            on=on,
            tried=tried,
            expected=expected,
            run=run,
            quick=quick,
            only_root=only_root,
            needs_functions=needs_functions or by == "function",
        )
        return run

    return register


_KINDS = ("sql", "operators", "functions", "dags", "neighbours", "http", "least_privilege", "installation")
_ORDER: tuple[Attacker, ...] = ("sql", "operator", "function", "dag", "neighbour", "http", "installation")


def attacks(patterns: Sequence[str] = (), *, quick: bool = False) -> list[Attack]:
    """By attacker, then in the order in which they were written; a look at the victims is the last of them."""
    for kind in _KINDS:
        importlib.import_module(f"{__package__}.{kind}")
    return [
        each
        for each in sorted(_ATTACKS.values(), key=lambda each: _ORDER.index(each.by))
        if (each.quick or not quick)
        and (not patterns or any(fnmatch(f"{each.by}/{each.name}", f"*{pattern}*") for pattern in patterns))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    name: str
    by: Attacker
    on: str
    tried: str
    expected: str
    happened: str
    ok: bool
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def carry_out(each: Attack, stack: AttackedStack) -> Result:
    """An attack that breaks down proves nothing, so it doesn't count as held."""
    began = time.monotonic()
    try:
        verdict = each.run(stack)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        verdict = broken(f"the attack broke down: {type(error).__name__}: {error} ({at.name}:{at.lineno})")
    return Result(
        name=each.name,
        by=each.by,
        on=each.on,
        tried=each.tried,
        expected=each.expected,
        happened=" ".join(verdict.how.split()),
        ok=verdict.held,
        seconds=round(time.monotonic() - began, 1),
    )
