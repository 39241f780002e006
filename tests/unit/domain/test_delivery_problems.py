"""Every kind of problem in a ``deliver:`` entry, found with its line and column, and nothing else with it."""

from __future__ import annotations

import pytest

from tracelake.domain.dag.checks import Installation
from tracelake.domain.dag.deliveries import refused_by
from tracelake.domain.dag.model import BufferedDataset, Column, ColumnType, PublishedOutput
from tracelake.domain.dag.parse import parse_dag
from tracelake.domain.errors import DagProblem, InvalidDag
from tracelake.domain.runtimes import RuntimeTraits

INSTALLATION = Installation(
    runtimes={
        "dispatcher": RuntimeTraits(untrusted_ok=False, in_process=True),
        "ecs_python": RuntimeTraits(untrusted_ok=True),
    },
    published_elsewhere={"prices": "market"},
)
HEAD = """\
name: dag
defaults: {runtime: ecs_python}
jobs:
  - name: src
    activation: source
    source: {kind: manual}
  - name: mid
    activation: reactive
    operator: own
    inputs: [{from: {job: src, output: 0}}]
    outputs: [{name: out, storage: parquet}]
publish:
  files: {from: {job: mid, output: 0}}
  alerts:
    storage: postgres
    write_mode: buffered
    schema:
      columns: {key: text, severity: text, score: double, revision: bigint, payload: jsonb}
      unique: [key]
deliver:
"""
ENTRY = """\
  - name: whales
    from: {dataset: alerts}
    where: "severity = 'critical'"
    to: {webhook: {url_secret: HOOK, signing_secret: HOOK_KEY}}
    when: finalized
    template: "{{severity}}: {{payload.msg}}"
    key: severity
"""
FIRST = HEAD.count("\n") + 1
"""The line of the entry's name; those of its other fields follow it in the order above."""
NAME, FROM, WHERE, TO, WHEN, TEMPLATE, KEY = range(FIRST, FIRST + 7)


def problems(deliver: str) -> tuple[DagProblem, ...]:
    with pytest.raises(InvalidDag) as invalid:
        parse_dag(HEAD + deliver, INSTALLATION)
    return invalid.value.problems


def edited(old: str, new: str) -> str:
    assert ENTRY.count(old) == 1
    return ENTRY.replace(old, new)


def test_the_entry_is_right_and_so_is_one_for_each_receiver() -> None:
    assert len(parse_dag(HEAD + ENTRY, INSTALLATION).deliver) == 1
    for to in (
        "{slack: {url_secret: CHAT}}",
        "{email: {smtp_secret: MAIL, from: a@b.example, to: c@d.example}}",
        "{email: {smtp_secret: MAIL, from: a@b.example, to: [c@d.example, e@f.example]}}",
    ):
        entry = edited("{webhook: {url_secret: HOOK, signing_secret: HOOK_KEY}}", to)
        assert len(parse_dag(HEAD + entry, INSTALLATION).deliver) == 1


@pytest.mark.parametrize(
    "where",
    ["score > '1.5'", "score = 'NaN'", "revision = '7'", "revision <> 7", "payload = '1'", "key = '7'"],
)
def test_a_quoted_literal_that_the_column_can_be_compared_with_is_fine(where: str) -> None:
    assert len(parse_dag(HEAD + edited("severity = 'critical'", where), INSTALLATION).deliver) == 1


