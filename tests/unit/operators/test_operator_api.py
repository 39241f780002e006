"""Operators by name, and what a context lets them do; a stand-in plays the wrapper."""

import subprocess
import sys
import textwrap
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.operator_process import a_task, an_input, an_output
from tests.support.spark_texts import check_select
from tracelake.contracts.dispatcher_api import EventIn
from tracelake.contracts.operator_protocol import EmitEvents, SaveState
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.domain.spark_select.functions import ALLOWED
from tracelake.domain.spark_select.pieces import computed, render
from tracelake.domain.spark_select.queries import read_select
from tracelake.domain.where import Op, compare
from tracelake.domain.where_parse import parse_where
from tracelake.operators import Context, in_process, operator
from tracelake.operators.registry import BUILT_IN, Registry
from tracelake.operators.sql_transform.instant_check import judge_instants
from tracelake.operators.sql_transform.operator import read_config
from tracelake.tables.arrow import (
    MICROSECONDS,
    ConstantComparison,
    StoredColumn,
    align,
    decimals,
    where_expression,
)
from tracelake.tables.postgres_scan import reading_errors


class StandIn:
    canceled = False
    paused = False

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.reports: list[dict[str, Any]] = []
        self.waited: list[float] = []

    def call(self, action: Any) -> Any:
        self.calls.append(action)

    def report(self, fields: dict[str, Any]) -> None:
        self.reports.append(fields)

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.canceled = True

    def spark(self) -> Any:
        raise Invalid("NoSpark", "none here")


def context(**task: Any) -> tuple[Context, StandIn]:
    link = StandIn()
    return Context(a_task("mine", **task), link), link


def module(folder: Path, name: str, source: str) -> str:
    path = folder / f"{name}.py"
    if name != "json":
        sys.modules.pop(name, None)
    path.write_text(textwrap.dedent(source))
    return str(path)


MINE = """
    from tracelake.operators import operator
    @operator("{}")
    def function(ctx): ...
"""


def test_importing_the_operator_api_imports_neither_spark_nor_arrow() -> None:
    program = (
        "import sys, tracelake.worker.operator.main as m, tracelake.operators.in_process; print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    assert not {"pyspark", "pyarrow", "pandas", "sqlglot", "psycopg", "asyncpg"} & set(loaded.split())


def test_every_built_in_operator_is_what_it_says() -> None:
    registry = Registry.standard(installed=[])
    assert registry.names == sorted(BUILT_IN)
    for name in registry.names:
        assert callable(registry.get(name))


def test_an_operator_of_a_file_is_found_by_its_name(tmp_path: Path) -> None:
    registry = Registry.standard([module(tmp_path, "some_operators", MINE.format("mine"))], installed=[])
    assert registry.get("mine").__name__ == "function"


def test_an_operator_of_an_installed_package_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module(tmp_path, "some_package", "def plain(ctx): ...")
    monkeypatch.syspath_prepend(tmp_path)
    installed = [EntryPoint("theirs", "some_package:plain", "tracelake.operators")]
    assert Registry.standard(installed=installed).get("theirs").__name__ == "plain"


def test_a_broken_package_only_fails_those_who_ask_for_it() -> None:
    installed = [EntryPoint("theirs", "no_such_package:plain", "tracelake.operators")]
    registry = Registry.standard(installed=installed)
    assert registry.get("noop") is in_process.noop
    with pytest.raises(
        Invalid, match=r"operator 'theirs' of .* can't be loaded: ModuleNotFoundError"
    ) as refused:
        registry.get("theirs")
    assert refused.value.reason == "OperatorBroken"


def test_an_unknown_operator_is_refused_with_the_names_that_are_near() -> None:
    registry = Registry.standard(installed=[])
    with pytest.raises(Invalid, match="no operator 'sql_transfrom'; did you mean sql_transform") as refused:
        registry.get("sql_transfrom")
    assert refused.value.reason == "UnknownOperator"
    assert "tracelake worker --operators FILE" in refused.value.message
    with pytest.raises(Invalid, match=r"it has .*noop, "):
        registry.get("quite_different")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (MINE.format("noop"), "two operators are called 'noop': one of tracelake, one of .*broken_one.py"),
        (MINE.format("No Name"), "'No Name' is no name for an operator"),
        ("x = 1", "has no operator"),
        ("import no_such_module", "can't be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f(:", "can't be loaded: SyntaxError"),
        ("raise SystemExit(3)", "can't be loaded: SystemExit: 3"),
        (MINE.format("mine").replace("(ctx)", "()"), "must take one argument, the context"),
        (MINE.format("mine").replace("def", "async def"), "is async"),
        (MINE.format("mine").replace("...", "yield"), "is a generator"),
    ],
)
def test_a_module_that_is_no_good_is_refused_at_start(tmp_path: Path, source: str, why: str) -> None:
    with pytest.raises(Invalid, match=why):
        Registry.standard([module(tmp_path, "broken_one", source)], installed=[])


