"""Which words of a receiver are shown to people: only those that hold nothing of the secret that led to it.

A page for an error often repeats the address that was asked for, cut, in other letters or with other signs between.
So words and secret are compared by their letters and digits alone, without case: four in a row of a part of the
secret, or a shorter part whole, and none of the words are shown. Often they are left out without need; the code is
always there.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from html import unescape
from urllib.parse import unquote

_RUN = 4
_SHOWN_CHARS = 200
#: With those above ASCII: what reads a text may take some of them for a line's end.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def shown_words(text: str, *secrets: str) -> str:
    """The beginning of a text in one line, or why it is left out."""
    words = one_line(text)[:_SHOWN_CHARS].strip()
    if words and _repeats(words, secrets):
        return "(its words are left out: they may repeat a part of the secret)"
    return words


def one_line(text: str) -> str:
    return _CONTROL.sub(" ", text)


def _repeats(words: str, secrets: tuple[str, ...]) -> bool:
    forms = {"".join(_parts(each)) for each in (words, unquote(words), unescape(words))}
    runs = {run for secret in secrets for each in (secret, unquote(secret)) for run in _runs(each)}
    return any(run in form for run in runs for form in forms)


def _runs(secret: str) -> Iterator[str]:
    for part in _parts(secret):
        for start in range(max(1, len(part) - _RUN + 1)):
            yield part[start : start + _RUN]


def _parts(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).casefold())
