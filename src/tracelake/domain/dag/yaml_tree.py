"""Reads YAML text into a tree with lines and columns, built from parser events so that nothing recurses.

Scalars follow YAML 1.2's core schema, not 1.1's: only ``true`` and ``false`` are booleans (``on``,
``yes`` and ``no`` are strings), ``010`` is ten, a date is a string. Numbers must fit JSON and 64 bits.
Tags and merge keys are refused; aliases count with all their nodes against the size limit, so a small file can't
expand into a large one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import isfinite
from typing import Protocol

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from tracelake.domain.dag.problems import START, FoundProblem, Map, Mark, Node, Path, Scalar, Seq, fatal

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 32
MAX_NODES = 100_000
MAX_INT = 2**63 - 1

_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_INT = re.compile(r"[-+]?[0-9]+\Z|0o[0-7]+\Z|0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z")
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"true", "True", "TRUE"})
_FALSE = frozenset({"false", "False", "FALSE"})
# The parser in C, where PyYAML was built with it, is many times faster.
_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


def read_tree(source: str | bytes) -> tuple[Node, list[FoundProblem]]:
    """The file's one document and its problems. Raises at once if the text isn't YAML."""
    text = _readable(source)
    builder = _Builder()
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = _mark(error.problem_mark or error.context_mark)
        raise fatal(mark, f"is not valid YAML: {error.problem}") from None
    except yaml.YAMLError:
        raise fatal(START, "is not valid YAML") from None
    if builder.root is None:
        raise fatal(START, "is empty")
    return builder.root, builder.problems


def _readable(source: str | bytes) -> str:
    size = len(source) if isinstance(source, bytes) else len(source.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise fatal(START, f"is larger than {MAX_BYTES} bytes")
    if isinstance(source, bytes):
        try:
            text = source.decode("utf-8")
        except UnicodeDecodeError as error:
            # The bytes before the error are valid, so they give its line and column.
            raise fatal(_end_of(error.object[: error.start].decode("utf-8")), "is not UTF-8") from None
    else:
        text = source
    # Editors on Windows begin a file with a byte order mark, which isn't part of the text.
    text = text.removeprefix("\ufeff")
    if bad := _FORBIDDEN.search(text):
        what = f"contains the character U+{ord(bad.group()):04X}, which YAML does not allow"
        raise fatal(_end_of(text[: bad.start()]), what)
    return text


def _end_of(text: str) -> Mark:
    """The place of the character after this beginning of a file."""
    return Mark(text.count("\n") + 1, len(text) - text.rfind("\n"))


class _Place(Protocol):
    """PyYAML's marks, of either loader, counted from 0."""

    line: int
    column: int


def _mark(found: _Place | None) -> Mark:
    return Mark(found.line + 1, found.column + 1) if found else START


@dataclass(slots=True)
class _Frame:
    """A collection that is still open."""

    mark: Mark
    path: Path
    anchor: str | None
    nodes_before: int
    is_map: bool
    items: list[Node] = field(default_factory=list)
    entries: dict[str, Node] = field(default_factory=dict)
    key_marks: dict[str, Mark] = field(default_factory=dict)
    key: str | None = None
    key_is_duplicate: bool = False

    def child_path(self) -> Path:
        return (*self.path, len(self.items) if not self.is_map else self.key or "")

    def node(self) -> Node:
        if self.is_map:
            return Map(self.mark, self.entries, self.key_marks)
        return Seq(self.mark, tuple(self.items))


