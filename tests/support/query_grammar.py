"""Random SELECTs over two small tables, as analysts write them, on request with hostile pieces in them.

Every choice comes from one ``random.Random``, so a seed is a query and hypothesis can shrink one. ``danger`` is the
chance that a relation or an expression is a hostile one instead. Names are often those of something else: CTEs,
aliases and columns that are called like functions, tables, columns or each other; literals are often at the ends of
their types.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from random import Random
from typing import TypeVar

import pyarrow as pa

from tests.support.query_attacks import RELATIONS, SCALARS

T = TypeVar("T")

#: Tables and their columns; some names are in both, as block_number often is.
TABLES: dict[str, dict[str, str]] = {
    "events": {
        "id": "BIGINT",
        "kind": "VARCHAR",
        "amount": "DOUBLE",
        "data": "BLOB",
        "seen": "TIMESTAMP",
        "ok": "BOOLEAN",
    },
    "blocks": {
        "number": "BIGINT",
        "id": "BIGINT",
        "kind": "VARCHAR",
        "hash": "BLOB",
        "fee": "DECIMAL(38,0)",
        "day": "DATE",
        "received": "TIMESTAMPTZ",
    },
    "uuid": {"id": "BIGINT", "range": "BIGINT", "now": "TIMESTAMP", "upper": "VARCHAR", "user": "VARCHAR"},
}
#: What a CTE, an alias or a column may be called, to be taken for something else.
SHADOWS = (
    *(
        "uuid",
        "range",
        "now",
        "count",
        "upper",
        "getenv",
        "read_text",
        "unnest",
        "user",
        "current_date",
        "main",
    ),
    *("events", "blocks", "id", "kind", "number", "memory", "list_value", "random", "x"),
)
LITERALS: dict[str, tuple[str, ...]] = {
    "BIGINT": (
        *("0", "1", "2", "3", "-1", "2.5", "'2'", "9223372036854775808", "1e0", "1.0", "9223372036854775807"),
        *(
            "-9223372036854775808",
            "-9223372036854775809",
            "18446744073709551616",
            "9007199254740993",
            "1e100",
        ),
        *(
            "99999999999999999999999999999999999999",
            "340282366920938463463374607431768211456",
            "9007199254740993.5",
        ),
    ),
    "VARCHAR": ("'a'", "'b'", "'B'", "''", "'a''b'", "'\\x61'", "chr(0)", "'\U0010ffff'"),
    "DOUBLE": (
        *(
            "0",
            "1",
            "1.5",
            "-0.5",
            "0.1",
            "'1.5'",
            "1e0",
            "'nan'",
            "'inf'",
            "'-inf'::DOUBLE",
            "1e308",
            "-0.0",
        ),
        *("9007199254740993", "5e-324", "1e400"),
    ),
    "BLOB": ("'a'", "'\\x61'", "x'61'", "x''", "unhex('6162')", "'ab'::BLOB", "'\\x61b'", "from_hex('00')"),
    "TIMESTAMP": (
        "'2024-01-01'",
        "'2024-01-02 03:04:05'",
        "TIMESTAMP '2024-01-01 00:00:00'",
        "DATE '2024-01-02'",
        "'2024-01-02T03:04:05.5'",
        "'2024-1-2'",
        "'2024-01-02 03:04:05+02:00'",
        "'infinity'",
        "TIMESTAMP '-infinity'",
        "'0001-01-01'",
        "'9999-12-31 23:59:59.999999'",
        "'10000-01-01'",
        "'0000-01-01'",
    ),
    "TIMESTAMPTZ": (
        "'infinity'",
        "'0001-01-01 00:00:00+14:00'",
        "TIMESTAMPTZ '9999-12-31 23:59:59-14:00'",
        "'2024-01-01'",
        "'2024-01-02 03:04:05'",
        "'2024-01-02 03:04:05+02:00'",
        "TIMESTAMP '2024-01-01 00:00:00'",
        "TIMESTAMPTZ '2024-01-02 03:04:05Z'",
        "DATE '2024-01-02'",
    ),
    "DATE": (
        *("'2024-01-01'", "DATE '2024-01-02'", "TIMESTAMP '2024-01-02 00:00:00'", "'2024-1-2'", "'infinity'"),
        *("DATE '-infinity'", "'0001-01-01'", "'9999-12-31'", "'10000-01-01'"),
    ),
    "BOOLEAN": ("true", "false", "'true'"),
    "DECIMAL(38,0)": (
        *("0", "1", "2", "1.5", "'2'", "12345678901234567890", "99999999999999999999999999999999999999"),
        *("-9223372036854775808", "170141183460469231731687303715884105727"),
    ),
}
_TIMES = tuple(
    datetime.fromisoformat(f"2024-01-{day}T{clock}+00:00")
    for day in ("01", "02")
    for clock in ("00:00:00", "01:04:05", "03:04:05", "03:04:05.500")
)
#: What stands in the tables; literals meet it often.
VALUES: dict[str, tuple[object, ...]] = {
    "BIGINT": (None, 0, 1, 2, 3, -1, 2**53 + 1, 2**63 - 1, -(2**63)),
    "VARCHAR": (None, "", "a", "b", "B", "a'b", "ab"),
    "DOUBLE": (None, 0.0, 0.1, 1.0, 1.5, -0.5, math.nan, math.inf),
    "BLOB": (None, b"", b"a", b"ab", b"\0", b"b"),
    "TIMESTAMP": (None, *(time.replace(tzinfo=None) for time in _TIMES)),
    "TIMESTAMPTZ": (None, *_TIMES),
    "DATE": (None, date(2024, 1, 1), date(2024, 1, 2), date(2024, 1, 3)),
    "BOOLEAN": (None, True, False),
    "DECIMAL(38,0)": (None, Decimal(0), Decimal(1), Decimal(2), Decimal(12345678901234567890)),
}
ARROW: dict[str, pa.DataType] = {
    "BIGINT": pa.int64(),
    "VARCHAR": pa.string(),
    "DOUBLE": pa.float64(),
    "BLOB": pa.binary(),
    "TIMESTAMP": pa.timestamp("us"),
    "TIMESTAMPTZ": pa.timestamp("us", "UTC"),
    "DATE": pa.date32(),
    "BOOLEAN": pa.bool_(),
    "DECIMAL(38,0)": pa.decimal128(38, 0),
}
_COMPARISONS = ("=", "<>", "<", "<=", ">", ">=", "=", "IS DISTINCT FROM", "IS NOT DISTINCT FROM")
_JOINS = (
    *("JOIN", "JOIN", "JOIN", "LEFT JOIN", "LEFT JOIN", "LEFT JOIN", "RIGHT JOIN", "RIGHT JOIN", "FULL JOIN"),
    *("SEMI JOIN", "ANTI JOIN"),
    *("CROSS JOIN", "NATURAL JOIN", "NATURAL LEFT JOIN", "POSITIONAL JOIN", "ASOF JOIN", "ASOF LEFT JOIN"),
)
_CALLS = {
    "BIGINT": (
        "abs({})",
        "{} + 1",
        "greatest({}, 1)",
        "coalesce({}, 0)",
        "CASE WHEN {} > 1 THEN 1 ELSE 2 END",
        "({}).abs()",
        "list_filter([1, 2], lambda id: id = {})",
        "list_transform([{}], lambda kind: kind IS NULL)",
        "{{'id': {}}}.id",
        "list_sum([{}])",
    ),
    "VARCHAR": (
        "upper({})",
        "{} || 'x'",
        "length({})",
        "{} LIKE 'a%'",
        "nullif({}, 'a')",
        "({}).upper().lower()",
    ),
    "DOUBLE": ("round({})", "{} * 2", "CAST({} AS BIGINT)"),
    "BLOB": ("hex({})", "octet_length({})"),
    "TIMESTAMP": ("date_trunc('day', {})", "year({})", "{} + INTERVAL 1 DAY"),
    "TIMESTAMPTZ": ("date_trunc('day', {})", "{} + INTERVAL 1 DAY"),
    "DATE": ("year({})", "{} + 1"),
    "BOOLEAN": ("NOT {}", "{} IS TRUE"),
    "DECIMAL(38,0)": ("{} + 1", "CAST({} AS DOUBLE)"),
}


def random_table(random: Random, name: str) -> pa.Table:
    """A few rows; the same row may be there twice."""
    schema = pa.schema([(column, ARROW[kind]) for column, kind in TABLES[name].items()])
    rows = [
        {column: random.choice(VALUES[kind]) for column, kind in TABLES[name].items()}
        for _ in range(random.randrange(9))
    ]
    return pa.Table.from_pylist(rows, schema)


@dataclass
class _Source:
    """Something in FROM: what it is called and its columns with their types."""

    alias: str
    columns: dict[str, str]
    base: bool = False


@dataclass
class Grammar:
    random: Random
    danger: float = 0.0
    shadow: float = 0.12
    parameters: list[object] = field(default_factory=list)
    _depth: int = 0
    _named: int = 0
    _ctes: dict[str, dict[str, str]] = field(default_factory=dict)

    def query(self) -> str:
        ctes = [self._cte() for _ in range(self._pick((0, 0, 0, 1, 2)))]
        text = self._select([])[0]
        if self._chance(0.15):
            counted = [
                " ".join(("SELECT count(*) FROM (", one, ") q")) for one in (text, self._select([])[0])
            ]
            text = " UNION ALL ".join(counted)
        return " ".join(("WITH", ", ".join(ctes), text)) if ctes else text

    def _cte(self) -> str:
        name = self._pick(("events", "Blocks")) if self._chance(0.2) else self._fresh("c")
        if self._chance(3 * self.shadow):
            name = self._shadow()
        text, columns = self._select([])
        self._ctes[name.lower()] = columns or {"id": "BIGINT"}
        return f"{name} AS {self._pick(('', '', 'MATERIALIZED '))}({text})"

    def _select(self, outer: list[_Source]) -> tuple[str, dict[str, str]]:
        """The text, and the columns that come out."""
        self._depth += 1
        sources: list[_Source] = []
        tables = self._from(sources)
        items, columns = self._items(sources)
        text = " ".join(("SELECT", items, "FROM", tables))
        if self._chance(0.7):
            text += f" WHERE {self._condition(sources, outer, 2)}"
        if items.startswith("count") and self._chance(0.3):
            text += " HAVING count(*) > 0"
        self._depth -= 1
        return text, columns

    def _items(self, sources: list[_Source]) -> tuple[str, dict[str, str]]:
        every = {name: kind for source in sources for name, kind in source.columns.items()}
        match self._pick(("star", "some", "some", "some", "count", "group", "owner", "exclude", "row")):
            case "star":
                return "*", every
            case "exclude":
                return f"* EXCLUDE ({self._pick(list(sources[0].columns))})", every
            case "owner":
                source = self._pick(sources)
                whole = self._pick(
                    (f"{source.alias}.*", f"{source.alias}.*", f"COLUMNS({source.alias}.*)", "#1")
                )
                return whole, dict(source.columns)
            case "row":
                return f"{self._pick(sources).alias} AS w", {"w": "VARCHAR"}
            case "count":
                return "count(*) AS n", {"n": "BIGINT"}
            case "group":
                column, kind = self._column(sources)
                return f"count({column}) AS n, min({column}) AS low", {"n": "BIGINT", "low": kind}
            case _:
                return self._listed(sources)

    def _listed(self, sources: list[_Source]) -> tuple[str, dict[str, str]]:
        items, columns = [], {}
        for _ in range(self._pick((1, 2, 3))):
            column, kind = self._column(sources)
            name = self._pick(("id", "kind", "amount")) if self._chance(0.15) else self._fresh("x")
            if self._chance(self.shadow):
                name = self._shadow()
            if self._chance(self.danger):
                column = self._hostile(SCALARS)
            elif self._chance(0.4):
                column, kind = self._pick(_CALLS[kind]).format(column), "BIGINT"
            items.append(f"{column} AS {name}")
            columns[name] = kind
        return ", ".join(items), columns

    def _from(self, sources: list[_Source]) -> str:
        text = self._source(sources)
        for _ in range(self._pick((0, 1, 1, 1, 2))):
            kind = self._pick(_JOINS)
            before = list(sources)
            right = self._source(sources)
            if kind.startswith(("CROSS", "NATURAL", "POSITIONAL")):
                text += f" {kind} {right}"
                continue
            if kind.startswith("ASOF") and self._chance(0.8):
                text += f" {kind} {right} ON {before[-1].alias}.id >= {sources[-1].alias}.id"
                continue
            shared = [name for name in before[-1].columns if name in sources[-1].columns]
            if shared and self._chance(0.25):
                text += f" {kind} {right} USING ({self._pick(shared)})"
            else:
                both_have_it = all("id" in source.columns for source in (before[-1], sources[-1]))
                matched = both_have_it and self._chance(0.7)
                match = f"{before[-1].alias}.id = {sources[-1].alias}.id AND " if matched else ""
                text += f" {kind} {right} ON {match}{self._condition(sources, [], 1)}"
            if kind in ("SEMI JOIN", "ANTI JOIN"):
                sources.pop()
        return text

    def _source(self, sources: list[_Source]) -> str:
        if self._chance(self.danger):
            sources.append(_Source("h", {"id": "BIGINT"}))
            return f"{self._hostile(RELATIONS)} h"
        alias = self._fresh("s")
        if self._chance(self.shadow):
            other = self._shadow()
            alias = alias if any(source.alias == other for source in sources) else other
        if self._depth < 3 and self._chance(0.15):
            text, columns = self._select([])
            sources.append(_Source(alias, columns or {"id": "BIGINT"}))
            return f"({text}) {alias}"
        if self._chance(0.08):
            sources.append(_Source(alias, {"id": "BIGINT"}))
            return f"range(4) {alias}(id)"
        name = self._pick((*TABLES, *TABLES, *self._ctes))
        columns = self._ctes.get(name) or TABLES.get(name) or {"id": "BIGINT"}
        if self._chance(0.3) and all(source.alias != name for source in sources):
            sources.append(_Source(name, columns, base=True))
            return self._pick((name, name.upper()))
        sources.append(_Source(alias, columns, base=True))
        if self._chance(0.05):
            sources[-1].columns = dict(zip(("id", "y"), columns.values(), strict=False))
            return f"{name} {alias}(id, y)"
        sample = " TABLESAMPLE 100%" if self._chance(0.03) else ""
        return f"{name} {self._pick(('', 'AS '))}{alias}{sample}"

    def _condition(self, sources: list[_Source], outer: list[_Source], depth: int) -> str:
        if depth and self._chance(0.5):
            word = self._pick((" AND ", " AND ", " OR "))
            parts = [self._condition(sources, outer, depth - 1) for _ in range(self._pick((2, 3)))]
            return "(" + word.join(parts) + ")"
        if self._chance(0.08):
            return f"NOT {self._condition(sources, outer, 0)}"
        if self._depth < 3 and self._chance(0.1):
            word = self._pick(("EXISTS", "NOT EXISTS"))
            return f"{word} ({self._select([*sources, *outer])[0]})"
        return self._comparison(sources, outer)

    def _comparison(self, sources: list[_Source], outer: list[_Source]) -> str:
        column, kind = self._column([*sources, *(outer if self._chance(0.3) else ())])
        match self._pick(
            ("compare", "compare", "compare", "flip", "in", "between", "null", "null", "column", "plain")
        ):
            case "compare":
                return f"{column} {self._pick(_COMPARISONS)} {self._literal(kind)}"
            case "flip":
                return f"{self._literal(kind)} {self._pick(_COMPARISONS)} {column}"
            case "in":
                values = [self._literal(kind) for _ in range(self._pick((1, 2, 3)))]
                values += ["NULL"] if self._chance(0.1) else []
                return f"{column} {self._pick(('IN', 'IN', 'NOT IN'))} ({', '.join(values)})"
            case "between":
                return f"{column} {self._pick(('', 'NOT '))}BETWEEN {self._literal(kind)} AND {self._literal(kind)}"
            case "null":
                return f"{column} IS {self._pick(('', 'NOT '))}NULL"
            case "column":
                return f"{column} {self._pick(('=', '<', '>='))} {self._column(sources)[0]}"
            case _:
                return f"{self._pick(_CALLS[kind]).format(column)} IS NOT NULL"

    def _literal(self, kind: str) -> str:
        if self._chance(self.danger):
            return self._hostile(SCALARS)
        if self._chance(0.15) and kind in ("BIGINT", "VARCHAR", "DOUBLE", "TIMESTAMP", "BLOB"):
            given: dict[str, tuple[object, ...]] = {
                "BIGINT": (1, 2, 1.5, "2", None),
                "DOUBLE": (0.1, 1.5, 1),
                "VARCHAR": ("a", "b"),
                "TIMESTAMP": ("2024-01-02", "2024-01-02 03:04:05"),
                "BLOB": ("a", "\\x61"),
            }
            self.parameters.append(self._pick(given[kind]))
            return f"${len(self.parameters)}"
        return self._pick(LITERALS[kind])

    def _column(self, sources: list[_Source]) -> tuple[str, str]:
        source = self._pick(sources)
        name = self._pick(list(source.columns))
        written = name.upper() if self._chance(0.1) else name
        alone = self._chance(0.6 if len(sources) == 1 else 0.1)
        return (written if alone else f"{source.alias}.{written}"), source.columns[name]

    def _hostile(self, pieces: dict[str, tuple[str, ...]]) -> str:
        return self._pick(pieces[self._pick(list(pieces))])

    def _shadow(self) -> str:
        return f'"{self._pick(SHADOWS)}"'

    def _fresh(self, letter: str) -> str:
        self._named += 1
        return f"{letter}{self._named}"

    def _chance(self, share: float) -> bool:
        return share > 0 and self.random.random() < share

    def _pick(self, options: Sequence[T]) -> T:
        return options[self.random.randrange(len(options))]