WEBHOOK = "{webhook: {url_secret: HOOK, signing_secret: HOOK_KEY}}"
EMAIL = "{email: {smtp_secret: MAIL, from: a@b.example, to: [c@d.example]}}"
MANY = ", ".join(f"c{number}@d.example" for number in range(51))
MISSING = [
    ("  - name: whales\n    from", "  - from", NAME, 5, "name", "is required"),
    ("    from: {dataset: alerts}\n", "", NAME, 5, "from", "is required"),
    (f"    to: {WEBHOOK}\n", "", NAME, 5, "to", "is required"),
]
BAD = [
    ("name: whales", "name: Wha les", NAME, 5, "name", "does not match"),
    ("name: whales", "name: 7", NAME, 5, "name", "must be a string"),
    ("key: severity", "keys: severity", KEY, 5, "keys", "did you mean key?"),
    ("from: {dataset: alerts}", "from: alerts", FROM, 5, "from", "must be a map"),
    ("dataset: alerts", "dataset: 'a b'", FROM, 12, "from.dataset", "does not match"),
    ("dataset: alerts", "dataset: alert", FROM, 12, "from.dataset", "did you mean alerts?"),
    ("dataset: alerts", "dataset: mid", FROM, 12, "from.dataset", "no published dataset 'mid'"),
    ("dataset: alerts", "dataset: files", FROM, 12, "from.dataset", "files is an output of mid"),
    ("severity = 'critical'", "sevrity = 'a'", WHERE, 5, "where", "did you mean severity?"),
    ("severity = 'critical'", "severity = kex", WHERE, 5, "where", "no column kex"),
    (
        "severity = 'critical'",
        "score = 'high'",
        WHERE,
        5,
        "where",
        "score is double, and 'high' can't be read",
    ),
    ("severity = 'critical'", "revision in (1, '1.5')", WHERE, 5, "where", "'1.5' can't be read as a bigint"),
    ("severity = 'critical'", "severity = 3", WHERE, 5, "where", "severity is text, and 3 can't be read"),
    ("severity = 'critical'", "severity = 'a' or score = true", WHERE, 5, "where", "TRUE can't be read"),
    ("severity = 'critical'", "severity =", WHERE, 5, "where", "not a SQL predicate"),
    ("severity = 'critical'", "severity = 'a'; SELECT 1", WHERE, 5, "where", "must not contain ';'"),
    ("severity = 'critical'", "lower(severity) = 'a'", WHERE, 5, "where", "LOWER is not allowed"),
    ("finalized", "later", WHEN, 5, "when", "must be one of instant, finalized"),
    ("finalized", "[instant]", WHEN, 5, "when", "must be one of instant, finalized"),
    ("{{severity}}:", "{{sevrity}}:", TEMPLATE, 5, "template", "no column sevrity; did you mean severity?"),
    ("{{severity}}:", "{{severity.x}}:", TEMPLATE, 5, "template", "severity is text: only JSON has keys"),
    ("{{severity}}:", "{{score.0}} {{score.1}}:", TEMPLATE, 5, "template", "score is double: only JSON"),
    ("{{severity}}:", "{{severity:", TEMPLATE, 5, "template", "at character 1"),
    ("{{payload.msg}}", "{{payload.msg", TEMPLATE, 5, "template", "at character 15: {{ has no }}"),
    ("{{severity}}:", "{{severity | upper}}:", TEMPLATE, 5, "template", "is not a column"),
    ("{{severity}}:", "{{severity.__class__()}}:", TEMPLATE, 5, "template", "is not a column"),
    ('"{{severity}}: {{payload.msg}}"', "[a]", TEMPLATE, 5, "template", "must be a string"),
    ("key: severity", "key: sevrity", KEY, 5, "key", "did you mean severity?"),
    ("key: severity", "key: payload", KEY, 5, "key", "payload is jsonb"),
    ("key: severity", "key: score", KEY, 5, "key", "score is double"),
    ("key: severity", "key: revision", KEY, 5, "key", "revision differs with every change"),
    ("key: severity", "key: [severity]", KEY, 5, "key", "must be a string"),
]
#: What stands behind ``to``.
BAD_RECEIVERS = [
    ("{}", 5, "to", "needs one of webhook, slack, email"),
    ("{webhook: }", 5, "to", "needs one of webhook, slack, email"),
    ("https://example.org", 5, "to", "must be a map"),
    ("{webhook: {url_secret: A}, slack: {url_secret: B}}", 5, "to", "not several"),
    ("{pager: {url_secret: A}}", 10, "to.pager", "unknown field"),
    ("{webhook: {}}", 10, "to.webhook.url_secret", "the name of a secret"),
    ("{webhook: {url_secret: https://example.org/x}}", 20, "to.webhook.url_secret", "does not match"),
    ("{webhook: {url_secret: 1HOOK}}", 20, "to.webhook.url_secret", "does not match"),
    ("{webhook: {url_secret: ''}}", 20, "to.webhook.url_secret", ""),
    ("{webhook: {url_secret: A, signing_secret: B-C}}", 35, "to.webhook.signing_secret", "does not match"),
    ("{slack: {url_secret: A, signing_secret: B}}", 33, "to.slack.signing_secret", "unknown field"),
    (EMAIL.replace("smtp_secret: MAIL, ", ""), 10, "to.email.smtp_secret", "the name of a secret"),
    (EMAIL.replace("from: a@b.example, ", ""), 10, "to.email.from", "is required"),
    (EMAIL.replace("a@b.example", "''"), 37, "to.email.from", ""),
    (EMAIL.replace("a@b.example", "Ops <a@b.example>"), 37, "to.email.from", "must be one address"),
    (EMAIL.replace("a@b.example", r'"a@b.example\r\nBcc: x@y.example"'), 37, "to.email.from", "one address"),
    (EMAIL.replace(", to: [c@d.example]", ""), 10, "to.email.to", "is required"),
    (EMAIL.replace("[c@d.example]", "[]"), 56, "to.email.to", "is required"),
    (
        EMAIL.replace("[c@d.example]", "[c@d.example, nobody]"),
        56,
        "to.email.to",
        "'nobody' is not an address",
    ),
    (EMAIL.replace("[c@d.example]", r'["c@d.example\nx"]'), 56, "to.email.to", "is not an address"),
    (EMAIL.replace("[c@d.example]", r'"c@d.example, x@y.example"'), 56, "to.email.to", "is not an address"),
    (EMAIL.replace("c@d.example", MANY), 56, "to.email.to", "more than 50 addresses"),
]