class _Builder:
    def __init__(self) -> None:
        self.root: Node | None = None
        self.problems: list[FoundProblem] = []
        self._open: list[_Frame] = []
        self._anchors: dict[str, tuple[Node, int]] = {}
        self._nodes = 0

    def take(self, event: Event) -> None:
        mark = _mark(event.start_mark)
        match event:
            case DocumentStartEvent() if self.root is not None:
                raise fatal(mark, "contains more than one document")
            case ScalarEvent():
                self._scalar(event, mark)
            case AliasEvent():
                self._alias(event.anchor or "", mark)
            case MappingStartEvent() | SequenceStartEvent():
                self._start(event, mark)
            case MappingEndEvent() | SequenceEndEvent():
                frame = self._open.pop()
                self._remember(frame.anchor, frame.node(), frame.nodes_before)
                self._attach(frame.node())
            case _:
                return

    def _start(self, event: MappingStartEvent | SequenceStartEvent, mark: Mark) -> None:
        if self._expects_key():
            raise fatal(mark, "uses a list or map as a key; keys must be strings")
        if len(self._open) >= MAX_DEPTH:
            raise fatal(mark, f"is nested more than {MAX_DEPTH} levels deep")
        self._refuse_tag(event.tag, mark)
        path = self._open[-1].child_path() if self._open else ()
        is_map = isinstance(event, MappingStartEvent)
        self._open.append(_Frame(mark, path, event.anchor, self._nodes, is_map))
        self._count(1, mark)

    def _scalar(self, event: ScalarEvent, mark: Mark) -> None:
        self._refuse_tag(event.tag, mark)
        before = self._nodes
        self._count(1, mark)
        is_plain = event.style is None or event.style == ""
        if self._expects_key():
            self._take_key(event.value, is_plain, mark)
            self._remember(event.anchor, Scalar(mark, event.value), before)
            return
        path = self._open[-1].child_path() if self._open else ()
        node = Scalar(mark, self._value(event.value, is_plain, mark, path))
        self._remember(event.anchor, node, before)
        self._attach(node)

    def _alias(self, anchor: str, mark: Mark) -> None:
        if anchor not in self._anchors:
            raise fatal(mark, f"refers to *{anchor}, which is not defined above")
        if self._expects_key():
            raise fatal(mark, "uses an alias as a key; keys must be strings")
        node, size = self._anchors[anchor]
        # With everything it stands for: nested aliases would unfold a small file into billions of nodes.
        self._count(size, mark)
        self._attach(node)

    def _take_key(self, text: str, is_plain: bool, mark: Mark) -> None:
        frame = self._open[-1]
        path = (*frame.path, text)
        if is_plain and text == "<<":
            self._problem(mark, path, "merge keys are not supported")
        elif is_plain and not isinstance(self._value(text, True, mark, path), str):
            self._problem(mark, path, "keys must be strings; put it in quotes")
        elif _UNSTORABLE.search(text):
            self._problem(mark, frame.path, "a key contains a NUL or half a surrogate pair")
        frame.key_is_duplicate = text in frame.entries
        if frame.key_is_duplicate:
            self._problem(mark, path, f"is given twice, first on line {frame.key_marks[text].line}")
        else:
            frame.key_marks[text] = mark
        frame.key = text

    def _value(self, text: str, is_plain: bool, mark: Mark, path: Path) -> str | int | float | bool | None:
        if not is_plain:
            if _UNSTORABLE.search(text):
                self._problem(mark, path, "contains a NUL or half a surrogate pair")
                return ""
            return text
        if text in _NULL:
            return None
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        if _INT.match(text):
            return self._integer(text, mark, path)
        if _NOT_FINITE.match(text):
            self._problem(mark, path, "must be a finite number")
            return 0
        if _FLOAT.match(text):
            number = float(text)
            if not isfinite(number):
                self._problem(mark, path, "is too large for a number; put it in quotes")
                return 0
            return number
        return text

    def _integer(self, text: str, mark: Mark, path: Path) -> int:
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        # A long number is refused unread: the time of int() grows with the square of its digits.
        number = int(text if base == 10 else text[2:], base) if len(text) <= 64 else MAX_INT + 1
        if -MAX_INT - 1 <= number <= MAX_INT:
            return number
        self._problem(mark, path, "is an integer beyond 64 bits; put it in quotes")
        return 0

    def _attach(self, node: Node) -> None:
        if not self._open:
            self.root = node
            return
        frame = self._open[-1]
        if not frame.is_map:
            frame.items.append(node)
            return
        if not frame.key_is_duplicate:
            frame.entries[frame.key or ""] = node
        # Cleared also for a duplicate, or the next key would be taken for a value.
        frame.key = None

    def _expects_key(self) -> bool:
        return bool(self._open) and self._open[-1].is_map and self._open[-1].key is None

    def _remember(self, anchor: str | None, node: Node, nodes_before: int) -> None:
        if anchor is not None:
            self._anchors[anchor] = (node, self._nodes - nodes_before)

    def _count(self, nodes: int, mark: Mark) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise fatal(mark, f"has more than {MAX_NODES} values, aliases unfolded")

    def _refuse_tag(self, tag: str | None, mark: Mark) -> None:
        if tag is not None:
            raise fatal(mark, f"uses the tag {tag}; tags are not supported")

    def _problem(self, mark: Mark, path: Path, message: str) -> None:
        self.problems.append(FoundProblem(mark, path, message))
