"""Hostile and broken files: refused with a line, never an accident."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tracelake.domain.dag import yaml_tree
from tracelake.domain.dag.checks import Installation
from tracelake.domain.dag.entries import JOB_FIELDS, PUBLISH_FIELDS
from tracelake.domain.dag.parse import TOP_FIELDS, parse_dag
from tracelake.domain.dag.yaml_tree import MAX_BYTES
from tracelake.domain.errors import DagProblem, InvalidDag
from tracelake.domain.runtimes import RuntimeTraits

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The machine may be busy; how long an example takes proves nothing."""

INSTALLATION = Installation(runtimes={"ecs_python": RuntimeTraits(untrusted_ok=True)})

BASE = """\
name: dag
jobs:
  - name: src
    activation: source
    runtime: ecs_python
    operator: own
    source: {kind: always_on}
    outputs: 1
    config:
"""


def problems(text: str | bytes) -> tuple[DagProblem, ...]:
    with pytest.raises(InvalidDag) as invalid:
        parse_dag(text, INSTALLATION)
    return invalid.value.problems


def _bomb() -> str:
    rows = ["      a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"      a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    return BASE + "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "is empty"),
        ("# only a comment\n", 1, "is empty"),
        ("---\n", 2, "must be a map"),
        ("just text", 1, "not a string"),
        ("- a\n- b\n", 1, "not a list"),
        ("\n\n42\n", 3, "not a number"),
        ("name: a\n---\nname: b\n", 2, "more than one document"),
        ("name: a\n\tjobs: []\n", 2, "is not valid YAML"),
        ("name: [a\n", 2, "is not valid YAML"),
        ("name: 'a\n", 2, "is not valid YAML"),
        ("name: a\nname: b: c\n", 2, "is not valid YAML"),
        ("name: *nowhere\n", 1, "*nowhere, which is not defined above"),
        ("a: &a [*a]\n", 1, "not defined above"),
        ("? [a]\n: b\n", 1, "keys must be strings"),
        ("a: &a x\n*a : y\n", 2, "alias as a key"),
        ("name: !!python/object:os.system x\n", 1, "tags are not supported"),
        ("name: a\njobs: !!set {}\n", 2, "tags are not supported"),
        ("name: a\njobs: \x07\n", 2, "U+0007"),
        ("name: a\njobs: \0\n", 2, "U+0000"),
        ("name: \ud800\n", 1, "U+D800"),
        (b"name: a\njobs: \xff\n", 2, "is not UTF-8"),
        ("[" * 100_000, 1, "nested more than 32 levels"),
        ("a:\n" + "".join(" " * i + "- \n" for i in range(1, 60)), 33, "nested more than 32 levels"),
        ("#" * (MAX_BYTES + 1), 1, "is larger than"),
        ("é" * (MAX_BYTES // 2 + 1), 1, "is larger than"),
        ("a: [" + "1," * 200_000 + "]", 1, "more than 100000 values"),
        (_bomb(), 14, "aliases unfolded"),
    ],
)
def test_a_file_that_cannot_be_read_says_where_and_why(text: str | bytes, line: int, message: str) -> None:
    found = problems(text)
    assert [(problem.line, problem.field) for problem in found] == [(line, "$")]
    assert message in found[0].message


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        ("x: 1\n      x: 2", "x", "is given twice, first on line 10"),
        ("y: 1\n      1: 2", "['1']", "keys must be strings"),
        ("y: 1\n      true: 2", "true", "keys must be strings"),
        ("y: 1\n      ~: 2", "['~']", "keys must be strings"),
        ("y: &y {}\n      <<: *y", "['<<']", "merge keys are not supported"),
        ("y: 1\n      x: .nan", "x", "finite"),
        ("y: 1\n      x: -.inf", "x", "finite"),
        ("y: 1\n      x: 1e999", "x", "too large"),
        ("y: 1\n      x: 9223372036854775808", "x", "beyond 64 bits"),
        ("y: 1\n      x: -9223372036854775809", "x", "beyond 64 bits"),
        (f"y: 1\n      x: {'9' * 10_000}", "x", "beyond 64 bits"),
        ("y: 1\n      x: 0xFFFFFFFFFFFFFFFF", "x", "beyond 64 bits"),
        ('y: 1\n      x: "a\\0b"', "x", "NUL"),
        ('y: 1\n      x: [1, {z: "\\0"}]', "x[1].z", "NUL"),
    ],
)
def test_a_value_that_json_or_postgres_could_not_hold_is_refused(
    config: str, field: str, message: str
) -> None:
    found = problems(BASE + f"      {config}\n")
    path = f"jobs[0].config{field}" if field.startswith("[") else f"jobs[0].config.{field}"
    assert [(problem.line, problem.field) for problem in found] == [(11, path)], found
    assert message in found[0].message


