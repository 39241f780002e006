"""Event ABIs as a DAG author writes them: parsed and checked without a chain, so that a deploy can refuse them.

An event is written as in Solidity, ``event Transfer(address indexed from, address indexed to, uint256 value)``,
with structs as tuples: ``(uint256 amount, address token)[] swaps``. The word ``event`` and names may be left out.
Entries of a contract's JSON ABI, as compilers write them, are accepted too.

A type of the contract ABI specification is one of four: a ``Word`` fills exactly 32 bytes, ``Bytes`` has any
length, ``Array`` and ``Tuple`` consist of others. ``canonical`` is the spelling that signatures are hashed in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

AbiType: TypeAlias = "Word | Bytes | Array | Tuple"
#: Maximum nesting of arrays and tuples: far beyond any contract, and far below what exhausts a stack.
MAX_DEPTH = 16
MAX_LENGTH = 2**32
_NUMBER = re.compile(r"(uint|int)([1-9][0-9]{0,2})?", re.ASCII)
_FIXED = re.compile(r"(ufixed|fixed)(?:([1-9][0-9]{0,2})x(0|[1-9][0-9]?))?", re.ASCII)
_BYTES = re.compile(r"bytes([1-9][0-9]?)", re.ASCII)
MAX_TEXT = 10_000
_TOKEN = re.compile(r"\s*(?:([A-Za-z_$][A-Za-z0-9_$]*)|([0-9]+)|(.))", re.ASCII | re.DOTALL)
_WORD_START = re.compile(r"[A-Za-z_$]", re.ASCII)
_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*", re.ASCII)
_SUFFIX = re.compile(r"\[([0-9]{0,20})\]", re.ASCII)
_SPELT = re.compile(r"([a-z0-9]+)((?:\[[0-9]{0,20}\])*)", re.ASCII | re.IGNORECASE)


class WordKind(StrEnum):
    UINT = "uint"
    INT = "int"
    ADDRESS = "address"
    BOOL = "bool"
    BYTES = "bytes"
    FIXED = "fixed"
    UFIXED = "ufixed"
    FUNCTION = "function"


@dataclass(frozen=True)
class Word:
    """``size`` in bits for numbers, in bytes for ``bytesN``; ``places`` after the point for fixed numbers."""

    kind: WordKind
    size: int = 0
    places: int = 0
    dynamic = False
    words = 1
    depth = 0

    @cached_property
    def canonical(self) -> str:
        match self.kind:
            case WordKind.ADDRESS | WordKind.BOOL | WordKind.FUNCTION:
                return self.kind.value
            case WordKind.FIXED | WordKind.UFIXED:
                return f"{self.kind.value}{self.size}x{self.places}"
            case _:
                return f"{self.kind.value}{self.size}"


@dataclass(frozen=True)
class Bytes:
    """``bytes``, or ``string`` when they are text."""

    text: bool
    dynamic = True
    words = 1
    depth = 0

    @property
    def canonical(self) -> str:
        return "string" if self.text else "bytes"


@dataclass(frozen=True)
class Array:
    """A ``length`` of None is given by the data. ``words``: its number of words in the head of an encoding."""

    item: AbiType
    length: int | None

    @cached_property
    def dynamic(self) -> bool:
        return self.length is None or self.item.dynamic

    @cached_property
    def words(self) -> int:
        return 1 if self.dynamic or self.length is None else self.length * self.item.words

    @cached_property
    def depth(self) -> int:
        return self.item.depth + 1

    @property
    def canonical(self) -> str:
        return f"{self.item.canonical}[{'' if self.length is None else self.length}]"


@dataclass(frozen=True)
class Tuple:
    fields: tuple[Param, ...]

    @cached_property
    def dynamic(self) -> bool:
        return any(field.type.dynamic for field in self.fields)

    @cached_property
    def words(self) -> int:
        return 1 if self.dynamic else sum(field.type.words for field in self.fields)

    @cached_property
    def depth(self) -> int:
        return max(field.type.depth for field in self.fields) + 1

    @property
    def canonical(self) -> str:
        return f"({','.join(field.type.canonical for field in self.fields)})"


@dataclass(frozen=True)
class Param:
    """A parameter of an event, or a field of a tuple; the name may be empty."""

    name: str
    type: AbiType
    indexed: bool = False

    @property
    def hashed(self) -> bool:
        """Whether the log has only its hash: it is indexed, and longer than one word."""
        return self.indexed and not isinstance(self.type, Word)


SYSTEM_ADDRESS = b"\xff" * 19 + b"\xfe"
"""The address that logs of the protocol itself come from (EIP-7708); no contract can have it."""


class Emitter(Enum):
    """Who may have made an event's logs. Since Amsterdam the protocol logs transfers of ether in the form of an
    ERC-20's, so tokens and ether differ by nothing else."""

    ANY = "any"
    CONTRACT = "contract"
    PROTOCOL = "protocol"