def test_a_missing_file_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="there is no file"):
        Registry.standard([str(tmp_path / "nothing.py")], installed=[])


def test_a_file_named_like_another_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="there is already a module 'json'; rename the file"):
        Registry.standard([module(tmp_path, "json", MINE.format("mine"))], installed=[])


def test_a_marked_function_stays_a_function() -> None:
    @operator("mine")
    def mine(ctx: Context) -> None:
        ctx.log.info("hello", who="you")

    ctx, _ = context()
    mine(ctx)


def test_what_an_output_without_storage_announces_is_implied() -> None:
    ctx, _ = context(inputs=[an_input(start=5, end=9)], outputs=[an_output(0), an_output(1, name="other")])
    ctx.outputs["other"].announce(cursor=7)
    outputs, events = ctx.finish()
    assert outputs == []
    assert [(event.start, event.end, event.cursor) for event in events] == [(5, 9, None), (None, None, 7)]


def test_a_cursor_that_has_not_moved_is_still_announced_and_one_before_the_start_is_not() -> None:
    ctx, _ = context(inputs=[an_input(after=4, upto=4)], outputs=[an_output()])
    assert [event.cursor for event in ctx.finish()[1]] == [4]
    assert list(ctx.blocks) == []
    ctx, _ = context(inputs=[an_input(after=-1, upto=-1)], outputs=[an_output()])
    assert ctx.finish() == ([], [])


@pytest.mark.parametrize("after", [0, 4])
def test_an_announcement_without_blocks_means_the_cursor_of_a_task_that_follows_one(after: int) -> None:
    ctx, _ = context(inputs=[an_input(after=after, upto=4)], outputs=[an_output()])
    ctx.outputs[0].announce()
    assert [(event.cursor, event.start) for event in ctx.finish()[1]] == [(4, None)]


def test_nothing_is_implied_for_an_output_that_was_spoken_of_already() -> None:
    ctx, link = context(inputs=[an_input(after=0, upto=4)], outputs=[an_output()])
    ctx.emit(ctx.outputs[0].event(cursor=3))
    assert ctx.finish() == ([], [])
    assert [type(call) for call in link.calls] == [EmitEvents]


def test_more_events_than_a_completion_holds_are_sent_before_it() -> None:
    ctx, link = context(outputs=[an_output()])
    for cursor in range(2500):
        ctx.outputs[0].announce(cursor=cursor)
    _, events = ctx.finish()
    sent = [event.cursor for call in link.calls for event in call.events] + [e.cursor for e in events]
    assert sent == list(range(2500))
    assert max(len(call.events) for call in link.calls) <= 1000 >= len(events)


def test_a_stored_output_that_was_not_written_is_the_operators_mistake() -> None:
    ctx, _ = context(inputs=[an_input(start=0, end=9)], outputs=[an_output(storage="parquet")])
    with pytest.raises(Invalid, match="output 'result' was not written"):
        ctx.finish()


def test_blocks_that_were_already_written_are_not_written_again() -> None:
    ctx, _ = context(inputs=[an_input(start=0, end=9)], outputs=[an_output(storage="parquet")])
    ctx.outputs[0].write_nothing(0, 4)
    with pytest.raises(Invalid, match="already been written for 0-4"):
        ctx.outputs[0].write_nothing(4, 9)
    ctx.outputs[0].write_nothing(5, 9)
    assert [(output.start, output.end, output.row_count) for output in ctx.finish()[0]] == [
        (0, 4, 0),
        (5, 9, 0),
    ]


@pytest.mark.parametrize("verb", ["write", "stage"])
def test_an_output_without_storage_takes_no_rows(verb: str) -> None:
    ctx, _ = context(outputs=[an_output()])
    with pytest.raises(Invalid, match=f"has storage none: no {verb}"):
        getattr(ctx.outputs[0], verb)(None)


