"""A relation with the digits of its wide integers: the second view of it that ``digit_sums`` sums from.

It has the relation's columns and each integer's pieces, under names that no query knows. A source without digits
(hot rows, files of earlier versions) has the whole number as ``rest``. A file's digits count only if its own
statistics say that every number has them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import duckdb
import pyarrow.parquet as pq

from tracelake.evm.digit_columns import DIGIT_PARTS, DIGITS
from tracelake.query.engine.attach import SQL, AttachedView, casts, columns_of, read_parquet
from tracelake.query.engine.column_types import literal, quoted
from tracelake.tables.wide_integers import text_columns

ZEROS = "0" * DIGITS
PIECES = ("low", "middle", "rest")
#: Parquet's physical types of the digit columns.
_STORED = ("INT64", "INT64", "BYTE_ARRAY")


@dataclass(slots=True)
class DigitsView:
    """A relation with digit columns. Its second view is called ``name``, and made once a sum needs it;
    ``with_rest`` are the integers that may have a ``rest`` in some row."""

    connection: duckdb.DuckDBPyConnection
    view: AttachedView
    name: str
    integers: Sequence[str]
    used: bool = False
    with_rest: set[str] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        return sum(os.stat(file).st_size for file in self.view.files)

    def integer(self, name: str) -> str | None:
        return next((each for each in self.integers if each.lower() == name), None)

    def use(self) -> None:
        if self.used:
            return
        self.used = True
        whole, others = self._groups_of_files()
        sources = [*([read_parquet(whole)] if whole else ()), *([read_parquet(others)] if others else ())]
        sources += self.view.sources
        if others or self.view.sources:
            self.with_rest.update(self.integers)
        texts = text_columns(self.view.relation.columns)
        selects = []
        for source in sources:
            there = columns_of(self.connection, source)
            # Files whose digits can't be relied on may have some.
            with_digits = bool(whole) and source == sources[0]
            pieces = [_pieces(each, texts[each], there, with_digits=with_digits) for each in self.integers]
            columns = ", ".join([casts(self.view.columns, there), *pieces])
            selects.append(SQL.rows_of.format(columns=columns, source=source))
        rows = "\nUNION ALL\n".join(selects)
        self.connection.execute(SQL.replace_view.format(name=quoted(self.name), rows=rows))

    def _groups_of_files(self) -> tuple[list[str], list[str]]:
        """The files that have the digits of every number, and the others, by what they say of themselves."""
        texts = text_columns(self.view.relation.columns)
        groups: tuple[list[str], list[str]] = ([], [])
        for file in self.view.files:
            # The engine's own table of this has a row per column and group of rows, which takes ten times as long.
            found = pq.read_metadata(file)
            rests = {each: _rest_of(found, each, texts[each]) for each in self.integers}
            groups[1 if None in rests.values() else 0].append(file)
            self.with_rest.update(each for each, rest in rests.items() if rest)
        return groups


def _rest_of(file: pq.FileMetaData, integer: str, text: str) -> bool | None:
    """Whether a number of the file has a rest; None if not every one has digits. It would be missing from a sum,
    and rows of files of two versions can become rows of one file."""
    places = {name: place for place, name in enumerate(_leaves(file))}
    names = [integer + part for part in DIGIT_PARTS]
    if not {text, *names} <= places.keys():
        return None
    rest = False
    for group in map(file.row_group, range(file.num_row_groups)):
        columns = [group.column(places[name]) for name in (text, *names)]
        nulls = [None if each.statistics is None else each.statistics.null_count for each in columns]
        kinds = tuple(each.physical_type for each in columns[1:])
        if kinds != _STORED or None in nulls or not nulls[0] == nulls[1] == nulls[2]:
            return None
        rest |= nulls[3] != group.num_rows
    return rest


def _leaves(file: pq.FileMetaData) -> Iterator[str]:
    return (file.schema.column(place).path for place in range(file.num_columns))


def piece_name(piece: str, integer: str) -> str:
    return f"tracelake_{piece}_{integer}"


def _pieces(integer: str, text: str, there: Sequence[str], *, with_digits: bool) -> str:
    names = {name.lower() for name in there}
    low, middle, high = (quoted(integer + part) for part in DIGIT_PARTS)
    if with_digits:
        columns = [f"CAST({low} AS BIGINT)", f"CAST({middle} AS BIGINT)"]
        columns.append(f"CAST({high} || {literal(2 * ZEROS)} AS BIGNUM)")
    else:
        number = f"CAST({quoted(text)} AS BIGNUM)" if text.lower() in names else "CAST(NULL AS BIGNUM)"
        columns = ["CAST(NULL AS BIGINT)", "CAST(NULL AS BIGINT)", number]
    named = zip(columns, PIECES, strict=True)
    return ", ".join(f"{column} AS {quoted(piece_name(piece, integer))}" for column, piece in named)
