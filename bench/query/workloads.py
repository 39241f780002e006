"""The queries, and the two ways to ask them: over the service's port, and of plain DuckDB in this process."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import duckdb
import msgspec

from bench.query.data import LOGS_PER_BLOCK, contract
from bench.query.service import Running
from tracelake.evm.raw_block import ChainTable

Params = list[Any]
WARM_RUNS = 3


@dataclass(frozen=True, slots=True)
class Workload:
    """``params`` draws the values of one run; both ways get the same."""

    name: str
    sql: str
    params: Callable[[random.Random, int], Params]
    runs: int


POINT = Workload(
    "point lookup",
    "SELECT * FROM logs WHERE block_number = ? AND log_index = ?",
    lambda draw, last: [draw.randint(0, last), draw.randrange(LOGS_PER_BLOCK)],
    200,
)
AGGREGATE = Workload(
    "range aggregate",
    "SELECT topic0, count(*) AS n, min(block_number) AS first, max(block_number) AS last, "
    "sum(octet_length(data))::bigint AS bytes FROM logs WHERE block_number BETWEEN ? AND ? "
    "GROUP BY topic0 ORDER BY n DESC, topic0",
    lambda draw, last: [0, last],
    15,
)
JOIN = Workload(
    "join",
    "SELECT b.author, count(*) AS n, avg(b.gas_used)::bigint AS gas FROM logs l JOIN blocks b USING (block_number) "
    "WHERE l.address = unhex(?) AND l.block_number BETWEEN ? AND ? GROUP BY b.author ORDER BY n DESC, b.author",
    lambda draw, last: [contract(draw.randrange(100)).hex(), *_half(draw, last)],
    40,
)
WORKLOADS = (POINT, AGGREGATE, JOIN)


def _half(draw: random.Random, last: int) -> list[int]:
    start = draw.randint(0, last // 2)
    return [start, start + last // 2]


class Way(Protocol):
    def ask(self, sql: str, params: Params) -> int:
        """Run the query; returns the number of rows."""
        ...


class Service:
    """One connection, kept open, as a client has it."""

    def __init__(self, running: Running) -> None:
        parts = urlsplit(running.url)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=120)
        self._headers = {"Authorization": f"Bearer {running.token}", "Content-Type": "application/json"}

    def ask(self, sql: str, params: Params) -> int:
        body = msgspec.json.encode({"sql": sql, "params": params})
        self._connection.request("POST", "/v1/query", body, self._headers)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(content.decode())
        rows: int = msgspec.json.decode(content)["row_count"]
        return rows


class Plain:
    """DuckDB in this process, its connection and its views there already."""

    def __init__(self, files: Mapping[ChainTable, Sequence[str]], threads: int) -> None:
        self._connection = duckdb.connect(config={"threads": threads})
        for table, paths in files.items():
            self._connection.read_parquet(list(paths)).create_view(str(table))

    def cursor(self) -> Plain:
        other = Plain.__new__(Plain)
        other._connection = self._connection.cursor()
        return other

    def ask(self, sql: str, params: Params) -> int:
        return len(self._connection.execute(sql, params).fetchall())


def taking_turns(workload: Workload, ways: Mapping[str, Way], last: int) -> dict[str, list[float]]:
    """Seconds of each run, one way after the other, so that neighbours disturb them alike."""
    draw = random.Random(workload.name)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(WARM_RUNS):
        params = workload.params(draw, last)
        rows = {way.ask(workload.sql, params) for way in ways.values()}
        if len(rows) != 1:
            raise RuntimeError(f"{workload.name}: not the same rows: {rows}")
    for _ in range(workload.runs):
        params = workload.params(draw, last)
        for name, way in ways.items():
            began = time.perf_counter()
            way.ask(workload.sql, params)
            seconds[name].append(time.perf_counter() - began)
    return seconds


def at_once(clients: Sequence[Way], workload: Workload, last: int, for_seconds: float) -> list[float]:
    """Seconds of each run of all clients, who ask again and again."""
    seconds: list[float] = []
    end = time.perf_counter() + for_seconds

    def keep_asking(number: int, way: Way) -> None:
        draw = random.Random(number)
        while (began := time.perf_counter()) < end:
            way.ask(workload.sql, workload.params(draw, last))
            seconds.append(time.perf_counter() - began)

    threads = [threading.Thread(target=keep_asking, args=each) for each in enumerate(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds
