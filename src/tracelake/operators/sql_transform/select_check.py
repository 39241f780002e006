"""``checked_frame``: runs a query only after Spark's own plan of it has been judged by a list of allowed parts.

The text was written by us from a tree that was judged already (``domain.spark_select``). This is the second check,
by the engine that runs it: Spark shows the plan that it parsed and the one that it resolved, and every node of
both must be of a listed kind, every function on the list of functions, every table below one of the attempt's
views.

Spark shows plans as text, with a query's names and strings in them. These can't hide anything: what they add can
only be refused. For that a node must begin a line and every line must be a node, so Spark gets strings without
line breaks here, and each heading must stand once, where Spark puts it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tracelake.domain.spark_select.functions import ALLOWED
from tracelake.domain.spark_select.literals import is_clock
from tracelake.domain.spark_select.pieces import (
    Piece,
    computed,
    joined,
    render,
    render_on_one_line,
    render_skeleton,
    render_without_limits,
    texts,
)
from tracelake.domain.spark_select.tokens import refused
from tracelake.operators.sql_transform.instant_check import closes, judge_instants, split

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SETTINGS = {
    # The text is taken literally: no values of variables, no files by their paths, no patterns for names.
    "spark.sql.variable.substitute": "false",
    "spark.sql.runSQLOnFiles": "false",
    "spark.sql.parser.quotedRegexColumnNames": "false",
    # Strings and names are read as they are written here.
    "spark.sql.ansi.doubleQuotedIdentifiers": "false",
    "spark.sql.legacy.consecutiveStringLiterals.enabled": "false",
    "spark.sql.legacy.ctePrecedencePolicy": "CORRECTED",
    "spark.sql.legacy.setopsPrecedence.enabled": "false",
    # A plan is shown as a whole.
    "spark.sql.debug.maxToStringFields": "1000000",
    "spark.sql.maxPlanStringLength": str(2**31 - 16),
}
_UNREAD_ESCAPES = "spark.sql.parser.escapedStringLiterals"
_EXCLUDED = "spark.sql.optimizer.excludedRules"
# These rules compute constants, and the optimized plan would no longer show the casts.
_COMPUTE = ("ConstantFolding", "ConvertToLocalRelation")
_RULES = "org.apache.spark.sql.catalyst.optimizer."

_HEADINGS = (
    "== Parsed Logical Plan ==",
    "== Analyzed Logical Plan ==",
    "== Optimized Logical Plan ==",
    "== Physical Plan ==",
)
_PARSED_NODES = """
    Aggregate CTE Distinct Except Filter GlobalLimit Intersect Join LimitAll LocalLimit LocalRelation Offset
    OneRowRelation Project RepartitionByExpression Sort SubqueryAlias Union UnresolvedHaving UnresolvedInlineTable
    UnresolvedQualify UnresolvedRelation UnresolvedSubqueryColumnAliases WithWindowDefinition
"""
_ANALYZED_NODES = """
    Aggregate CTERelationDef CTERelationRef Distinct Except Expand Filter Generate GlobalLimit Intersect Join
    LocalLimit LocalRelation Offset OneRowRelation Project RepartitionByExpression Sort SubqueryAlias Union
    UnionLoop UnionLoopRef View Window WithCTE
"""
_CONSTANT_ROWS = frozenset({"LocalRelation", "OneRowRelation"})
_PARSED = frozenset(_PARSED_NODES.split())
_ANALYZED = frozenset(_ANALYZED_NODES.split())
# How Spark shows things that aren't calls: parts of windows, joins, groupings and lambdas.
_FORMS = """
    between cube currentrow$ groupingsets lambdafunction likeall likeany naturaljoin notlikeall notlikeany outer
    rollup specifiedwindowframe unboundedfollowing$ unboundedpreceding$ unresolvedalias unresolvedextractvalue
    unresolvedordinal unresolvedstarexcept unresolvedwindowexpression unspecifiedframe$ usingjoin vector
    windowspecdefinition windowspecreference
