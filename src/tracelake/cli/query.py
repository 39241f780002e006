"""``tracelake query``: runs one SELECT and prints a table, JSON or CSV, or writes Parquet.

Values of ``--param`` are read as people type them: numbers, words of JSON, bytes as 0x…, anything else as text.
"""

from __future__ import annotations

import csv
import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracelake.cli.failures import ExitCode, require_extras
from tracelake.cli.show import counted, print_rows
from tracelake.cli.stack import MOST_ROWS, HomeOption, TokenOption, UrlOption, connect
from tracelake.domain.errors import BadRequest, Invalid, TooLarge, TracelakeError

if TYPE_CHECKING:
    from tracelake.client.client import Client, Params
    from tracelake.contracts.query_api import QueryResponse

_ON_SCREEN = 100
"""Rows of a table without ``--limit``."""
_AROUND = 60
"""Characters of the line that are shown on each side of an error."""
_POSITION = re.compile(r"\(at character (\d+)\)\Z")
_NAMED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_BYTES = re.compile(r"0[xX](?:[0-9a-fA-F]{2})*")


def query(
    sql: Annotated[
        str | None, typer.Argument(help="One SELECT over published datasets; - reads it from standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", readable=False, help="Read the SQL from this file.")
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            "-p",
            help="A value for ? in order, or NAME=VALUE for $NAME. Numbers, true, false, null and 0x… (bytes) "
            'are read as such, anything else as text; "…" in double quotes is always text.',
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MOST_ROWS,
            help="Maximum number of rows.  [default: 100 for a table, otherwise the service's maximum]",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: columns, types, rows, row_count, truncated.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header line.")] = False,
    parquet: Annotated[
        Path | None, typer.Option("--parquet", metavar="FILE", help="Write a Parquet file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the Parquet file if it is there.")] = False,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
) -> None:
    """Query published datasets by SQL.

    Each dataset is a table under its name, in its current version; a dataset that is compacted shows its hot and
    its cold rows as one. Nothing else exists there: no files, no functions that read, no other statements.

    Examples:

        tracelake query "SELECT max(block_number) FROM blocks"

        tracelake query "SELECT * FROM transactions WHERE transaction_hash = ?" --param 0x5c50…

        tracelake query 'SELECT * FROM transfers WHERE block_number >= $from' --param from=100 --csv > rows.csv

        tracelake query --file report.sql --parquet report.parquet

        echo "SELECT 1" | tracelake query - --json
    """
    if as_json + as_csv + (parquet is not None) > 1:
        raise typer.BadParameter("--json, --csv and --parquet exclude each other")
    if parquet is not None:
        require_extras("pyarrow")
        if parquet.exists() and not force:
            raise typer.BadParameter(f"{parquet} is there already; --force replaces it")
    text, params = _sql(sql, file), read_params(param or [])
    try:
        with connect(url, token, home) as client:
            if parquet is not None:
                _save(client, text, params, limit, parquet)
            else:
                _print(client, text, params, limit, as_json, as_csv)
    except (Invalid, BadRequest, TooLarge) as refused:
        raise _bad_query(text, refused) from None


def _sql(argument: str | None, file: Path | None) -> str:
    if (argument is None) == (file is None):
        raise typer.BadParameter(
            "give the SQL as the argument, by --file, or - for standard input: one of them"
        )
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise typer.BadParameter(f"{file} isn't UTF-8 text") from None
    return sys.stdin.read() if argument == "-" else argument or ""


def _print(
    client: Client, sql: str, params: Params | None, limit: int | None, as_json: bool, as_csv: bool
) -> None:
    for_people = not (as_json or as_csv)
    began = time.monotonic()
    answer = client.query_rows(sql, params, limit=_ON_SCREEN if limit is None and for_people else limit)
    took = time.monotonic() - began
    if as_json:
        _print_json(answer)
    elif as_csv:
        _print_csv(answer)
    else:
        print_rows(answer.columns, answer.types, answer.rows)
        typer.echo(f"{counted(answer.row_count, 'row')} in {took:.3f} s", err=True)
    if answer.truncated:
        _print_truncated(answer.row_count)


def _print_truncated(rows: int) -> None:
    typer.echo(f"there is more: these are the first {rows:,} rows (--limit takes another number)", err=True)


def _print_json(answer: QueryResponse) -> None:
    """Print one document, a line per row; numbers keep all their digits."""
    from msgspec import to_builtins

    document: dict[str, Any] = to_builtins(answer)
    rows = document.pop("rows")
    head = json.dumps(document, ensure_ascii=False)
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    typer.echo(head[:-1] + ', "rows": [' + (f"\n{lines}\n" if rows else "") + "]}")


def _print_csv(answer: QueryResponse) -> None:
    # csv ends lines with CRLF by default, which line tools don't expect.
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(answer.columns)
    writer.writerows(_csv_row(row) for row in answer.rows)


def _csv_row(row: Iterable[Any]) -> list[object]:
    """Null becomes an empty field; nested values become JSON."""
    # csv would write Python's True, and Python's spelling of lists.
    return [json.dumps(value) if isinstance(value, (bool, list, dict)) else value for value in row]


def _save(client: Client, sql: str, params: Params | None, limit: int | None, path: Path) -> None:
    """Write the file atomically: it appears under its name once it is complete."""
    import pyarrow.parquet as pq

    unfinished = path.with_name(f".{path.name}.part")
    began = time.monotonic()
    try:
        with (
            client.query_stream(sql, params, limit=limit) as answer,
            pq.ParquetWriter(unfinished, answer.schema, compression="zstd") as writer,
        ):
            for batch in answer:
                writer.write_batch(batch)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    took = time.monotonic() - began
    size = path.stat().st_size
    typer.echo(f"{path}: {counted(answer.row_count, 'row')}, {size:,} bytes in {took:.3f} s", err=True)
    if answer.truncated:
        _print_truncated(answer.row_count)


def _bad_query(sql: str, refused: TracelakeError) -> typer.Exit:
    """DuckDB's message, with the line and the position of the error."""
    from tracelake.contracts.query_api import BEYOND_LIMITS

    for line in [*f"error: {refused.message}".splitlines(), *_place(sql, refused.message)]:
        # The message quotes the SQL: its control characters must not reach the terminal.
        typer.echo("".join(each if each.isprintable() else " " for each in line), err=True)
    return typer.Exit(ExitCode.FAILED if refused.reason in BEYOND_LIMITS else ExitCode.USAGE)


def _place(sql: str, message: str) -> list[str]:
    """The line of an error and a mark below it, if the message has a position, which counts bytes of UTF-8."""
    found = _POSITION.search(message)
    if found is None:
        return []
    # The position may lie inside of a character.
    before = sql.encode()[: int(found[1])].decode(errors="ignore")
    start = before.rfind("\n") + 1
    line, at = sql[start:].partition("\n")[0], len(before) - start
    cut = max(0, at - _AROUND)
    number = f"LINE {before.count(chr(10)) + 1}: "
    shown = ("…" if cut else "") + line[cut : at + _AROUND]
    return [number + shown, " " * (len(number) + at - cut + bool(cut)) + "^"]


def read_params(texts: Sequence[str]) -> list[Any] | dict[str, Any] | None:
    """Positional parameters, or all by name."""
    if not texts:
        return None
    named = [_NAMED.fullmatch(text) for text in texts]
    if not any(named):
        return [read_value(text) for text in texts]
    found: dict[str, Any] = {}
    for text, match in zip(texts, named, strict=True):
        if match is None:
            raise typer.BadParameter(
                f"{text!r} has no name and others have: all of --param by name, or none "
                "(text with a = in it goes in double quotes: --param '\"a=b\"')"
            )
        if match[1] in found:
            raise typer.BadParameter(f"--param {match[1]} is given twice")
        found[match[1]] = read_value(match[2])
    return found


def read_value(text: str) -> Any:
    """Read numbers, words and quoted text of JSON, and bytes as 0x…; anything else is text."""
    if _BYTES.fullmatch(text):
        return bytes.fromhex(text[2:])
    try:
        value = json.loads(text, parse_constant=_no_number)
    except ValueError:
        return text
    return text if isinstance(value, dict) else value


def _no_number(word: str) -> Any:
    """Refuse NaN and Infinity, which Python's JSON accepts."""
    raise ValueError(word)