@dataclass(frozen=True)
class AbiEvent:
    name: str
    params: tuple[Param, ...]
    anonymous: bool = False
    emitter: Emitter = Emitter.ANY

    @property
    def signature(self) -> str:
        return f"{self.name}({','.join(param.type.canonical for param in self.params)})"

    @property
    def written(self) -> str:
        """The event with its names, as ``parse_signature`` reads it."""
        params = ", ".join(
            " ".join(word for word in (_written(p.type), "indexed" if p.indexed else "", p.name) if word)
            for p in self.params
        )
        return f"event {self.name}({params}){' anonymous' if self.anonymous else ''}"

    @property
    def indexed(self) -> tuple[Param, ...]:
        return tuple(param for param in self.params if param.indexed)

    @property
    def unindexed(self) -> tuple[Param, ...]:
        return tuple(param for param in self.params if not param.indexed)

    @property
    def topics(self) -> int:
        """The number of topics in a log of this event."""
        return len(self.indexed) + (0 if self.anonymous else 1)

    @property
    def layout(self) -> tuple[str, bool, tuple[bool, ...]]:
        """Distinguishes the event from others of its emitter, whatever the parameters are called."""
        return self.signature, self.anonymous, tuple(param.indexed for param in self.params)

    @property
    def matches(self) -> tuple[tuple[object, ...], ...]:
        """What no other event of the same table may have: the layout, by each emitter."""
        emitters = (Emitter.CONTRACT, Emitter.PROTOCOL) if self.emitter is Emitter.ANY else (self.emitter,)
        return tuple((*self.layout, emitter) for emitter in emitters)


def _written(kind: AbiType) -> str:
    match kind:
        case Array(item, length):
            return f"{_written(item)}[{'' if length is None else length}]"
        case Tuple(fields):
            return f"({', '.join(f'{_written(each.type)} {each.name}'.rstrip() for each in fields)})"
        case _:
            return kind.canonical


_SIMPLE: dict[str, Word | Bytes] = {
    "address": Word(WordKind.ADDRESS),
    "bool": Word(WordKind.BOOL),
    "function": Word(WordKind.FUNCTION),
    "bytes": Bytes(text=False),
    "string": Bytes(text=True),
}


class AbiProblem(ValueError):
    """An ABI is invalid; the message is for its author."""


@lru_cache(maxsize=1024)
def elementary(name: str) -> Word | Bytes:
    """One object per type: thousands of events that share theirs take a fraction of the memory, also when sent."""
    if (simple := _SIMPLE.get(name)) is not None:
        return simple
    if found := _NUMBER.fullmatch(name):
        bits = int(found[2] or 256)
        if bits % 8 == 0 and bits <= 256:
            return Word(WordKind(found[1]), bits)
    elif found := _FIXED.fullmatch(name):
        bits, places = int(found[2] or 128), int(found[3] or 18)
        if bits % 8 == 0 and bits <= 256 and places <= 80:
            return Word(WordKind(found[1]), bits, places)
    elif found := _BYTES.fullmatch(name):
        size = int(found[1])
        if size <= 32:
            return Word(WordKind.BYTES, size)
    raise AbiProblem(f"{name[:100]!r} is not an ABI type{_hint(name)}")


def array(item: Word | Bytes | Array | Tuple, length: int | None) -> Array:
    if length is not None and not 1 <= length <= MAX_LENGTH:
        raise AbiProblem(f"an array has 1 to {MAX_LENGTH} items, not {length}")
    made = Array(item, length)
    check_depth(made)
    return made


def check_depth(made: Array | Tuple) -> None:
    if made.depth > MAX_DEPTH:
        raise AbiProblem(f"arrays and tuples are more than {MAX_DEPTH} deep in each other")


def _hint(name: str) -> str:
    if name == "byte":
        return "; write bytes1"
    if name[:1].isupper():
        return ": write a struct as its fields in parentheses, an enum as uint8, a contract as address"
    return ""


# A config is read again by every check and every task.
@lru_cache(maxsize=8192)
def parse_signature(text: str) -> AbiEvent:
    """Raises ``AbiProblem`` with the place in the text."""
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

    def event(self) -> AbiEvent:
        name = self._name("the name of an event")
        if name == "event" and self._peek() != "(":
            name = self._name("the name of an event")
        self._expect("(")
        params = self._params(in_event=True)
        anonymous = self._take("anonymous")
        self._take(";")
        if (rest := self._peek()) is not None:
            raise self._wrong(f"{rest!r} after the end of the event")
        return AbiEvent(name, params, anonymous)

    def _params(self, *, in_event: bool) -> tuple[Param, ...]:
        """Reads from after the opening parenthesis to the closing one."""
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
                    # MAX_LENGTH has 10 digits; a longer text needn't be converted to be refused.
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
        # Checked while reading, since the depth of a type is known only after it was read.
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


def parse_entry(entry: Mapping[str, Any]) -> AbiEvent:
    """Ignores keys that compilers add, such as ``internalType``."""
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise AbiProblem("name: must be the name of the event")
    anonymous = entry.get("anonymous", False)
    if not isinstance(anonymous, bool):
        raise AbiProblem("anonymous: must be true or false")
    return AbiEvent(name, _params(entry.get("inputs"), "inputs", in_event=True), anonymous)


def _params(given: object, where: str, *, in_event: bool, depth: int = 0) -> tuple[Param, ...]:
    if not isinstance(given, list) or not (given or in_event):
        raise AbiProblem(f"{where}: must be a list of parameters")
    if depth > MAX_DEPTH:
        raise AbiProblem(f"{where}: too deep")
    return tuple(_param(each, f"{where}[{index}]", in_event, depth) for index, each in enumerate(given))


def _param(given: object, where: str, in_event: bool, depth: int) -> Param:
    if not isinstance(given, Mapping):
        raise AbiProblem(f"{where}: must be an object with name and type")
    name, indexed = given.get("name", ""), given.get("indexed", False)
    if not isinstance(name, str) or not (name == "" or _NAME.fullmatch(name)):
        raise AbiProblem(f"{where}.name: must be an identifier")
    if not isinstance(indexed, bool) or (indexed and not in_event):
        raise AbiProblem(f"{where}.indexed: must be true or false, and only a parameter of the event has it")
    return Param(name, _type(given, where, depth), indexed)


def _type(given: Mapping[str, Any], where: str, depth: int) -> AbiType:
    spelt = given.get("type")
    found = _SPELT.fullmatch(spelt) if isinstance(spelt, str) and len(spelt) <= 200 else None
    if found is None:
        raise AbiProblem(f"{where}.type: must be the name of a type")
    kind: AbiType
    try:
        if found[1] == "tuple":
            parts = _params(given.get("components"), f"{where}.components", in_event=False, depth=depth + 1)
            kind = Tuple(parts)
            check_depth(kind)
        else:
            kind = elementary(found[1])
        for length in _SUFFIX.findall(found[2]):
            kind = array(kind, int(length) if length else None)
    except AbiProblem as problem:
        raise problem if str(problem).startswith(where) else AbiProblem(f"{where}.type: {problem}") from None
    return kind