@pytest.mark.parametrize(
    ("old", "new", "line", "column", "field", "message"),
    [*MISSING, *BAD, *((WEBHOOK, to, TO, *rest) for to, *rest in BAD_RECEIVERS)],
)
def test_a_bad_entry_is_reported_where_it_is_wrong(
    old: str, new: str, line: int, column: int, field: str, message: str
) -> None:
    found = problems(edited(old, new))
    assert [(each.line, each.column, each.field) for each in found] == [
        (line, column, f"deliver[0].{field}")
    ], found
    assert message in found[0].message


def test_two_deliveries_of_one_name_and_too_many_are_refused() -> None:
    [found] = problems(ENTRY + ENTRY)
    assert (found.line, found.column, found.field) == (FIRST + 7, 5, "deliver[1].name")
    assert f"the delivery on line {NAME} too" in found.message
    [many] = problems("".join(edited("whales", f"whales{number}") for number in range(201)))
    assert (many.field, many.message) == ("deliver", "more than 200 deliveries")


@pytest.mark.parametrize("deliver", ["  whales: {}\n", "  {}\n"])
def test_deliveries_are_a_list(deliver: str) -> None:
    [found] = problems(deliver)
    assert (found.line, found.field) == (FIRST - 1, "deliver")
    assert "must be a list" in found.message


def test_a_dataset_of_another_dag_is_judged_by_its_columns_when_the_deploy_is_planned() -> None:
    entry = edited("dataset: alerts", "dataset: prices")
    [spec] = parse_dag(HEAD + entry, INSTALLATION).deliver
    columns = (Column("pair", ColumnType.TEXT),)
    prices = BufferedDataset(name="prices", columns=columns, unique=("pair",))
    found = list(refused_by({"prices": prices}, spec))
    assert [path for path, _ in found] == [("where",), ("template",), ("template",), ("key",)]
    assert all("prices has no column" in message for _, message in found)
    assert [path for path, _ in refused_by({}, spec)] == [("from", "dataset")]
    output = PublishedOutput(name="prices", job="load", output=0)
    [(path, message)] = refused_by({"prices": output}, spec)
    assert (path, "prices is an output of load" in message) == (("from", "dataset"), True)
