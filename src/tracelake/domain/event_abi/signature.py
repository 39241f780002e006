"""Events as people write them: ``event Transfer(address indexed from, address indexed to, uint256 value)``.

What Solidity has, with structs written out as tuples: ``(uint256 amount, address token)[] swaps``. ``event`` may be
left out, and so may names.
"""

from __future__ import annotations

import re

from tracelake.domain.event_abi.model import AbiType, Event, Param, Tuple
from tracelake.domain.event_abi.type_names import AbiProblem, array, check_depth, elementary

MAX_TEXT = 10_000
_TOKEN = re.compile(r"\s*(?:([A-Za-z_$][A-Za-z0-9_$]*)|([0-9]+)|(.))", re.ASCII | re.DOTALL)
_WORD_START = re.compile(r"[A-Za-z_$]", re.ASCII)


def parse_signature(text: str) -> Event:
    """Raises ``AbiProblem`` with where in the text it is."""
    if len(text) > MAX_TEXT:
        raise AbiProblem(f"is longer than {MAX_TEXT} characters")
    return _Parser(text).event()


class _Parser:
    def __init__(self, text: str) -> None:
        stripped = text.rstrip()
        self._tokens = [
            (found.start(found.lastindex or 0), found[found.lastindex or 0])
            for found in _TOKEN.finditer(stripped)
        ]
        self._next = 0
        self._end = len(stripped)
        self._open = 0

    def event(self) -> Event:
        name = self._name("the name of an event")
        if name == "event" and self._peek() != "(":
            name = self._name("the name of an event")
        self._expect("(")
        params = self._params(in_event=True)
        anonymous = self._take("anonymous")
        self._take(";")
        if (rest := self._peek()) is not None:
            raise self._wrong(f"{rest!r} after the end of the event")
        return Event(name, params, anonymous)

    def _params(self, *, in_event: bool) -> tuple[Param, ...]:
        """Behind the opening parenthesis, up to and with the closing one."""
        found: list[Param] = []
        if in_event and self._take(")"):
            return ()
        while True:
            found.append(self._param(in_event))
            if self._take(")"):
                return tuple(found)
            self._expect(",")

    def _param(self, in_event: bool) -> Param:
        kind = self._type()
        indexed = False
        if self._peek() == "indexed":
            if not in_event:
                raise self._wrong("only a parameter of the event itself can be indexed")
            self._next += 1
            indexed = True
        following = self._peek()
        name = self._name("a name") if following is not None and _WORD_START.match(following) else ""
        return Param(name, kind, indexed)

    def _type(self) -> AbiType:
        at = self._at()
        word = None if self._peek() == "(" else self._name("a type")
        try:
            in_fields = word is None or (word == "tuple" and self._peek() == "(")
            kind: AbiType = self._tuple() if in_fields else elementary(word or "")
            while self._take("["):
                length = None
                if (number := self._peek()) is not None and number.isdigit():
                    length = int(number[:20])
                    self._next += 1
                self._expect("]")
                kind = array(kind, length)
            return kind
        except AbiProblem as problem:
            raise problem if "position" in str(problem) else self._wrong(str(problem), at) from None

    def _tuple(self) -> Tuple:
        self._expect("(")
        self._open += 1
        if self._open > 100:
            raise self._wrong("too many parentheses in each other")
        made = Tuple(self._params(in_event=False))
        self._open -= 1
        check_depth(made)
        return made

    def _name(self, what: str) -> str:
        token = self._peek()
        if token is None or not _WORD_START.match(token):
            raise self._wrong(f"expected {what}, found {'the end' if token is None else repr(token)}")
        self._next += 1
        return token

    def _expect(self, token: str) -> None:
        if not self._take(token):
            found = self._peek()
            raise self._wrong(f"expected {token!r}, found {'the end' if found is None else repr(found)}")

    def _take(self, token: str) -> bool:
        if self._peek() != token:
            return False
        self._next += 1
        return True

    def _peek(self) -> str | None:
        return self._tokens[self._next][1] if self._next < len(self._tokens) else None

    def _at(self) -> int:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else self._end

    def _wrong(self, what: str, at: int | None = None) -> AbiProblem:
        return AbiProblem(f"position {(self._at() if at is None else at) + 1}: {what}")
