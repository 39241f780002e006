"""A sum of a wide integer is made of its digits wherever that is certain, and is Python's own sum either way."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.wide_integers import stored_integer
from tracelake.evm.columns import UINT256_ARROW, UINT256_PARTS
from tracelake.evm.digit_columns import DIGIT_PARTS, digit_columns, with_digit_columns
from tracelake.query.engine.attach import ReceivedRelation, attach, sealed_memory
from tracelake.query.engine.digit_sums import with_digit_sums
from tracelake.query.engine.lockdown import without_rewriter
from tracelake.tables.parquet import PLAIN
from tracelake.tables.wide_integers import visible_columns

ENDS = (0, 1, -1, 10**18 - 1, 10**18, 10**36 - 1, 10**36, 2**255, 2**256 - 1, -(2**255), -(10**36), None)
Row = tuple[int, int, int | None]
"""Its group, the number of its file, and its value."""


def drawn(seed: int, count: int) -> list[int | None]:
    rng = random.Random(seed)
    return [
        rng.choice(ENDS) if rng.random() < 0.2 else rng.choice((1, -1)) * rng.getrandbits(rng.randint(1, 255))
        for _ in range(count)
    ]


def table(rows: Sequence[Row], *, digits: bool = True) -> pa.Table:
    parts = UINT256_PARTS if digits else UINT256_PARTS[:3]
    stored = [stored_integer("value", value) for _, _, value in rows]
    kinds = dict(zip([f"value{part}" for part in parts], UINT256_ARROW, strict=False))
    columns = {name: pa.array([row[name] for row in stored], kind) for name, kind in kinds.items()}
    own = {
        "g": pa.array([row[0] for row in rows], pa.int64()),
        "n": pa.array([row[1] for row in rows], pa.int64()),
    }
    return pa.table(own | columns)


def write(path: Path, rows: pa.Table) -> int:
    with pq.ParquetWriter(path, rows.schema, **PLAIN.writer_options(rows.schema, rows)) as writer:
        writer.write_table(rows)
    return os.open(path, os.O_RDONLY)


class Engine:
    """Relations of rows in files with digits, in files of earlier versions, and hot."""

    def __init__(self, folder: Path) -> None:
        rows = [(place % 7, place % 4, value) for place, value in enumerate([*ENDS, *drawn(3, 300)])]
        self.rows: dict[str, list[Row]] = {"cold": rows[:200], "old": rows[:40], "mixed": rows, "empty": []}
        self._open = [
            write(folder / f"{number}.parquet", table(some, digits=digits))
            for number, (some, digits) in enumerate(
                ((rows[:100], True), (rows[100:200], True), (rows[200:250], False), (rows[:40], False))
            )
        ]
        hot = table(rows[250:]).select(["g", "n", "value_string"])
        self._hot = sealed_memory("hot", lambda file: _stream(file, hot))
        first, second, old, alone = self._open
        schema, before = table([]).schema, table([], digits=False).schema
        self.connection = duckdb.connect(config={"threads": "1"})
        without_rewriter(self.connection)
        self.views = attach(
            self.connection,
            [
                ReceivedRelation("cold", schema, [first, second], []),
                ReceivedRelation("old", before, [alone], []),
                ReceivedRelation("mixed", schema, [first, old, second], [self._hot]),
                ReceivedRelation("empty", schema, [], []),
            ],
        )

    def statement(self, sql: str, params: Any = ()) -> str:
        return with_digit_sums(self.connection, sql, params, self.views, worthwhile=0)

    def ask(self, sql: str, params: Any = ()) -> tuple[list[Any], bool]:
        """The rows, and whether they were summed by digits; both ways give the same."""
        statement = self.statement(sql, params)
        slow = self.connection.sql(sql, params=params or None)
        fast = self.connection.sql(statement, params=params or None)
        assert (fast.columns, fast.types) == (slow.columns, slow.types), sql
        found = fast.fetchall()
        assert sorted(map(str, found)) == sorted(map(str, slow.fetchall())), sql
        return found, statement != sql

    def close(self) -> None:
        self.connection.close()
        for descriptor in (*self._open, self._hot):
            os.close(descriptor)


def _stream(file: Any, rows: pa.Table) -> None:
    with pa.ipc.new_stream(file, rows.schema) as out:
        out.write_table(rows)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = Engine(tmp_path_factory.mktemp("digits"))
    yield made
    made.close()


WHOLE = "SELECT sum(value) FROM {}"
GROUPED = "SELECT g, sum(value) FILTER (WHERE n < ?), sum(t.VALUE) FROM {} t WHERE g <> 5 GROUP BY g"


def summed(rows: Sequence[Row], group: int | None = None, below: int = 100) -> str | None:
    """The sum of one group, or of all; of files below a number."""
    values = [row[2] for row in rows if group in (None, row[0]) and row[1] < below and row[2] is not None]
    return str(sum(values)) if values else None


@pytest.mark.parametrize(
    ("relation", "by_digits"), [("cold", True), ("mixed", True), ("empty", False), ("old", False)]
)
def test_sums_are_those_of_python(engine: Engine, relation: str, by_digits: bool) -> None:
    rows = engine.rows[relation]
    assert engine.ask(WHOLE.format(relation)) == ([(summed(rows),)], by_digits)
    for bound in (0, 3, 99):
        found, fast = engine.ask(GROUPED.format(relation), [bound])
        groups = {row[0] for row in rows} - {5}
        assert fast is by_digits
        assert {group: sums for group, *sums in found} == {
            group: [summed(rows, group, bound), summed(rows, group)] for group in groups
        }


BY_DIGITS = (
    "SELECT g, sum(value) AS value FROM cold GROUP BY g HAVING sum(value) > 5 ORDER BY sum(value) DESC, g",
    "SELECT n AS value, sum(value) FROM cold GROUP BY ALL HAVING sum(value) > 2",
    "SELECT sum(a.value), sum(b.value), count(*) FROM cold a JOIN mixed b ON a.g = b.g AND a.n = b.n",
    "SELECT sum(value) FROM cold JOIN (SELECT DISTINCT g FROM mixed) m USING (g)",
    "SELECT sum(value) FROM (SELECT value FROM cold)",
    "SELECT sum(s.v), s.n FROM (SELECT n, value AS v FROM mixed ORDER BY g, n, value LIMIT 50) s GROUP BY s.n",
    "WITH t AS (SELECT g, value FROM cold WHERE g < 5) SELECT g, sum(value) FROM t GROUP BY g",
    "WITH t AS (SELECT g, c.value AS v FROM cold c), u AS (SELECT v, g FROM t), w AS (SELECT sum(v) AS s FROM u) "
    "SELECT (SELECT s FROM w), sum(a.v), sum(b.v) FROM t a JOIN u b ON a.g = b.g",
    "SELECT sum(value) FROM (SELECT value, row_number() OVER (ORDER BY value) AS place FROM cold) WHERE place < 9",
    "SELECT sum(value) FROM (SELECT value, unnest([1, 2]) AS twice FROM cold)",
    "SELECT sum(value) FROM cold c, LATERAL (SELECT c.g AS h) WHERE h = 3",
    "SELECT sum(v) FROM cold c, LATERAL (SELECT value AS v FROM mixed m WHERE m.g = c.g AND m.n = c.n)",
    "SELECT sum(c.value) FROM cold c LEFT JOIN (SELECT 1 AS g) s ON c.g = s.g",
    "SELECT sum(value) FROM cold SEMI JOIN (SELECT 3 AS g) s ON cold.g = s.g",
    "SELECT max(s) FROM (SELECT g, sum(value) AS s FROM cold GROUP BY g)",
    'WITH t AS (SELECT g, sum(value) FROM cold GROUP BY g) SELECT "sum(""value"")" FROM t',
    "SELECT g, (SELECT sum(value) FROM cold c WHERE c.g = m.g) FROM mixed m",
    "SELECT g, rank() OVER (ORDER BY sum(value) DESC) FROM cold GROUP BY g",
    "SELECT sum(sum(value)) OVER (), g FROM cold GROUP BY g",
    "SELECT g, n, sum(value) FROM cold GROUP BY ROLLUP (g, n)",
    "SELECT sum(value), max(value), count(value), sum(value_f64) FROM cold WHERE value > 9000",
    "SELECT sum(value) FROM cold UNION ALL SELECT sum(value) FROM mixed",
    "SELECT DISTINCT sum(value) FROM cold GROUP BY g",
    "SELECT sum(value) + 1, -sum(value), sum(value)::VARCHAR, sum(value) > 5 FROM cold",
    "SELECT sum(value) FILTER (WHERE lower(g::VARCHAR) = '3') FROM cold",
    "SELECT g, 1 AS value FROM cold GROUP BY g QUALIFY row_number() OVER (ORDER BY sum(value)) = 1",
)
AS_WRITTEN = (
    "SELECT sum(DISTINCT value) FROM cold",
    "SELECT sum(value) OVER (ORDER BY g, n, value) FROM cold",
    "SELECT sum(value + 1) FROM cold",
    "SELECT sum(value) FILTER (WHERE g > random() + 99) FROM cold",
    "SELECT sum(value) FROM (SELECT value + 0 AS value FROM cold)",
    "SELECT sum(value) FROM (SELECT DISTINCT value FROM cold)",
    "SELECT sum(value) FROM (SELECT value, count(*) FROM cold GROUP BY value)",
    "SELECT sum(value) FROM (SELECT value, count(*) FROM cold GROUP BY ALL)",
    "SELECT sum(value) FROM (SELECT value FROM cold UNION ALL SELECT value FROM mixed)",
    "SELECT sum(v) FROM (SELECT value AS v, g AS v FROM cold LIMIT 0)",
    "SELECT sum(v) FROM (SELECT value FROM cold) s(v)",
    "SELECT sum(value) FROM (SELECT * FROM cold)",
    "SELECT sum(value), count(s) FROM (SELECT value FROM cold) s",
    "WITH t AS (SELECT value FROM cold) SELECT sum(value), (SELECT count(*) FROM (SELECT * FROM t)) FROM t",
    "WITH t(v) AS (SELECT value FROM cold) SELECT sum(v) FROM t",
    "WITH t AS (SELECT g, value FROM cold) SELECT sum(value) FROM t UNION ALL "
    "(SELECT max(value) FROM t NATURAL JOIN old)",
    "WITH t AS (WITH t AS (SELECT value FROM cold) SELECT value FROM t) SELECT sum(value) FROM t",
    "WITH RECURSIVE t AS (SELECT value, 1 AS i FROM cold UNION ALL SELECT value, i + 1 FROM t WHERE i < 3) "
    "SELECT sum(value) FROM t",
    "SELECT sum(c.value), max(#3) FROM cold c, (SELECT 7 AS seven) s",
    "WITH cold AS (SELECT 5::BIGNUM AS value) SELECT sum(value) FROM cold",
    "SELECT sum(value) FROM cold c(a, b, value)",
    "SELECT sum(value), count(c) FROM cold c",
    "SELECT sum(value), max(value) FROM cold NATURAL JOIN (SELECT 3 AS g)",
    "SELECT sum(value) FROM cold JOIN (SELECT DISTINCT value FROM mixed) m USING (value)",
    "SELECT sum(COLUMNS('^value$')) FROM cold",
    "SELECT (SELECT sum(m.value)) FROM mixed m",
    "SELECT sum(value) FROM (VALUES (7::BIGNUM)) s(value) SEMI JOIN cold ON cold.g = 3",
    "SELECT list_sum(list_transform([1, 2], lambda value: value)) FROM cold",
    "SELECT sum(g) FROM cold",
    "SELECT avg(value) FROM cold",
)


@pytest.mark.parametrize(
    ("sql", "by_digits"), [*((sql, True) for sql in BY_DIGITS), *((sql, False) for sql in AS_WRITTEN)]
)
def test_a_sum_is_made_of_digits_where_that_is_certain(engine: Engine, sql: str, by_digits: bool) -> None:
    assert engine.ask(sql)[1] is by_digits


def test_an_error_of_the_query_is_reported_in_its_own_words(engine: Engine) -> None:
    for wrong in (
        "SELECT sum(value), nowhere FROM cold",
        "SELECT sum(value) FROM cold, mixed",
        "SELECT sum(tracelake_low_value), sum(value) FROM cold",
    ):
        assert engine.statement(wrong) == wrong
        with pytest.raises(duckdb.BinderException):
            engine.connection.sql(wrong)


LONG = "WITH {} SELECT sum(value) FROM t59"


def test_a_long_chain_of_ctes_that_is_ambiguous_is_left_alone(engine: Engine) -> None:
    first, link = "t0 AS (SELECT value FROM cold)", "t{} AS (SELECT value FROM t{} a, t{} b)"
    chain = [first, *(link.format(place, place - 1, place - 1) for place in range(1, 60))]
    query = LONG.format(", ".join(chain))
    assert engine.statement(query) == query


def test_sums_of_many_draws_are_those_of_python(tmp_path: Path) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        rows = [(rng.randrange(3), 0, value) for value in drawn(seed, rng.choice((0, 1, 50)))]
        cut = rng.randint(0, len(rows))
        files = [
            write(tmp_path / f"{seed}-{number}.parquet", table(some, digits=digits))
            for number, (some, digits) in enumerate(((rows[:cut], True), (rows[cut:], seed % 2 == 0)))
        ]
        with duckdb.connect(config={"threads": "1"}) as connection:
            views = attach(connection, [ReceivedRelation("t", table([]).schema, files, [])])
            query = "SELECT g, sum(value) FROM t GROUP BY g"
            statement = with_digit_sums(connection, query, (), views, worthwhile=0)
            assert statement != query
            found = dict(connection.sql(statement).fetchall())
        assert found == {group: summed(rows, group) for group in {row[0] for row in rows}}
        for descriptor in files:
            os.close(descriptor)


def test_the_digits_are_those_of_the_number() -> None:
    for values in (ENDS, drawn(1, 200), (None, None), (), (5, 10**17), (5, 10**18), [*drawn(2, 20), None]):
        texts = pa.array([None if value is None else str(value) for value in values], pa.string())
        for place in (0, 1):
            found = [column.to_pylist() for column in digit_columns(texts.slice(place))]
            expected = [stored_integer("v", value) for value in values[place:]]
            for part, column in zip(DIGIT_PARTS, found, strict=True):
                assert column == [row[f"v{part}"] for row in expected]


def test_rows_of_an_earlier_version_are_given_their_digits() -> None:
    whole = table([(1, 1, value) for value in ENDS])
    names = [f"value{part}" for part in DIGIT_PARTS]
    lost = whole
    for name in names:
        place = whole.schema.get_field_index(name)
        lost = lost.set_column(place, name, pa.nulls(len(whole), whole.schema.field(name).type))
    assert with_digit_columns(lost, names).equals(whole)


def test_digits_are_not_among_the_columns_that_a_query_sees() -> None:
    assert visible_columns(table([]).schema).names == [
        "g",
        "n",
        "value",
        "value_binary",
        "value_string",
        "value_f64",
    ]
    other = pa.schema([("x_e0", pa.int64()), ("value_e0", pa.int64()), ("value_string", pa.string())])
    assert visible_columns(other) == other
