"""Names of columns as Spark's parser takes them, whatever characters they hold."""

from __future__ import annotations


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
