"""SQL as data: queries live in ``.sql`` files, each under ``-- name: …`` with a line of why.

``load`` parses a package's file once; a query is an attribute of what it returns, so a misspelt name
fails when it is first used, with the names that exist.
"""

from __future__ import annotations

import re
from importlib import resources

_NAME = re.compile(r"^-- name: ([a-z][a-z0-9_]*)\s*$", re.MULTILINE)


class Queries:
    """The named queries of one file."""

    def __init__(self, origin: str, texts: dict[str, str]) -> None:
        self._origin = origin
        self._texts = texts

    def __getattr__(self, name: str) -> str:
        try:
            return self._texts[name]
        except KeyError:
            raise AttributeError(f"{self._origin} has no query {name!r}: {', '.join(self._texts)}") from None

    def names(self) -> tuple[str, ...]:
        return tuple(self._texts)


def parse(origin: str, text: str) -> Queries:
    parts = _NAME.split(text)
    names, bodies = parts[1::2], parts[2::2]
    # The later one would silently replace the earlier.
    if len(set(names)) != len(names):
        raise ValueError(f"{origin} names a query twice")
    return Queries(origin, {name: body.strip() for name, body in zip(names, bodies, strict=True)})


def load(package: str, filename: str) -> Queries:
    text = resources.files(package).joinpath(filename).read_text(encoding="utf-8")
    return parse(f"{package}/{filename}", text)