def test_a_name_that_no_output_has_is_refused_with_those_there_are() -> None:
    ctx, _ = context(outputs=[an_output(0, name="logs"), an_output(1, name="blocks")])
    assert ctx.outputs["blocks"].index == 1
    with pytest.raises(Invalid, match="no output 'log'; it has logs, blocks"):
        _ = ctx.outputs["log"]
    with pytest.raises(Invalid, match="no output 2"):
        _ = ctx.outputs[2]


def test_progress_is_merged_bounded_and_its_last_word_always_sent() -> None:
    ctx, link = context()
    for done in range(1000):
        ctx.progress(done=done, total=1000, ratio=float("nan"), place=Path("x"))
    ctx.progress(message="m" * 10_000)
    ctx.finish()
    assert len(link.reports) < 1000
    assert link.reports[-1] == {
        "done": 999,
        "total": 1000,
        "ratio": "nan",
        "place": "x",
        "message": "m" * 500,
    }
    with pytest.raises(ValueError, match="a few small fields"):
        ctx.progress(**{f"field_{number}": "x" * 100 for number in range(100)})


def test_saved_state_is_what_the_context_shows_from_then_on() -> None:
    ctx, link = context()
    ctx.save({"at": 5})
    assert ctx.state == {"at": 5}
    assert link.calls == [SaveState({"at": 5})]


def test_an_event_may_be_a_map_and_a_bad_one_is_refused_by_its_field() -> None:
    ctx, link = context()
    ctx.emit({"dataset": "blocks", "cursor": 3})
    assert link.calls == [EmitEvents([EventIn(dataset="blocks", cursor=3)])]
    with pytest.raises(Invalid, match="curser"):
        ctx.emit({"dataset": "blocks", "curser": 3})


def test_sleep_and_pause_end_when_the_attempt_is_canceled() -> None:
    ctx, link = context()
    assert ctx.wait_while_paused() is True
    assert ctx.sleep(3600) is False
    link.canceled, link.paused = False, True
    assert ctx.wait_while_paused() is False


def test_an_input_without_files_says_so() -> None:
    ctx, _ = context(inputs=[an_input(storage="postgres", dataset="hot")])
    with pytest.raises(Invalid, match="input 'hot' has storage postgres and no files"):
        ctx.inputs["hot"].files()


@given(st.integers(-(2**63), 2**63 - 1), st.sampled_from(list(Op)), st.integers() | st.floats(-1e300, 1e300))
def test_an_aligned_comparison_decides_as_exact_arithmetic_does(column: int, op: Op, value: float) -> None:
    compare = {"=": "__eq__", "<>": "__ne__", "<": "__lt__", "<=": "__le__", ">": "__gt__", ">=": "__ge__"}
    aligned = align(StoredColumn("integer"), op, value)
    expected = getattr(Fraction(column), compare[op.value])(Fraction(value))
    if isinstance(aligned, ConstantComparison):
        assert (aligned is ConstantComparison.ALWAYS) == expected
    else:
        assert getattr(column, compare[aligned[0].value])(aligned[1]) == expected


@given(
    st.integers(-(10**9) + 1, 10**9 - 1),
    st.sampled_from(list(Op)),
    st.integers() | st.floats(-1e300, 1e300) | st.decimals(-(10**8), 10**8, places=3).map(float),
)
def test_a_decimal_beyond_the_column_s_digits_decides_as_exact_arithmetic_does(
    stored: int, op: Op, value: float
) -> None:
    column = Decimal(stored).scaleb(-2)
    aligned = align(decimals(9, 2), op, value)
    expected = compare(column, op.value, value)
    if isinstance(aligned, ConstantComparison):
        assert (aligned is ConstantComparison.ALWAYS) == expected
    else:
        assert compare(column, aligned[0].value, aligned[1]) == expected
        assert -aligned[1].as_tuple().exponent == 2
        assert len(aligned[1].as_tuple().digits) <= 9


@given(
    st.datetimes(timezones=st.just(UTC)),
    st.sampled_from(list(Op)),
    st.datetimes(),
    # Of whole seconds: CPython takes an offset below one second for none.
    st.integers(-86_340, 86_340).map(lambda seconds: timedelta(seconds=seconds)),
    st.sampled_from([1, 10**3, 10**6, 10**9]),
)
def test_an_instant_with_any_offset_is_a_number_in_utc(
    column: datetime, op: Op, local: datetime, offset: timedelta, units: int
) -> None:
    column = column.replace(microsecond=0)
    stored = (column - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1) * units
    literal = local.replace(tzinfo=timezone(offset))

    aligned = align(StoredColumn("instant", units, -(2**80), 2**80), op, literal.isoformat())

    assert isinstance(aligned, tuple) or aligned in (ConstantComparison.ALWAYS, ConstantComparison.NEVER)
    found = (
        aligned is ConstantComparison.ALWAYS
        if isinstance(aligned, ConstantComparison)
        else compare(stored, *aligned)
    )
    assert found == compare(column, op.value, literal)