@pytest.mark.parametrize(
    ("text", "place", "field"),
    [
        ("name: dag\nname: b\njobs: []\n", (2, 1), "name"),
        (BASE + "      y: 1\n      x: .nan\n", (11, 10), "jobs[0].config.x"),
        (BASE + "      y: {é: 1, x: .inf}\n", (10, 20), "jobs[0].config.y.x"),
        (BASE + "      y: [1, .inf]\n", (10, 14), "jobs[0].config.y[1]"),
        (BASE.replace("    operator: own\n", "") + "      y: 1\n", (3, 5), "jobs[0].operator"),
        (BASE.replace("    outputs: 1\n", "    outputs: x\n") + "      y: 1\n", (8, 5), "jobs[0].outputs"),
        ("name: a\njobs: [}\n", (2, 8), "$"),
        (b"name: \xc3\xa9\xff", (1, 8), "$"),
        ("name: a\njobs: \x01", (2, 7), "$"),
    ],
)
@pytest.mark.parametrize("loader", [yaml.CSafeLoader, yaml.SafeLoader])
def test_a_problem_has_its_line_and_its_column(
    monkeypatch: pytest.MonkeyPatch, loader: object, text: str | bytes, place: tuple[int, int], field: str
) -> None:
    monkeypatch.setattr(yaml_tree, "_LOADER", loader)
    assert (*place, field) in [(found.line, found.column, found.field) for found in problems(text)]


def test_the_loader_without_libyaml_is_held_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_tree, "_LOADER", yaml.SafeLoader)
    half = problems(BASE + '      x: "\\uD800"\n')
    assert [(problem.line, problem.field) for problem in half] == [(10, "jobs[0].config.x")]
    assert "surrogate" in half[0].message
    assert "aliases unfolded" in problems(_bomb())[0].message
    assert "nested more than" in problems("[" * 100_000)[0].message
    assert problems("name: a\n\tjobs: []\n")[0].line == 2


def test_a_key_given_twice_is_reported_beside_other_problems() -> None:
    found = problems("name: a\nname: b\njobs: []\n")
    assert [(problem.line, problem.field) for problem in found] == [(2, "name"), (3, "jobs")]


def test_quoted_numbers_and_booleans_are_strings() -> None:
    dag = parse_dag(BASE + "      x: '9223372036854775808'\n      y: \"true\"\n", INSTALLATION)
    assert dag.jobs[0].config == {"x": "9223372036854775808", "y": "true"}


def test_thousands_of_problems_are_cut_to_a_readable_number() -> None:
    found = problems("name: a\njobs:\n" + "  - {}\n" * 900)
    assert len(found) == 200


_words = st.sampled_from(
    [
        *sorted(JOB_FIELDS | TOP_FIELDS | PUBLISH_FIELDS),
        "from",
        "job",
        "output",
        "dataset",
        "where",
        "trigger",
        "kind",
        "manual",
        "reactive",
        "ecs_python",
        "noop",
        "columns",
        "unique",
        "-",
        ":",
        "?",
        "&",
        "*",
        "!",
        "|",
        ">",
        "%",
        "@",
        "`",
        ",",
        "[",
        "]",
        "{",
        "}",
        "#",
        "'",
        '"',
        "---",
        "...",
        "<<",
        "~",
        "null",
        "true",
        ".nan",
        "1",
        "-1",
        "1e9",
        "0x1",
        "10m",
    ]
)
_gaps = st.sampled_from([" ", "\n", "\n  ", "\n    ", "\n  - ", ": ", ", ", "", "\t", "\r\n"])


@unhurried
@given(st.lists(st.tuples(_words, _gaps), max_size=40).map(lambda parts: "".join(map("".join, parts))))
def test_arbitrary_yaml_is_parsed_or_refused(text: str) -> None:
    _parse_or_refuse(text)


@unhurried
@given(st.text(max_size=80) | st.binary(max_size=80))
def test_arbitrary_text_and_bytes_are_parsed_or_refused(text: str | bytes) -> None:
    _parse_or_refuse(text)


_scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | _words
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(_words | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=20,
)
_jobs = st.fixed_dictionaries({}, optional=dict.fromkeys(sorted(JOB_FIELDS), _values))


@unhurried
@given(
    st.fixed_dictionaries(
        {"name": st.just("dag") | _values, "jobs": st.lists(_jobs | _values, max_size=3) | _values},
        optional={"publish": _values, "defaults": _jobs | _values},
    )
)
def test_arbitrary_shapes_are_parsed_or_refused(data: object) -> None:
    _parse_or_refuse(json.dumps(data))


def _parse_or_refuse(text: str | bytes) -> None:
    lines = len((text if isinstance(text, bytes) else text.encode("utf-8", "replace")).splitlines()) + 2
    for problem in _problems_if_any(text):
        assert 1 <= problem.line <= lines
        assert problem.column >= 1
        assert problem.field
        assert problem.message


def _problems_if_any(text: str | bytes) -> tuple[DagProblem, ...]:
    try:
        parse_dag(text, INSTALLATION)
    except InvalidDag as invalid:
        return invalid.problems
    return ()
