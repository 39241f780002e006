"""SQL texts for the gate of ``sql_transform``: ordinary ones, hostile ones, and mixtures of both.

Mixtures find differences between two parsers of one language: words of Spark's grammar in places where another
grammar has names, quotes and comments that one of the two doesn't see, statements cut in half. A text is a line
of its file; a line that doesn't begin with a letter continues the previous one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from random import Random

from tracelake.domain.spark_select.pieces import render
from tracelake.domain.spark_select.queries import read_select

_FOLDER = Path(__file__).parent
_PIECES = (_FOLDER / "pieces.txt").read_text(encoding="utf-8").split()
_SPLIT = re.compile(r"\n(?=[a-z])")
_WORDS = re.compile(r"'(?:[^'\\]|\\.)*'|`[^`]*`|\w+|\s+|.", re.DOTALL)


def check_select(text: object, relations: Iterable[str]) -> str:
    """The text that Spark would get in place of this one, or ``Invalid`` with what is wrong with it."""
    return render(read_select(text, relations))


def ordinary() -> list[str]:
    return _SPLIT.split((_FOLDER / "ordinary.sql").read_text(encoding="utf-8").strip())


def hostile(canary: str, secret: str) -> list[str]:
    texts = _SPLIT.split((_FOLDER / "hostile.sql").read_text(encoding="utf-8").strip())
    return [text.replace("@CANARY@", canary).replace("@SECRET@", secret) for text in texts]


def mixture(random: Random, texts: list[str]) -> str:
    """One of the texts, with pieces of others and of the language in it, out of it, or in another order."""
    words = _WORDS.findall(random.choice(texts))
    for _ in range(random.choice((1, 1, 1, 1, 2, 4))):
        place = random.randrange(len(words) + 1)
        match random.randrange(9):
            case 0 | 1:
                words[place:place] = [" ", random.choice(_PIECES), random.choice((" ", ""))]
            case 2:
                del words[place : place + random.choice((1, 2, 3))]
            case 3:
                other = _WORDS.findall(random.choice(texts))
                start = random.randrange(len(other))
                words[place:place] = [" ", *other[start : start + random.choice((3, 7, 15, 40))]]
            case 4:
                other = _WORDS.findall(random.choice(texts))
                words[place : place + 1] = [" ( ", *other, " ) "]
            case 5:
                words[place : place + 1] = [random.choice(_PIECES)]
            case _:
                # A word in the place of another keeps most texts whole.
                places = [at for at, word in enumerate(words) if word.isidentifier()]
                if places:
                    words[random.choice(places)] = random.choice(
                        [piece for piece in _PIECES if piece.isalpha()]
                    )
        words = words or [" "]
    return "".join(words)