def test_an_instant_beyond_what_a_column_can_hold_is_decided_at_once() -> None:
    nanoseconds = StoredColumn("instant", 10**9)
    assert align(nanoseconds, Op.LT, "9999-12-31") is ConstantComparison.ALWAYS
    assert align(nanoseconds, Op.EQ, "0001-01-01") is ConstantComparison.NEVER
    assert align(MICROSECONDS, Op.EQ, "1970-01-01T00:00:01+00:00") == (Op.EQ, 1_000_000)


def test_columns_of_types_that_arrow_compares_in_none_of_its_own_are_compared() -> None:
    at = datetime(2020, 1, 1, tzinfo=UTC)
    table = pa.table(
        {
            "us": pa.array([at], pa.timestamp("us", "UTC")),
            "s": pa.array([at], pa.timestamp("s")),
            "d": pa.array([Decimal(5)], pa.decimal128(38, 0)),
            "e": pa.array([Decimal(5)], pa.decimal128(20, 10)),
            "n": pa.array([5]),
            "u": pa.array([2**64 - 1], pa.uint64()),
            "x": pa.array([b"ab"], pa.binary(2)),
            "y": pa.array([b"ab"]),
        }
    )
    for text in ("us = s", "d = e", "n < u", "u = 18446744073709551615", "x = y", "x = '\\x6162'"):
        assert table.filter(where_expression(parse_where(text).tree, table.schema)).num_rows == 1, text


@pytest.mark.parametrize("source", [{"a": "x\0"}, {"a\0": 1}, {"a": ["\ud800"]}, "a = '\ud800'", "a = '\0'"])
def test_a_text_that_no_engine_has_is_refused_at_deploy(source: Any) -> None:
    with pytest.raises(Invalid, match=r"NUL character|surrogate"):
        parse_where(source)


def test_what_a_statement_is_to_blame_for_is_not_tried_again() -> None:
    for error in (psycopg.errors.NumericValueOutOfRange("x"), psycopg.errors.StatementTooComplex("x")):
        with pytest.raises(Invalid), reading_errors():
            raise error
    with pytest.raises(Unavailable), reading_errors():
        raise psycopg.errors.AdminShutdown("x")


GOOD = [
    "select a, b + 1 as c from t where x in (1, 2) order by 1 limit 3;",
    "with x(a) as (select 1) select * from x join T using (a)",
    "select count(distinct b) filter (where c) over (partition by d order by e) from t group by all",
    "select a.b.c, m['x'], arr[0], transform(arr, x -> x + 1) from t -- it's a comment\n /* and 'another */",
    "select cast(x as decimal(38, 0)), x'ff', timestamp'2020-01-01', interval '1' day, nvl(a, b) from t",
    "select 1 union all (select 2 except select 3)",
    "select a from t where exists (select 1 from scope_blocks s where s.block_number = t.a)",
    "select percentile_cont(0.5) within group (order by a), to_timestamp(b), struct(a, b as c) from t",
]


@pytest.mark.parametrize("query", GOOD)
def test_a_plain_select_is_accepted(query: str) -> None:
    assert check_select(query, ["t", "scope_blocks"]).lower().startswith(("select", "with"))


