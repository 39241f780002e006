"""``tracelake.Client().query`` and ``tracelake query`` over HTTP. DuckDB answers in the Query Service's place: what
is tested here is the caller's side of the contract, broken answers included."""

from __future__ import annotations

import csv
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import duckdb
import msgspec
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tracelake
from tracelake.cli.main import main
from tracelake.client import Client
from tracelake.client.results import ResultTruncated
from tracelake.contracts.query_api import ARROW_STREAM, INVALID_QUERY, QueryRequest, from_wire
from tracelake.domain.errors import Invalid, Unavailable

TOKEN = "a-users-token"
HASH = bytes(range(32))
ROWS = "SELECT i AS n, CAST(i AS VARCHAR) AS t FROM range(10000) r(i)"


@dataclass
class Service:
    """``breaks`` cuts Arrow answers after so many bytes; ``away`` is an installation without a Query Service."""

    url: str = ""
    asked: list[QueryRequest] = field(default_factory=list)
    breaks: int | None = None
    fewer: bool = False
    away: bool = False

    def answer(self, request: QueryRequest, *, arrow: bool) -> tuple[int, dict[str, str], bytes]:
        self.asked.append(request)
        if self.away:
            return problem(503, "NoQueryService", "this installation has no Query Service")
        with duckdb.connect() as engine:
            engine.execute("CREATE TABLE hashes AS SELECT 1 AS n, from_hex($1) AS hash", [HASH.hex()])
            try:
                table = engine.sql(request.sql, params=from_wire(request.params)).to_arrow_table()
            except duckdb.Error as error:
                return problem(422, INVALID_QUERY, str(error))
        most = min(20_000, request.limit if request.limit is not None else 10)
        kept = table.slice(0, most)
        facts = {"row_count": kept.num_rows, "truncated": table.num_rows > most, "query_id": UUID(int=7)}
        if not arrow:
            rows = [list(each.values()) for each in kept.to_pylist()]
            types = [str(column.type) for column in table.schema]
            said = {"columns": table.column_names, "types": types, "rows": rows, **facts}
            return 200, {"Content-Type": "application/json"}, msgspec.json.encode(said, enc_hook=str)
        headers = {
            "Content-Type": ARROW_STREAM,
            "X-Trace-Query-Id": str(facts["query_id"]),
            "X-Trace-Row-Count": str(kept.num_rows + self.fewer),
            "X-Trace-Truncated": str(facts["truncated"]).lower(),
        }
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, kept.schema) as writer:
            writer.write_table(kept, max_chunksize=1000)
        return 200, headers, sink.getvalue().to_pybytes()


def problem(status: int, reason: str, detail: str) -> tuple[int, dict[str, str], bytes]:
    body = msgspec.json.encode({"reason": reason, "detail": detail, "status": status})
    return status, {"Content-Type": "application/problem+json"}, body


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Service]:
    served = Service()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert (self.path, self.headers["Authorization"]) == ("/v1/query", f"Bearer {TOKEN}")
            request = msgspec.json.decode(body, type=QueryRequest)
            status, headers, content = served.answer(request, arrow=self.headers["Accept"] == ARROW_STREAM)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: served.breaks])

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACELAKE_URL", served.url)
    monkeypatch.setenv("TRACELAKE_TOKEN", TOKEN)
    yield served
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with tracelake.Client() as found:
        yield found


