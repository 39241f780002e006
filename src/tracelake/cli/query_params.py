"""Values for a query as people type them on a command line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import typer

_NAMED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_BYTES = re.compile(r"0[xX](?:[0-9a-fA-F]{2})*")


def read_params(texts: Sequence[str]) -> list[Any] | dict[str, Any] | None:
    """All in order, or all by name."""
    if not texts:
        return None
    named = [_NAMED.fullmatch(text) for text in texts]
    if not any(named):
        return [read_value(text) for text in texts]
    found: dict[str, Any] = {}
    for text, match in zip(texts, named, strict=True):
        if match is None:
            raise typer.BadParameter(
                f"{text!r} has no name and others have: all of --param by name, or none "
                "(text with a = in it goes in double quotes: --param '\"a=b\"')"
            )
        if match[1] in found:
            raise typer.BadParameter(f"--param {match[1]} is given twice")
        found[match[1]] = read_value(match[2])
    return found


def read_value(text: str) -> Any:
    """JSON's numbers, words and quoted text; bytes as 0x…; anything else is text as it stands."""
    if _BYTES.fullmatch(text):
        return bytes.fromhex(text[2:])
    try:
        value = json.loads(text, parse_constant=_no_number)
    except ValueError:
        return text
    return text if isinstance(value, dict) else value


def _no_number(word: str) -> Any:
    """NaN and Infinity are Python's idea of JSON."""
    raise ValueError(word)
