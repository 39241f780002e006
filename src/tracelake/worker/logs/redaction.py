"""Secrets taken out of a stream of bytes that arrives in pieces of any size.

A secret is found as it is, as JSON or Python would print it, as a URL would carry it, and line by line when it has
several. What could be the beginning of one at the end of a piece is held back until more is known; everything else
goes through at once. Values of less than ``SHORTEST`` characters are left alone: taking every ``1`` out of a log
hides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from urllib.parse import quote, quote_plus

SHORTEST = 4
MASK = "•••".encode()


class Redaction:
    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = tuple(secrets)
        self._held = b""

    @cached_property
    def _forms(self) -> list[bytes]:
        """Made when there is something to look at, which for most attempts is never."""
        # The longest first: one may be part of another.
        forms = {form for secret in self._secrets for form in _forms(secret)}
        return sorted(forms, key=len, reverse=True)

    def feed(self, piece: bytes) -> bytes:
        """What may be shown now."""
        text = self._replace(self._held + piece)
        keep = max((_overhang(text, form) for form in self._forms), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> bytes:
        """What was held back and turned out to be no secret, for nothing follows."""
        rest, self._held = self._held, b""
        return rest

    def text(self, text: str) -> str:
        """A whole text on its own."""
        return self._replace(text.encode("utf-8", "replace")).decode("utf-8", "replace")

    def _replace(self, text: bytes) -> bytes:
        for form in self._forms:
            text = text.replace(form, MASK)
        return text


def _forms(secret: str) -> set[bytes]:
    texts = {secret, *secret.splitlines()}
    texts |= {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1]}
    texts |= {quote(secret, safe=""), quote_plus(secret)}
    return {text.encode("utf-8", "replace") for text in map(str.strip, texts) if len(text) >= SHORTEST}


def _overhang(text: bytes, form: bytes) -> int:
    """How many bytes at the end could be the beginning of ``form``."""
    start = max(0, len(text) - len(form) + 1)
    while (start := text.find(form[0], start)) >= 0:
        if form.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
