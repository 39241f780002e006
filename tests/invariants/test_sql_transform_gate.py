"""SQL from a DAG: what the gate accepts is what Spark runs, and that reads the attempt's views and nothing else.

Judged by Spark alone, from its own plans of both texts: the one that the DAG brought and the one that would run.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.errors import ParseException, PySparkException

from tests.support.spark import SharedSpark
from tests.support.spark_texts import check_select, hostile, mixture, ordinary
from tracelake.domain.errors import Invalid
from tracelake.domain.spark_select.pieces import render
from tracelake.domain.spark_select.queries import read_select
from tracelake.operators.sql_transform.select_check import (
    checked_frame,
    judge_analyzed,
    judge_parsed,
    unknown_calls,
)
from tracelake.worker.spark.session import begin, open_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = int(os.environ.get("TRACELAKE_SQL_FUZZ_EXAMPLES", "0"))
RELATIONS = ["logs", "scope_blocks"]
#: Nodes and expressions that do something else than compute rows from rows.
OUTSIDE = re.compile(
    r"Script|Command|Insert|Create|TableValuedFunction|DataSource|UDF|Udf|Lateral|Pivot|Hint|Sample|Parameter|"
    r"Stream|Variable|TimeTravel|Identifier|RelationV2|LogicalRelation|\bRelation\b"
)
#: Refused by the reader, and to Spark other ways to write a plain SELECT, or nothing that it could plan.
PLAIN_TO_SPARK = (
    "select '${env:PATH}'",
    "select timestamp '12:00:00'",
    "select cast('12:00:00'",
    "select * from values (timestamp",
    "select * from identifier('logs')",
    "table logs",
    "from logs |> select",
    "from logs select",
    "select 1 /* /* */",
    "select 1 --\\\n",
    "select abs(expr =>",
    "merge into",
    "update logs",
)
IDS = re.compile(r"#\d+L?")


class Judge:
    """A session with everything in reach, that says how Spark reads a text."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self.canary = folder / "canary"
        self.secret = folder / "secret.txt"
        self.secret.write_text("secret\n")
        self.counts: Counter[str] = Counter()
        rows = {"block_number": [1, 2], "address": ["a", "b"], "value": [10, 20]}
        self.given = folder / "logs.parquet"
        pq.write_table(pa.table(rows), self.given)
        spark.read.parquet(f"file://{self.given}").createOrReplaceTempView("logs")
        spark.range(3).toDF("block_number").createOrReplaceTempView("scope_blocks")
        for setting, value in (("variable.substitute", "false"), ("debug.maxToStringFields", "100000")):
            spark.conf.set(f"spark.sql.{setting}", value)

    def parsed(self, text: str) -> str:
        """Spark's plan of a text before it looks anything up, without what differs from one time to the next. There
        is none of a text whose constants fail."""
        shown = self.explained(text)
        plan = shown.partition("\n== Analyzed Logical Plan ==")[0] if shown.startswith("== Parsed") else ""
        return IDS.sub("#", plan)

    def explained(self, text: str) -> str:
        return "\n".join(row[0] for row in self.spark.sql(f"EXPLAIN EXTENDED {text}").collect())

    def examine(self, text: str) -> None:
        """Raises AssertionError when something accepted isn't what it seems, or isn't harmless."""
        try:
            query = read_select(text, RELATIONS)
        except Invalid:
            self.counts["refused"] += 1
            return
        self.counts["accepted"] += 1
        try:
            self.same(text, render(query))
            frame = checked_frame(self.spark, query, RELATIONS)
        except (Invalid, PySparkException):
            self.counts["not planned"] += 1
            return
        self.counts["planned"] += 1
        assert set(frame.inputFiles()) <= {f"file://{self.given}"}, text

    def same(self, text: str, written: str) -> None:
        runs = self.parsed(written)
        assert not OUTSIDE.search(runs), (text, runs)
        try:
            meant = self.parsed(text.strip().removesuffix(";"))
        except ParseException:
            self.counts["not Spark's"] += 1
            return
        assert meant.lower() == runs.lower(), (text, written)