BAD = [
    ("", "is missing"),
    (None, "is missing"),
    (5, "is missing"),
    ("select", "selects no column"),
    ("select 1; select 2", "unexpected at '; select 2'"),
    ("insert into t select 1", "must be a SELECT, not INSERT"),
    ("create table x as select 1", "must be a SELECT, not CREATE"),
    ("show tables", "must be a SELECT, not SHOW"),
    ("checkpoint", "must be a SELECT, not CHECKPOINT"),
    ("set a = b", "must be a SELECT, not SET"),
    ("add jar 'x'", "must be a SELECT"),
    ("select java_method('java.lang.System', 'exit', 0)", r"must not call java_method\(\)"),
    ("select reflect('x', 'y')", r"must not call reflect\(\)"),
    ("select `reflect`('x', 'y')", r"must not call reflect\(\)"),
    ("select system.builtin.reflect('x', 'y')", r"must not call reflect\(\)"),
    ("select somebody.elses.abs(1)", "plain names"),
    ("with reflect(a) as (select 1) select reflect('x', 'y') from reflect", r"must not call reflect\(\)"),
    ("select try_reflect('x', 'y') from t", r"must not call try_reflect\(\)"),
    ("select input_file_name() from t", r"must not call input_file_name\(\)"),
    ("select rand() from t", r"must not call rand\(\)"),
    ("select current_user", "must not use CURRENT_USER"),
    ("select session_user()", "must not use SESSION_USER"),
    ("select * from parquet.`/etc/passwd`", "without a catalog, format or path"),
    ("select * from 'file.parquet'", "expected an input, but found"),
    ("select * from range(10)", "table function"),
    ("select * from identifier('x')", "table function"),
    ("select * from t lateral view explode(a) x as y", "must not contain LATERAL"),
    ("select transform(a) using 'cat' from t", "expected the end of the SELECT, but found 'using'"),
    ("select * from t tablesample (10 percent)", "must not contain TABLESAMPLE"),
    ("select * from t version as of 1", "expected the end of the SELECT, but found 'as'"),
    ("select * from other", "reads from 'other', which is not an input; it has scope_blocks, t"),
    ("select * from (with z as (select 1) select * from z) join z", "reads from 'z'"),
    ("select ${env:HOME}", "unexpected at"),
    ("select :p", "expected an expression, but found ':'"),
    ("select /*+ BROADCAST(t) */ * from t", "unexpected at"),
    ("select /* /* */ 1 */ 2", "unexpected at"),
    ("select r'\\', reflect('x', 'y') -- '", "put a space before the string"),
    ("select 'open", "unexpected at"),
    ("select " + "(" * 3000 + "1" + ")" * 3000, "nested too deeply"),
    ("select '" + "x" * 70_000 + "'", "is longer than"),
    ("select a" + "::string" * 3000 + " from t", "nested too deeply"),
    ("select a" + "[0]" * 3000 + " from t", "nested too deeply"),
    ("select from_json(a, 'x " + "array<" * 3000 + "int" + ">" * 3000 + "') from t", "nested too deeply"),
    ("select from_json(a, b) from t", "expected the schema of from_json.. as one string"),
    ("select from_json(a, 'a INT' || '') from t", "takes no options here, but found"),
    ('select from_json(a, \'{"type":"struct","fields":[]}\') from t', "schema for from_json"),
    ("select from_json(a, 'a INT DEFAULT 1') from t", "expected the end of the schema"),
    ("select from_json(a, 'a VARIANT') from t", "expected a type"),
    ("select from_json(a, 'a ' 'TIMESTAMP') from t", "must not read a TIMESTAMP by from_json"),
    ("select from_json(a, 'a INT', map('mode', 'x')) from t", "takes no options here"),
    ("select to_json(a, map('compression', 'x')) from t", "takes no options here"),
    ("select timestamp '12:00:00'", "of a time without a day"),
    ("select timestamp_ltz ' T12'", "of a time without a day"),
    ("select date '2020'", "expected a literal of that kind"),
    ("select cast('12:00' as timestamp)", "of a time without a day"),
    ("select '1:00'::timestamp", "of a time without a day"),
    ("select * from values ('12:00') x(a)", "of a time without a day"),
    ("select cast(a as array<timestamp>) from t", "must not cast to a type with timestamps in it"),
    ("select unix_timestamp()", "it is then the current time"),
]


@pytest.mark.parametrize(("query", "why"), BAD)
def test_sql_that_is_anything_else_is_refused_and_says_why(query: object, why: str) -> None:
    with pytest.raises(Invalid, match=why) as refused:
        check_select(query, ["t", "scope_blocks"])
    assert refused.value.reason == "InvalidSql"


def test_the_schema_of_from_json_is_written_anew() -> None:
    asked = (
        "select from_json(a, 'x int, `y.z` : array<struct<k map<string, decimal(9,2)>>>'), to_json(b) from t"
    )

    assert check_select(asked, ["t"]) == (
        "SELECT `from_json` ( `a` , 'STRUCT < `x` INT , `y.z` ARRAY < STRUCT < `k` "
        "MAP < STRING , DECIMAL ( 9 , 2 ) > > > >' ) , `to_json` ( `b` ) FROM `t`"
    )


