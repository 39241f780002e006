"""``deliver`` in a DAG file: its entries, and what each must fit.

An entry names a buffered dataset of any DAG; its columns decide what ``where``, ``template`` and ``key`` may name.
Those of this file are checked while it is parsed, those of other DAGs when the deploy is planned, both by
``delivery_problems``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from tracelake.domain.buffers import NOT_IN_KEYS, REVISION, literal_problems
from tracelake.domain.dag.entries import DATASET_NAME, PublishDraft, read_where
from tracelake.domain.dag.fields import Fields, did_you_mean
from tracelake.domain.dag.model import (
    BufferedDataset,
    ColumnType,
    DeliverySpec,
    DeliveryTarget,
    DeliveryTime,
    EmailTarget,
    PublishedOutput,
    SlackTarget,
    WebhookTarget,
)
from tracelake.domain.dag.problems import Path, Problems, Seq
from tracelake.domain.errors import Invalid
from tracelake.domain.template import parse_template
from tracelake.domain.where import And, Compare, CompareColumns, InList, IsNull, Or, Predicate

DELIVERY_NAME = re.compile(r"^[a-z][a-z0-9_-]{0,118}\Z")
SECRET_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
MAX_DELIVERIES = 200
MAX_RECIPIENTS = 50
DELIVERY_FIELDS = frozenset({"name", "from", "where", "to", "when", "template", "key"})
TARGETS = {
    "webhook": frozenset({"url_secret", "signing_secret"}),
    "slack": frozenset({"url_secret"}),
    "email": frozenset({"smtp_secret", "from", "to"}),
}
#: A mailbox and nothing else: no names, comments, lists or line breaks, which is how headers are injected.
_MAILBOX = re.compile(
    r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?\Z"
)


@dataclass(frozen=True, slots=True)
class DeliveryDraft:
    path: Path
    spec: DeliverySpec


def read_deliveries(top: Fields) -> list[DeliveryDraft]:
    drafts: list[DeliveryDraft] = []
    for entry in top.items("deliver", DELIVERY_FIELDS):
        if len(drafts) == MAX_DELIVERIES:
            top.wrong("deliver", f"more than {MAX_DELIVERIES} deliveries")
            break
        if (spec := _read(entry)) is not None:
            drafts.append(DeliveryDraft(entry.path, spec))
    return drafts


def _read(entry: Fields) -> DeliverySpec | None:
    name = entry.string("name", pattern=DELIVERY_NAME)
    dataset = _read_from(entry)
    target = _read_target(entry)
    where = read_where(entry)
    template = entry.string("template", required=False)
    if template is not None:
        try:
            parse_template(template)
        except Invalid as refused:
            entry.wrong("template", refused.message)
    when = entry.choice("when", DeliveryTime) or DeliveryTime.INSTANT
    key = entry.string("key", required=False)
    if name is None or dataset is None or target is None:
        return None
    return DeliverySpec(
        name=name, dataset=dataset, to=target, where=where, when=when, template=template, key=key
    )


def _read_from(entry: Fields) -> str | None:
    origin = entry.nested("from", {"dataset"})
    if origin is None:
        entry.wrong("from", "is required: {dataset: a buffered dataset}")
        return None
    return origin.string("dataset", pattern=DATASET_NAME)


def _read_target(entry: Fields) -> DeliveryTarget | None:
    kinds = entry.nested("to", TARGETS.keys())
    if kinds is None:
        entry.wrong("to", "is required: {webhook: …}, {slack: …} or {email: …}")
        return None
    given = [kind for kind in TARGETS if kinds.has(kind)]
    if len(given) != 1:
        entry.wrong("to", f"needs one of {', '.join(TARGETS)}" + (", not several" if given else ""))
        return None
    fields = kinds.nested(given[0], TARGETS[given[0]])
    if fields is None:
        return None
    match given[0]:
        case "webhook":
            signing = fields.string("signing_secret", required=False, pattern=SECRET_NAME)
            return WebhookTarget(_secret(fields, "url_secret"), signing)
        case "slack":
            return SlackTarget(_secret(fields, "url_secret"))
        case _:
            return _read_email(fields)


def _secret(fields: Fields, name: str) -> str:
    if not fields.has(name):
        fields.wrong(name, "is required: the name of a secret")
    return fields.string(name, pattern=SECRET_NAME) or ""


def _read_email(fields: Fields) -> EmailTarget:
    sender = fields.string("from")
    recipients = fields.strings("to")
    if sender is not None and not _MAILBOX.match(sender):
        fields.wrong("from", "must be one address like alerts@example.org")
    given = fields.node("to")
    if given is None or (isinstance(given, Seq) and not given.items):
        fields.wrong("to", "is required: an address, or a list of them")
    if len(recipients) > MAX_RECIPIENTS:
        fields.wrong("to", f"more than {MAX_RECIPIENTS} addresses")
    for recipient in recipients:
        if not _MAILBOX.match(recipient):
            fields.wrong("to", f"{recipient[:80]!r} is not an address like ops@example.org")
    return EmailTarget(_secret(fields, "smtp_secret"), sender or "", recipients)


def check_deliveries(
    drafts: Sequence[DeliveryDraft],
    publish: Sequence[PublishDraft],
    elsewhere: Collection[str],
    problems: Problems,
) -> None:
    """``elsewhere`` are the names that other DAGs publish."""
    own = {draft.entry.name: draft.entry for draft in publish}
    lines: dict[str, int] = {}
    for draft in drafts:
        spec = draft.spec
        if spec.name in lines:
            problems.add_unless_known(
                (*draft.path, "name"),
                f"{spec.name!r} is the name of the delivery on line {lines[spec.name]} too",
            )
        lines.setdefault(spec.name, problems.mark(draft.path).line)
        if spec.dataset in own:
            for field, message in delivery_problems(spec, own[spec.dataset]):
                problems.add_unless_known((*draft.path, *field), message)
        elif spec.dataset not in elsewhere:
            known = {*own, *elsewhere}
            problems.add_unless_known(
                (*draft.path, "from", "dataset"),
                f"there is no published dataset {spec.dataset!r}{did_you_mean(spec.dataset, known)}",
            )


def delivery_problems(
    spec: DeliverySpec, entry: PublishedOutput | BufferedDataset
) -> Iterator[tuple[Path, str]]:
    """Why the delivery can't send rows of this dataset; each with its place in the delivery's entry."""
    if not isinstance(entry, BufferedDataset):
        yield (
            ("from", "dataset"),
            f"{entry.name} is an output of {entry.job}: a delivery sends rows of a buffered dataset, whose records "
            "have a key",
        )
        return
    # A schema that couldn't be read is reported at its own place.
    if not entry.columns:
        return
    types = {column.name: column.type for column in entry.columns}
    columns = set(types)
    if spec.where is not None:
        for column in sorted(predicate_columns(spec.where.tree) - columns):
            yield ("where",), f"{entry.name} has no column {column}{did_you_mean(column, columns)}"
        for message in literal_problems(spec.where.tree, types):
            yield ("where",), message
    if spec.template is not None:
        try:
            named = parse_template(spec.template).placeholders
        except Invalid:
            # Reported when it was read.
            named = ()
        for column in dict.fromkeys(each.column for each in named):
            if column not in columns:
                yield ("template",), f"{entry.name} has no column {column}{did_you_mean(column, columns)}"
        for column in dict.fromkeys(each.column for each in named if each.below):
            if column in columns and types[column] is not ColumnType.JSONB:
                yield ("template",), f"{column} is {types[column]}: only JSON has keys below it"
    if spec.key is not None and spec.key not in columns:
        yield ("key",), f"{entry.name} has no column {spec.key}{did_you_mean(spec.key, columns)}"
    elif spec.key is not None and types[spec.key] in NOT_IN_KEYS:
        yield ("key",), f"{spec.key} is {types[spec.key]}: order needs a column of plain values"
    elif spec.key == REVISION:
        yield ("key",), f"{REVISION} differs with every change of a record, so it orders nothing"


def predicate_columns(tree: Predicate) -> set[str]:
    match tree:
        case Compare(column=column) | InList(column=column) | IsNull(column=column):
            return {column}
        case CompareColumns(column=column, other=other):
            return {column, other}
        case And(terms) | Or(terms):
            return set().union(*(predicate_columns(term) for term in terms))
        case _:
            assert_never(tree)


def refused_by(
    world: Mapping[str, PublishedOutput | BufferedDataset], spec: DeliverySpec
) -> Iterator[tuple[Path, str]]:
    """The same against all published datasets of an installation."""
    entry = world.get(spec.dataset)
    if entry is None:
        yield ("from", "dataset"), f"there is no published dataset {spec.dataset!r}"
    else:
        yield from delivery_problems(spec, entry)