@pytest.fixture(scope="module")
def judge(shared_spark: SharedSpark, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    work = begin(open_session(shared_spark.target), str(uuid4()), 1, 1)
    yield Judge(work.session, tmp_path_factory.mktemp("gate"))
    work.end()


def test_an_ordinary_select_is_planned_and_means_what_it_meant(judge: Judge) -> None:
    judge.counts.clear()
    for text in ordinary():
        judge.examine(text)
    assert judge.counts == {"accepted": len(ordinary()), "planned": len(ordinary())}


def test_nothing_hostile_gets_past_the_reader(judge: Judge) -> None:
    for text in hostile(str(judge.canary), str(judge.secret)):
        with pytest.raises(Invalid, match=r"^sql ") as refused:
            check_select(text, RELATIONS)
        assert refused.value.reason == "InvalidSql"
        # At deployment the inputs have no names yet; whatever doesn't depend on them is refused there.
        if "not an input" not in refused.value.message:
            with pytest.raises(Invalid):
                read_select(text, None)


def test_nor_past_the_judgement_of_spark_s_plan(judge: Judge) -> None:
    """Without the reader's help: texts go to Spark as they are, and the plan alone must give them away."""
    got_past = []
    for text in hostile(str(judge.canary), str(judge.secret)):
        try:
            shown = judge.explained(text)
        except PySparkException:
            continue
        if not shown.startswith("== Parsed"):
            # There is no plan, but what Spark says against the text.
            continue
        parsed, _, analyzed = shown.partition("\n== Analyzed Logical Plan ==\n")
        lines = parsed.split("\n")[1:-1]
        if unknown_calls(lines) or text.startswith(PLAIN_TO_SPARK):
            continue
        try:
            judge_parsed(lines)
            judge_analyzed(analyzed.partition("\n\n== Optimized")[0].split("\n"), RELATIONS)
        except Invalid:
            continue
        got_past.append(text)
    assert got_past == []
    assert not judge.canary.exists()


@settings(max_examples=EXAMPLES or 150, derandomize=not EXAMPLES)
@given(seed=st.integers(0, 2**48), kinds=st.sampled_from(["ordinary", "both"]))
def test_whatever_is_accepted_is_read_by_spark_as_it_was_judged(judge: Judge, seed: int, kinds: str) -> None:
    texts = ordinary() + (hostile(str(judge.canary), str(judge.secret)) if kinds == "both" else [])
    judge.examine(mixture(Random(seed), texts))
    assert not judge.canary.exists()


@pytest.mark.parametrize(
    "value",
    [
        "cast(concat('to', 'day') as date)",
        "cast('no' || 'w' as timestamp)",
        "to_date(lower(concat('TO', 'DAY')))",
        "extract(day from decode(unhex('746f646179'), 'utf-8'))",
        "timestamp '2020-01-01' > '12:00:00'",
        "to_timestamp(concat('12', ':00'))",
        "try_cast(address as timestamp)",
        "hour(address)",
        "timestamp_seconds(value) > address",
        "address between timestamp '2020-01-01' and timestamp '2021-01-01'",
    ],
)
def test_no_query_finds_out_what_day_it_is(judge: Judge, value: str) -> None:
    query = read_select(" ".join(("select", value, "from logs")), RELATIONS)

    with pytest.raises(Invalid, match=r"current (?:time|day)"):
        checked_frame(judge.spark, query, RELATIONS)
    assert not judge.spark.conf.get("spark.sql.optimizer.excludedRules", None)


def test_strings_come_out_as_they_were_written_whatever_the_session_was_set_to(judge: Judge) -> None:
    written = [
        "${env:PATH}",
        "${spark.app.name}",
        "a\nb\t\0",
        'it\'s \\ "quoted" `so`',
        "Transfer(address)",
        "é😀 %_",
    ]
    for setting in ("variable.substitute", "runSQLOnFiles", "ansi.doubleQuotedIdentifiers"):
        judge.spark.conf.set(f"spark.sql.{setting}", "true")
    texts = [value.replace("\\", "\\\\").replace("'", "''") for value in written]
    query = read_select("select " + ", ".join(f"'{text}' as c{n}" for n, text in enumerate(texts)), RELATIONS)

    [row] = checked_frame(judge.spark, query, RELATIONS).collect()

    assert list(row) == written
