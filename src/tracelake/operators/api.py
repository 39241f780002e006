"""``@operator``: gives a function the name by which a DAG asks for it.

The decorator returns the function as it is, only marked: nothing is registered on import, so a module can be
imported any number of times, tests included, and what a worker offers is decided by the worker alone.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from tracelake.domain.errors import Invalid

if TYPE_CHECKING:
    from tracelake.operators.context import Context

Operator: TypeAlias = "Callable[[Context], None]"
F = TypeVar("F", bound="Callable[[Context], None]")

_NAME = re.compile(r"[a-z][a-z0-9_]{0,127}")
_MARK = "__tracelake_operator__"


def operator(name: str) -> Callable[[F], F]:
    """Mark a function ``(ctx) -> None`` as the operator ``name``."""
    check_name(name)

    def mark(function: F) -> F:
        check_function(name, function)
        setattr(function, _MARK, name)
        return function

    return mark


def declared_name(candidate: object) -> str | None:
    """The name under which a function was marked, if it was."""
    name = getattr(candidate, _MARK, None) if inspect.isfunction(candidate) else None
    return name if isinstance(name, str) else None


def check_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Invalid(
            "OperatorInvalid",
            f"{name!r} is no name for an operator: lower case letters, digits and _, a letter first",
        )


def check_function(name: str, function: object) -> None:
    """Refuse what would do nothing when it is called: a coroutine or generator never runs its body."""
    if not callable(function):
        raise Invalid("OperatorInvalid", f"operator {name!r} is not a function but {type(function).__name__}")
    if inspect.iscoroutinefunction(function):
        raise Invalid(
            "OperatorInvalid", f"operator {name!r} is async: use asyncio.run() inside of a function"
        )
    if inspect.isgeneratorfunction(function):
        raise Invalid("OperatorInvalid", f"operator {name!r} is a generator: call ctx.emit instead of yield")
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise Invalid(
            "OperatorInvalid", f"operator {name!r} must take one argument, the context: def {name}(ctx)"
        ) from None
    except ValueError:
        return