"""
_CALLS = ALLOWED | frozenset(_FORMS.split())
_GENERATORS = frozenset(
    {"explode", "inline", "json_tuple", "posexplode", "stack", "generatorouter"},
)
_NODE = re.compile(r"(?P<before>(?:[: ]  )*(?:[:+]- )?)'?(?P<node>\w+)(?P<rest>.*)")
_CALL = re.compile(r"([\w$]+)\(")
# As the reader writes them: the schema of its own making, and no options.
_SCHEMA = re.compile(r"(?<! ), (?:array|map|struct) <")
_TO_JSON = re.compile(r"\bto_json\(")
_RELATION = re.compile(r" \[[^,]*\], \[\], false")
_VIEW = re.compile(r" \(`(?P<name>(?:[^`]|``)+)`, \[")
# Spark reads a name without a column, such as ``user``, as one of these.
_CHANGING = re.compile(
    r"\b(current_(?:user|date|time|timestamp)|session_user|localtimestamp|now)\((?:\)|Some)"
)
_GENERATE = re.compile(r" (\w+)\(")


def checked_frame(spark: SparkSession, query: Piece, relations: Iterable[str]) -> DataFrame:
    """The query as a frame, once Spark's plan of it has been judged. Raises Spark's error for an invalid one."""
    # First: these settings decide how Spark reads the text that is judged.
    _set_all(spark)
    parsed, analyzed, optimized = _sections(_explained(spark, render_on_one_line(query)))
    if unknown := sorted(unknown_calls(parsed)):
        # Perhaps only a string that looks like a call: then it isn't there without what the query's author chose.
        # Its names mean nothing to Spark, which then shows the parsed plan and what it missed.
        lines = _text_of(spark, f"EXPLAIN EXTENDED {render_skeleton(query)}").split("\n")
        if _HEADINGS[1] not in lines or unknown_calls(lines[1 : lines.index(_HEADINGS[1])]):
            raise refused(f"must not call {unknown[0]}")
    judge_parsed(parsed)
    judge_analyzed(analyzed, relations)
    judge_instants([*analyzed[1:], *optimized], analyzed, lambda name: _types(spark, name))
    rows = {node for node, _, _ in _nodes(analyzed[1:])} & _CONSTANT_ROWS
    if rows or any(map(is_clock, texts(query))):
        # Spark may cast these within a function, and then shows the cast only in a plan that computes nothing.
        with _without_computing(spark):
            _, analyzed, optimized = _sections(_explained(spark, render_without_limits(query)))
        judge_instants(optimized, analyzed, lambda name: _types(spark, name))
    _judge_constants(spark, query)
    # Only now: until here Spark has planned the query, and computed nothing but its constants.
    return spark.sql(render(query))


def _types(spark: SparkSession, view: str) -> dict[str, str]:
    return {field.name: field.dataType.typeName() for field in spark.table(f"`{view}`").schema}


def _judge_constants(spark: SparkSession, query: Piece) -> None:
    """Spark takes some words for the current time wherever text that is constant becomes a date or a timestamp. The
    reader knows them where they are written; here they are looked for in what the query makes of constants."""
    made = computed(query)
    if not made:
        return
    for row in spark.sql(render(("SELECT", joined(made)))).collect():
        for text in _texts(tuple(row)):
            if is_clock(text):
                raise refused(
                    f"must not make the text {text.strip()!r} of constants, which Spark takes for the current time "
                    "wherever a date or a timestamp is expected"
                )


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list() | tuple():
            for each in value:
                yield from _texts(each)
        case dict():
            yield from _texts([*value.keys(), *value.values()])


def judge_parsed(lines: list[str]) -> None:
    for node, rest, _ in _nodes(lines):
        if node not in _PARSED or (node == "UnresolvedRelation" and not _RELATION.fullmatch(rest)):
            raise refused(f"must not contain what Spark reads as {node}")


def judge_analyzed(lines: list[str], relations: Iterable[str]) -> None:
    """The first line has the columns. The plan below a view was made by the attempt, and isn't judged."""
    known = {name.lower() for name in relations}
    below: int | None = None
    for node, rest, depth in _nodes(lines[1:]):
        if below is not None and depth > below:
            continue
        below = None
        if node not in _ANALYZED:
            raise refused(f"must not contain what Spark reads as {node}")
        if node == "View":
            view = _VIEW.match(rest)
            if view is None or view["name"].replace("``", "`").lower() not in known:
                raise refused("reads from something that is not an input")
            below = depth
        if node == "Generate":
            generator = _GENERATE.match(rest)
            if generator is None or generator[1].lower() not in _GENERATORS:
                raise refused("must not make rows in this way")
        if (changing := _CHANGING.search(rest)) is not None:
            raise refused(f"must not use {changing[1].upper()}, and there is no column of that name")
        if "variablereference(" in rest:
            raise refused("must not use variables")


