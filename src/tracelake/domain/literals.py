"""Quoted literals, read as Postgres reads an untyped literal beside a column of a type.

The result is None for a text that Postgres would refuse for that type: the same grammar, the same limits, spaces
around it ignored. The spellings of Postgres 16 and later count everywhere (``0x1f``, ``1_000``), since no engine
gets the text itself.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

_SPACES = " \t\n\v\f\r"
_DIGITS = "[0-9]+(?:_[0-9]+)*"
_OTHER_BASE = re.compile(r"([+-]?)0(?:[xX]((?:_?[0-9a-fA-F])+)|[oO]((?:_?[0-7])+)|[bB]((?:_?[01])+))\Z")
_INTEGER = re.compile(rf"[+-]?{_DIGITS}\Z")
_NUMERIC = re.compile(rf"[+-]?(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][+-]?{_DIGITS})?\Z")
_NUMERIC_SPECIAL = re.compile(r"(?:nan|[+-]?inf(?:inity)?)\Z", re.IGNORECASE)
_DOUBLE = re.compile(r"[+-]?((?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:[eE][+-]?[0-9]+)?\Z")
_DOUBLE_HEX = re.compile(r"[+-]?0[xX]((?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+))(?:[pP][+-]?[0-9]+)?\Z")
_DOUBLE_SPECIAL = re.compile(r"([+-]?)(?:(nan(?:\([0-9a-z_]*\))?)|inf(?:inity)?)\Z", re.IGNORECASE)
_MAX_INTEGER_DIGITS, _MAX_FRACTION_DIGITS = 131_072, 16_383
_LOW, _HIGH = -(2**63), 2**63 - 1


def read_integer(text: str, low: int = _LOW, high: int = _HIGH) -> int | None:
    """A bigint, or an integer within other bounds."""
    text = text.strip(_SPACES)
    found = _in_other_base(text)
    if found is None and _INTEGER.match(text):
        # By its number of digits first: int() refuses very long texts.
        digits = text.replace("_", "").lstrip("+-").lstrip("0")
        found = int(text) if len(digits) <= len(str(high)) else None
    return found if found is not None and low <= found <= high else None


def read_numeric(text: str) -> Decimal | None:
    text = text.strip(_SPACES)
    if _NUMERIC_SPECIAL.match(text):
        return Decimal(text)
    whole = _in_other_base(text)
    if whole is not None:
        return Decimal(whole) if abs(whole) < 10**_MAX_INTEGER_DIGITS else None
    if not _NUMERIC.match(text):
        return None
    try:
        number = Decimal(text.replace("_", ""))
    except InvalidOperation:
        # An exponent beyond those that Python has is beyond those that Postgres has.
        return None
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    if -exponent > _MAX_FRACTION_DIGITS:
        return None
    if not number:
        return Decimal(0)
    return number if number.adjusted() < _MAX_INTEGER_DIGITS else None


def read_double(text: str) -> float | None:
    """Also what C reads: hexadecimal fractions and a NaN with a sign."""
    text = text.strip(_SPACES)
    if special := _DOUBLE_SPECIAL.match(text):
        sign, nan = special.groups()
        return float("nan") if nan else float(f"{sign}inf")
    try:
        if match := _DOUBLE_HEX.match(text):
            number = float.fromhex(text)
        elif match := _DOUBLE.match(text):
            number = float(text)
        else:
            return None
    except OverflowError:
        return None
    vanished = number == 0 and match[1].strip("0.") != ""
    return None if vanished or number in (float("inf"), float("-inf")) else number


def read_boolean(text: str) -> bool | None:
    """``true``, ``false``, ``yes``, ``no``, ``on``, ``off``, 1, 0, or the beginning of one that is no other's."""
    text = text.strip(_SPACES)
    if not text.isascii():
        return None
    word = text.lower()
    if word in ("1", "0"):
        return word == "1"
    if not word or word == "o":
        return None
    if any(full.startswith(word) for full in ("true", "yes", "on")):
        return True
    return False if any(full.startswith(word) for full in ("false", "no", "off")) else None


def _in_other_base(text: str) -> int | None:
    match = _OTHER_BASE.match(text)
    if match is None:
        return None
    sign, *parts = match.groups()
    base, digits = next((base, part) for base, part in zip((16, 8, 2), parts, strict=True) if part)
    number = int(digits.replace("_", ""), base)
    return -number if sign == "-" else number
