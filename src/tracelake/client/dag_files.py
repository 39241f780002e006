"""Files that a DAG names (``FileSetting``): read where it is deployed from, and written in place of their paths.

    events: { abi: ./abis/Token.json }   →   events: { abi: ["event Transfer(address indexed from, …)", …] }

So the Dispatcher gets one text that is whole: a deployed version doesn't change when a file does, and can be shown,
compared and deployed again by itself. Paths are relative to the DAG's folder and can't leave it. A file that
can't be read is a problem of the DAG, with the line and the field that name it.

The text is changed at these places only, within their lines. The Dispatcher's problems are about the changed text;
``ResolvedDag.in_file`` gives their places in the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tracelake.domain.errors import DagProblem, InvalidDag

if TYPE_CHECKING:
    from tracelake.domain.dag import problems as tree
    from tracelake.domain.operators.spec import FileSetting

MAX_FILE = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TextEdit:
    """``before`` characters at a place became ``after`` characters."""

    line: int
    column: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class _Content:
    """The text that replaces the path of a field."""

    field: str
    text: str


@dataclass(frozen=True, slots=True)
class ResolvedDag:
    """``edits`` in the order of the text."""

    yaml: bytes
    edits: tuple[TextEdit, ...] = ()

    def in_file(self, problem: DagProblem) -> DagProblem:
        """The problem with its place in the file, before the text was changed."""
        column = problem.column
        for edit in self.edits:
            if edit.line == problem.line and column > edit.column:
                # Within what was written, the place is that of the path.
                column = max(edit.column, column + edit.before - edit.after)
        return replace(problem, column=column)


def resolve_files(yaml: bytes, folder: Path) -> ResolvedDag:
    """Raises ``InvalidDag`` for files that can't be read. A text that isn't a DAG is left to the Dispatcher, which
    reports it."""
    from tracelake.domain.dag.problems import format_path
    from tracelake.domain.dag.yaml_tree import read_tree

    if not _may_name_files(yaml):
        return ResolvedDag(yaml)
    try:
        root, _ = read_tree(yaml)
    except InvalidDag:
        return ResolvedDag(yaml)
    contents: dict[tuple[int, int], _Content] = {}
    problems: list[DagProblem] = []
    for path, node, setting in _named_files(root):
        field = format_path(path)
        try:
            # On one line: places below it stay as they are. JSON is YAML.
            contents[node.mark] = _Content(field, json.dumps(setting.read(_read(folder, str(node.value)))))
        except ValueError as error:
            problems.append(DagProblem(*node.mark, field, f"{node.value}: {error}"))
    text, edits = _write_out(yaml, contents, problems)
    if problems:
        raise InvalidDag(problems)
    return ResolvedDag(text.encode(), edits)


def _may_name_files(yaml: bytes) -> bool:
    """Most DAGs name none, and aren't parsed here."""
    from tracelake.domain.operators.catalog import CATALOG

    return any(each.key.encode() in yaml for spec in CATALOG.values() for each in spec.files)


def _named_files(root: tree.Node) -> Iterator[tuple[tree.Path, tree.Scalar, FileSetting]]:
    from tracelake.domain.dag.problems import Map, Scalar, Seq
    from tracelake.domain.operators.catalog import CATALOG

    jobs = root.entries.get("jobs") if isinstance(root, Map) else None
    for number, job in enumerate(jobs.items if isinstance(jobs, Seq) else ()):
        operator = job.entries.get("operator") if isinstance(job, Map) else None
        config = job.entries.get("config") if isinstance(job, Map) else None
        spec = CATALOG.get(str(operator.value)) if isinstance(operator, Scalar) else None
        if spec is None or not isinstance(config, Map):
            continue
        for setting in spec.files:
            given = config.entries.get(setting.setting)
            path: tree.Path = ("jobs", number, "config", setting.setting)
            entries = enumerate(given.items) if isinstance(given, Seq) else [(None, given)]
            for place, entry in entries:
                named = entry.entries.get(setting.key) if isinstance(entry, Map) else None
                if isinstance(named, Scalar) and isinstance(named.value, str):
                    yield (*path, *(() if place is None else (place,)), setting.key), named, setting


def _read(folder: Path, name: str) -> bytes:
    try:
        file = (folder / name).resolve(strict=True)
        if Path(name).is_absolute() or not file.is_relative_to(folder.resolve()):
            raise ValueError("must be a file in the DAG's folder")
        with file.open("rb") as content:
            read = content.read(MAX_FILE + 1)
    # A loop of symbolic links is a RuntimeError.
    except (OSError, RuntimeError) as error:
        raise ValueError(f"can't be read: {getattr(error, 'strerror', None) or error}") from None
    if len(read) > MAX_FILE:
        raise ValueError(f"is larger than {MAX_FILE} bytes")
    return read


def _write_out(
    yaml: bytes, contents: dict[tuple[int, int], _Content], problems: list[DagProblem]
) -> tuple[str, tuple[TextEdit, ...]]:
    """Replace the scalars at these places, each by its text."""
    from yaml import CSafeLoader, SafeLoader, ScalarEvent, __with_libyaml__, parse

    text = yaml.decode().removeprefix("\ufeff")
    written, end = [], 0
    edits: list[TextEdit] = []
    for event in parse(text, Loader=CSafeLoader if __with_libyaml__ else SafeLoader):
        start, stop = event.start_mark, event.end_mark
        place = (start.line + 1, start.column + 1)
        if not isinstance(event, ScalarEvent) or (new := contents.get(place)) is None:
            continue
        # A text of several lines would move those below it, and an anchor would be written over.
        if stop.line != start.line or event.anchor is not None:
            problems.append(DagProblem(*place, new.field, "must be the path of a file, on one line"))
            continue
        written += [text[end : start.index], new.text]
        end = stop.index
        edits.append(TextEdit(*place, stop.index - start.index, len(new.text)))
    return "".join([*written, text[end:]]), tuple(edits)