def _nodes(lines: list[str]) -> Iterator[tuple[str, str, int]]:
    for line in lines:
        found = _NODE.fullmatch(line)
        if found is None:
            raise refused("has a plan that can't be read")
        yield found["node"], found["rest"], len(found["before"])


def unknown_calls(lines: list[str]) -> set[str]:
    """Calls of functions that aren't listed, or in another form than the reader writes them."""
    found: set[str] = set()
    for line in map(str.lower, lines):
        found.update(f"{call}()" for call in _CALL.findall(line) if call not in _CALLS)
        if line.count("from_json(") > len(_SCHEMA.findall(line)):
            found.add("from_json() with such a schema")
        for call in _TO_JSON.finditer(line):
            if len(split(line[call.end() : closes(line, call.end() - 1)])) > 1:
                found.add("to_json() with options")
    return found


def _sections(shown: str) -> tuple[list[str], list[str], list[str]]:
    """The parsed, the analyzed and the optimized plan, line by line."""
    lines = shown.split("\n")
    places = [place for place, line in enumerate(lines) if line in _HEADINGS]
    if tuple(lines[place] for place in places) != _HEADINGS or places[0] != 0:
        raise refused("has a plan that can't be read")
    if re.search(r"\.\.\. \d+ more (?:fields|characters)|\*\(redacted\)", shown):
        raise refused("has a plan that Spark doesn't show as a whole")
    parsed, analyzed = lines[1 : places[1]], lines[places[1] + 1 : places[2]]
    return (
        [line for line in parsed if line],
        [analyzed[0], *(line for line in analyzed[1:] if line)],
        [line for line in lines[places[2] + 1 : places[3]] if line],
    )


def _set_all(spark: SparkSession) -> None:
    _set(spark, SETTINGS)
    # Deprecated: Spark would write a line into its log each time that it is set.
    if _get(spark, _UNREAD_ESCAPES, "false") != "false":
        raise refused(
            f"can't be run on a Spark with {_UNREAD_ESCAPES}, where strings would have other values"
        )


@contextmanager
def _without_computing(spark: SparkSession) -> Iterator[None]:
    """Plans show their constants as they are written."""
    before = _get(spark, _EXCLUDED, "")
    _set(spark, {_EXCLUDED: ",".join([*filter(None, [before]), *(_RULES + rule for rule in _COMPUTE)])})
    try:
        yield
    finally:
        _set(spark, {_EXCLUDED: before})


def _get(spark: SparkSession, key: str, default: str) -> str:
    from pyspark.sql.connect.proto import ConfigRequest, KeyValue

    asked = ConfigRequest.GetWithDefault(pairs=[KeyValue(key=key, value=default)])
    [(_, found)] = spark.client.config(ConfigRequest.Operation(get_with_default=asked)).pairs
    return str(found or "")


def _set(spark: SparkSession, settings: dict[str, str]) -> None:
    """All of them in one call, which Spark's client has no public name for."""
    from pyspark.sql.connect.proto import ConfigRequest, KeyValue

    pairs = [KeyValue(key=key, value=value) for key, value in settings.items()]
    spark.client.config(ConfigRequest.Operation(set=ConfigRequest.Set(pairs=pairs)))


def _explained(spark: SparkSession, query: str) -> str:
    # Inside of these parentheses Spark accepts only a query, not a command, which would run here.
    frame: Any = spark.sql(" ".join(("SELECT * FROM (", query, ")")))
    return str(frame._explain_string(extended=True))


def _text_of(spark: SparkSession, command: str) -> str:
    [row] = spark.sql(command).collect()
    return str(row[0])