@pytest.mark.parametrize(
    ("query", "made"),
    [
        ("select concat('a', 'b'), lower(c), 'x' from t", ["`concat` ( 'a' , 'b' )"]),
        ("select a = 'x' || 'y', b || 'y' from t", ["( 'x' || 'y' )"]),
        ("select transform(array('a'), x -> x || 'b'), count(*) || '' from t", []),
        ("select 1::string, cast(X'00' as varchar(3)), trim(both 'x' from 'xax')", 3),
        ("select lower((select max(a) from t))", []),
    ],
)
def test_text_that_is_made_of_constants_is_known(query: str, made: Any) -> None:
    found = computed(read_select(query, ["t"]))

    assert (len(found) == made) if isinstance(made, int) else ([render(each) for each in found] == made)


ANALYZED = [
    "a: timestamp",
    "Project [whatever]",
    "+- View (`t`, [text#1, day#2, number#3])",
    "   +- Relation [text#1,day#2,number#3] parquet",
]


@pytest.mark.parametrize(
    "value",
    [
        "text#1",
        "concat(12, :00)",
        "12:00:00",
        "T12",
        "max(text#1)",
        "coalesce(day#2, text#1)",
        "CASE WHEN (number#3 > 1) THEN text#1 ELSE day#2 END",
        "cast(number#3 as string)",
        "named#5",
        "unheard#9",
        "split(text#1, ,, -1)[0]",
    ],
)
def test_a_plan_that_may_make_a_timestamp_of_text_is_refused(value: str) -> None:
    optimized = [
        f"Project [hour(cast({value} as timestamp), Some(UTC)) AS a#7]",
        "+- Project [text#1 AS named#5]",
    ]
    with pytest.raises(Invalid, match=r"to_timestamp\(text, format\)"):
        judge_instants(optimized, ANALYZED, lambda _: {"text": "string", "day": "date", "number": "double"})


@pytest.mark.parametrize(
    "value",
    [
        "day#2",
        "number#3",
        "long#4L",
        "2020-01-01 00:00:00",
        "(number#3 / 1000)",
        "avg(number#3)",
        "max(day#2)",
        "named#5",
        "CASE WHEN (text#1 = x) THEN day#2 ELSE 2020-01-01 END",
        "cast(text#1 as date)",
        "gettimestamp(text#1, yyyy-MM-dd, TimestampType, Some(UTC), true)",
    ],
)
def test_a_plan_that_makes_a_timestamp_of_something_else_is_not(value: str) -> None:
    optimized = [f"Filter (cast({value} as timestamp) > 2020-01-01)", "+- Project [max(day#2) AS named#5]"]

    judge_instants(optimized, ANALYZED, lambda _: {"text": "string", "day": "date", "number": "double"})


def test_no_allowed_function_runs_code_or_reads_files_or_differs_from_run_to_run() -> None:
    harmful = {
        "reflect",
        "java_method",
        "try_reflect",
        "input_file_name",
        "rand",
        "randn",
        "uuid",
        "now",
        "shuffle",
    }
    assert not harmful & ALLOWED


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"sql": "select 1", "sort": ["a"]}, "sort: sql_transform has no such setting"),
        ({"sql": "select 1", "sort_by": "a"}, "sort_by: must be a list of column names"),
        ({"sql": "select 1", "blocks_per_file": 0}, "blocks_per_file: must be a whole number from 1 to"),
        ({}, "sql is missing"),
    ],
)
def test_a_configuration_of_sql_transform_is_checked_before_spark_is_asked(config: Any, why: str) -> None:
    with pytest.raises(Invalid, match=why):
        read_config(config, ["t"])


@pytest.mark.parametrize(
    ("storage", "setting", "value"),
    [
        ("parquet", "indexes", ["a"]),
        ("parquet", "partition_blocks", 10),
        ("postgres", "sort_by", ["a"]),
        ("postgres", "blocks_per_file", 10),
    ],
)
def test_a_setting_of_the_other_storage_is_refused(storage: str, setting: str, value: object) -> None:
    with pytest.raises(Invalid, match=f"config: {setting}: an output in {storage} has no such setting"):
        read_config({"sql": "select 1", setting: value}, ["t"], storage)


def test_two_relations_of_one_name_are_refused() -> None:
    with pytest.raises(Invalid, match="two relations would be called 'scope_blocks'"):
        read_config({"sql": "select 1"}, ["scope_blocks"])
    with pytest.raises(Invalid, match="two relations would be called 't'"):
        read_config({"sql": "select 1"}, ["t", "T"])
