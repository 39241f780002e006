"""The two clients for functions, in Python and in Node, ask for the same things in the same words."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

import pytest

from tracelake.worker.lambda_.function_program import find_node

FUNCTIONS = resources.files("tracelake.functions")
EVENT: dict[str, Any] = {
    "task_id": "00000000-0000-0000-0000-000000000001",
    "attempt": 2,
    "lease_token": "00000000-0000-0000-0000-000000000002",
    "capability_token": "this-attempts-token",
    "job": {"dag_name": "alerts", "name": "watch"},
    "config": {},
    "inputs": [
        {"dataset": "transfers", "after": 5, "upto": 9, "where": None, "cursor_column": None},
        {
            "dataset": "alert_events",
            "after": -1,
            "upto": 3,
            "where": "a = 1 OR b",
            "cursor_column": "position",
        },
        {"dataset": None, "start": 10, "end": 19},
        {"dataset": "tokens", "trigger": False},
    ],
    "outputs": [],
}
PYTHON = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tracelake_function import Task, TaskError
task = Task(json.loads(sys.argv[2]), sys.argv[3])
said = [[task.window(i), task.table(i)] for i in range(4)]
said.append(task.query("SELECT 1", [1, "a", bytes([171]), None], 5))
said.append(task.query("SELECT $a", {"a": 2**70, "b": [bytes([0])]}))
said.append(task.publish("alerts", []))
said.append(task.publish("alerts", [{"n": 2**70, "b": bytes([1, 2]), "t": "ü"}], "sha256:0"))
said.append(task.publish("big", ({"text": "x" * 3_000_000} for _ in range(3))))
try:
    task.query("refuse me")
except TaskError as error:
    said.append([error.status, error.reason, str(error)])
print(json.dumps(said))
"""
NODE = """
const { Task, TaskError } = require(process.argv[1] + "/node/tracelake_function.js");
const shown = (_, value) => (typeof value === "bigint" ? `BigInt ${value}` : value);
(async () => {
  const task = new Task(JSON.parse(process.argv[2]), process.argv[3]);
  const said = [0, 1, 2, 3].map((index) => [task.window(index), task.table(index)]);
  said.push(await task.query("SELECT 1", [1, "a", Buffer.from([171]), null], { limit: 5 }));
  said.push(await task.query("SELECT $a", { a: 2n ** 70n, b: [new Uint8Array([0])] }));
  said.push(await task.publish("alerts", []));
  said.push(await task.publish("alerts", [{ n: 2n ** 70n, b: Buffer.from([1, 2]), t: "ü" }], "sha256:0"));
  said.push(await task.publish("big", Array(3).fill({ text: "x".repeat(3_000_000) })));
  await task.query("refuse me").catch((error) => said.push([error.status, error.reason, error.message]));
  console.log(JSON.stringify(said, shown));
})();
"""


ROWS = [[2**53 + 1], [7], [0.12345678901234568], [-1.2345678901234567e-7], ['a 12345678901234567890 \\"']]


@dataclass
class Platform:
    url: str = ""
    heard: list[tuple[str, str | None, Any]] = field(default_factory=list)

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if body.get("sql") == "refuse me":
            return 422, {"reason": "QueryRefused", "detail": "no"}
        if path.endswith("/buffer-publish"):
            return 200, {"accepted": len(body["records"]), "batch_id": f"batch {len(self.heard)}"}
        return 200, {"columns": ["n"], "rows": ROWS, "row_count": 5, "truncated": False}


@pytest.fixture
def platform() -> Iterator[Platform]:
    served = Platform()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.heard.append((self.path, self.headers["X-Trace-Task-Capability"], body))
            status, said = served.answer(self.path, body)
            content = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield served
    server.shutdown()
    thread.join()
    server.server_close()


def ran(language: str, url: str) -> Any:
    program = [sys.executable, "-I", "-c", PYTHON] if language == "python" else [str(find_node()), "-e", NODE]
    done = subprocess.run(
        [*program, str(FUNCTIONS), json.dumps(EVENT), url], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("language", ["python", "node"])
def test_a_function_asks_for_its_window_and_publishes_what_it_finds(
    platform: Platform, language: str
) -> None:
    windows, answers = (said := ran(language, platform.url))[:4], said[4:]
    assert windows == [
        ["(block_number > 5 AND block_number <= 9)", "transfers"],
        ["(position > -1 AND position <= 3 AND (a = 1 OR b))", "alert_events"],
        ["(block_number >= 10 AND block_number <= 19)", "input_2"],
        ["(TRUE)", "tokens"],
    ]
    exact = 2**53 + 1 if language == "python" else f"BigInt {2**53 + 1}"
    assert answers[0]["rows"] == [[exact], *ROWS[1:]]
    assert answers[2] == {"accepted": 0, "batch_id": None}
    assert answers[3] == {"accepted": 1, "batch_id": "batch 3"}
    assert answers[4] == {"accepted": 3, "batch_id": "batch 5"}
    assert answers[5] == [422, "QueryRefused", "QueryRefused: no"]
    assert {token for _, token, _ in platform.heard} == {"this-attempts-token"}
    asked = [(path.removeprefix("/v1/task/"), body) for path, _, body in platform.heard]
    fence = {name: EVENT[name] for name in ("task_id", "attempt", "lease_token")}
    assert asked[:3] == [
        ("query", {"sql": "SELECT 1", "params": [1, "a", {"blob": "0xab"}, None], "limit": 5}),
        ("query", {"sql": "SELECT $a", "params": {"a": 2**70, "b": [{"blob": "0x00"}]}}),
        (
            "buffer-publish",
            {
                **fence,
                "dataset": "alerts",
                "schema_hash": "sha256:0",
                "records": [{"n": 2**70, "b": "0x0102", "t": "ü"}],
            },
        ),
    ]
    assert [len(body["records"]) for _, body in asked[3:5]] == [2, 1]
