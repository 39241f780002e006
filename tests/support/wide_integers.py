"""The columns of an integer of more than 64 bits in files, made from Python's integers alone."""

from __future__ import annotations

from typing import Any


def stored_integer(name: str, value: int | None) -> dict[str, Any]:
    parts = ("binary", "string", "f64", "e0", "e18", "e36")
    if value is None:
        return dict.fromkeys([f"{name}_{part}" for part in parts])
    sign, digits = -1 if value < 0 else 1, abs(value)
    high = digits // 10**36
    values = (
        (value % 2**256).to_bytes(32, "big"),
        str(value),
        float(value),
        sign * (digits % 10**18),
        sign * (digits // 10**18 % 10**18),
        str(sign * high) if high else None,
    )
    return {f"{name}_{part}": each for part, each in zip(parts, values, strict=True)}