@dataclass
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def command(service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> Ended:
        monkeypatch.setattr("sys.argv", ["tracelake", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return Ended(int(end.value.code or 0), captured.out, captured.err)

    return run


def test_a_result_is_a_table_of_pyarrow_and_becomes_frames(client: Client) -> None:
    result = client.query(ROWS)
    assert isinstance(result, pa.Table)
    assert (result.num_rows, len(result), result.column_names) == (10_000, 10_000, ["n", "t"])
    assert (result.truncated, result.query_id) == (False, UUID(int=7))
    assert result["n"][3].as_py() == 3
    as_pandas, as_polars = result.to_pandas(), result.to_polars()
    assert isinstance(as_pandas, pandas.DataFrame)
    assert isinstance(as_polars, polars.DataFrame)
    assert as_pandas["n"].sum() == as_polars["n"].sum() == 49_995_000
    assert result == result.to_arrow() == pa.table(result)
    assert duckdb.sql("SELECT count(*) FROM result").fetchall() == [(10_000,)]


def test_parameters_are_bound_by_place_and_by_name(client: Client) -> None:
    assert client.query("SELECT n FROM hashes WHERE hash = ?", [HASH]).num_rows == 1
    assert client.query("SELECT n FROM hashes WHERE hash = $h", {"h": HASH[::-1]}).num_rows == 0


def test_a_limit_says_whether_there_was_more(client: Client) -> None:
    result = client.query(ROWS, limit=3)
    assert (result.num_rows, result.truncated) == (3, True)


def test_a_result_that_the_service_cuts_is_warned_of(client: Client) -> None:
    with pytest.warns(ResultTruncated, match="cut after 20,000 rows"):
        assert client.query("SELECT * FROM range(20001)").truncated


def test_an_empty_result_keeps_its_columns(client: Client) -> None:
    result = client.query(ROWS + " WHERE i < 0")
    assert (result.num_rows, result.column_names) == (0, ["n", "t"])


def test_batches_come_one_by_one(client: Client) -> None:
    assert [batch.num_rows for batch in client.query_batches(ROWS)] == [1000] * 10


def test_a_refused_query_says_what_the_engine_said(client: Client) -> None:
    with pytest.raises(Invalid, match="LINE 1: SELECT n FRO hashes") as refused:
        client.query("SELECT n FRO hashes")
    assert refused.value.reason == INVALID_QUERY


@pytest.mark.parametrize("breaks", [0, 100, 5000])
def test_an_answer_that_breaks_off_is_an_error(client: Client, service: Service, breaks: int) -> None:
    service.breaks = breaks
    with pytest.raises(Unavailable):
        client.query(ROWS)


def test_rows_that_got_lost_on_the_way_are_an_error(client: Client, service: Service) -> None:
    service.fewer = True
    with pytest.raises(Unavailable, match="10000 rows of 10001"):
        client.query(ROWS)


def test_a_client_finds_the_stack_of_a_home(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = {"user_url": service.url, "user_token": TOKEN, "more": 1}
    (tmp_path / ".tracelake").mkdir()
    (tmp_path / ".tracelake" / "dev.json").write_text(json.dumps(handle))
    monkeypatch.delenv("TRACELAKE_URL")
    monkeypatch.setenv("TRACELAKE_TOKEN", "another-stack's")
    assert Client().query("SELECT 1 AS n").num_rows == 1
    assert Client(home=tmp_path / ".tracelake").query("SELECT 1 AS n").num_rows == 1
    with pytest.raises(Unavailable, match="no stack runs on the home"):
        Client(home=tmp_path / "elsewhere")


def test_the_command_prints_a_table_for_people(command: Any) -> None:
    ended = command("query", "SELECT 1 AS n, 'two' AS t")
    assert (ended.code, ended.out) == (0, "n  t\n1  two\n")
    assert ended.err.startswith("1 row in ")


def test_a_table_for_people_ends_somewhere_and_says_so(command: Any, service: Service) -> None:
    ended = command("query", ROWS)
    assert len(ended.out.splitlines()) == 101
    assert "there is more: these are the first 100 rows" in ended.err
    assert command("query", ROWS, "--limit", "2").out == "n  t\n0  0\n1  1\n"


def test_the_command_prints_json_with_every_digit(command: Any) -> None:
    ended = command("query", f"SELECT CAST({2**100} AS HUGEINT) AS n, [1, NULL] AS l", "--json")
    said = json.loads(ended.out)
    assert (said["columns"], said["row_count"], said["truncated"]) == (["n", "l"], 1, False)
    assert said["rows"][0][1] == [1, None]
    assert json.loads(command("query", ROWS, "--json").out)["row_count"] == 10_000


def test_the_command_prints_csv(command: Any) -> None:
    ended = command("query", """SELECT 'a,"b"' AS t, NULL AS nothing, true AS yes, [1] AS l""", "--csv")
    assert list(csv.reader(ended.out.splitlines())) == [
        ["t", "nothing", "yes", "l"],
        ['a,"b"', "", "true", "[1]"],
    ]


def test_the_command_writes_parquet_whole_or_not_at_all(
    command: Any, service: Service, tmp_path: Path
) -> None:
    file = tmp_path / "rows.parquet"
    ended = command("query", ROWS, "--parquet", str(file))
    assert ended.code == 0
    assert pq.read_table(file).num_rows == 10_000
    assert "10,000 rows" in ended.err
    assert command("query", ROWS, "--parquet", str(file)).code == 2
    service.breaks = 5000
    assert command("query", "SELECT 1 AS n", "--parquet", str(tmp_path / "ok.parquet"), "--force").code == 0
    assert command("query", ROWS, "--parquet", str(file), "--force").code == 3
    assert pq.read_table(file).num_rows == 10_000
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ok.parquet", "rows.parquet"]


def test_sql_comes_from_a_file_or_from_standard_input(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "question.sql").write_text("SELECT n FROM hashes WHERE hash = $h AND n < $n\n")
    hashed = f"h=0x{HASH.hex()}"
    assert command("query", "--file", "question.sql", "-p", hashed, "-p", "n=2", "--csv").out == "n\n1\n"
    monkeypatch.setattr("sys.stdin", io.StringIO((tmp_path / "question.sql").read_text()))
    assert command("query", "-", "-p", hashed, "-p", "n=0", "--csv").out == "n\n"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("SELECT 1", "--file", "x.sql"),
        ("SELECT 1", "--json", "--csv"),
        ("SELECT 1", "-p", "a=1", "-p", "2"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused_before_it_is_sent(
    command: Any, service: Service, arguments: tuple[str, ...]
) -> None:
    assert command("query", *arguments).code == 2
    assert service.asked == []


def test_a_bad_query_is_shown_with_the_place(command: Any) -> None:
    ended = command("query", "SELECT n FRO hashes")
    lines = ended.err.splitlines()
    assert (ended.code, ended.out) == (2, "")
    assert lines[0].startswith("error: Parser Error")
    assert any(line.startswith("LINE 1: SELECT n FRO hashes") for line in lines)
    assert set(lines[-1].strip()) == {"^"}


def test_no_query_service_and_no_stack_are_two_things(
    command: Any, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.away = True
    ended = command("query", "SELECT 1")
    assert (ended.code, ended.err) == (1, "error: this installation has no Query Service\n")
    monkeypatch.delenv("TRACELAKE_URL")
    ended = command("query", "SELECT 1")
    assert ended.code == 3
    assert "start one with `tracelake dev" in ended.err
