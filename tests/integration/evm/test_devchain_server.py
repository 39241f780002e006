"""The dev chain as a node on a port: over HTTP, as a command of its own, and while it changes."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.jsonrpc import MAX_BODY, MOST_ANSWER_BYTES
from tracelake.evm.devchain.methods import ChainMethods
from tracelake.evm.devchain.server import RunningChain, running, serving

PATIENCE = 30.0


@pytest.fixture
def node() -> Iterator[RunningChain]:
    with running(DevChain(5, blocks=30)) as node:
        yield node


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
        yield client


def asked(method: str, *params: Any, number: int = 1) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


def result(http: httpx.Client, url: str, method: str, *params: Any) -> Any:
    return http.post(url, json=asked(method, *params)).raise_for_status().json()["result"]


def test_a_chain_in_a_thread_is_a_node_that_the_test_can_change(
    node: RunningChain, http: httpx.Client
) -> None:
    assert result(http, node.url, "eth_blockNumber") == "0x1e"
    before = result(http, node.url, "eth_getBlockByNumber", "latest", True)
    node.chain.reorg(3, 5)
    assert result(http, node.url, "eth_blockNumber") == "0x20"
    assert result(http, node.url, "eth_getBlockByHash", before["hash"], True) is None
    assert result(http, node.url, "devchain_mine", 2) == hex(node.chain.head) == "0x22"


def test_a_large_batch_is_answered_whole(node: RunningChain, http: httpx.Client) -> None:
    batch = [asked("eth_getBlockByNumber", hex(each % 31), True, number=each) for each in range(1000)]
    answers = http.post(node.url, json=batch).json()
    assert [each["id"] for each in answers] == list(range(1000))
    assert all(int(each["result"]["number"], 16) == each["id"] % 31 for each in answers)


def test_requests_that_come_in_one_go_are_answered_in_their_order(node: RunningChain) -> None:
    bodies = [orjson.dumps(asked("eth_getBlockByNumber", hex(each), True, number=each)) for each in range(31)]
    requests = b"".join(
        b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(each), each) for each in bodies
    )
    host, port = node.url.removeprefix("http://").split(":")
    with (
        socket.create_connection((host, int(port)), PATIENCE) as connection,
        connection.makefile("rb") as reader,
    ):
        connection.sendall(requests)
        for each in range(31):
            assert reader.readline() == b"HTTP/1.1 200 OK\r\n"
            size = 0
            while (line := reader.readline()) != b"\r\n":
                name, _, value = line.partition(b":")
                size = int(value) if name == b"content-length" else size
            assert orjson.loads(reader.read(size))["id"] == each


def test_what_is_no_request_is_refused_and_the_server_goes_on(node: RunningChain, http: httpx.Client) -> None:
    assert http.get(node.url).status_code == 405
    assert http.post(node.url, content=b" " * (MAX_BODY + 1)).status_code == 413
    host, port = node.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), PATIENCE) as connection:
        connection.sendall(b"\x16\x03\x01 not http at all\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    with socket.create_connection((host, int(port)), PATIENCE) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\ncontent-length: 50\r\n\r\n{")
    assert result(http, node.url, "eth_blockNumber") == "0x1e"


def test_an_answer_about_several_blocks_never_mixes_forks(node: RunningChain, http: httpx.Client) -> None:
    done = threading.Event()
    forks = [{block.hash for block in node.chain.blocks(11, 30)}]

    def change_its_mind() -> None:
        while not done.is_set():
            node.chain.reorg(20)
            forks.append({block.hash for block in node.chain.blocks(11, 30)})

    changing = threading.Thread(target=change_its_mind)
    changing.start()
    try:
        asked_for = {"fromBlock": "0xb", "toBlock": "0x1e"}
        answers = [result(http, node.url, "eth_getLogs", asked_for) for _ in range(20)]
    finally:
        done.set()
        changing.join()
    for logs in answers:
        assert any({log["blockHash"] for log in logs} <= fork for fork in forks)


def test_the_port_is_free_again_when_the_chain_has_stopped() -> None:
    with running(DevChain()) as node, httpx.Client(trust_env=False) as http:
        result(http, node.url, "eth_chainId")
    with pytest.raises(httpx.ConnectError):
        httpx.post(node.url, json=asked("eth_chainId"), trust_env=False)


@contextmanager
def devchain(*options: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tracelake", "devchain", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_command_says_where_it_listens_grows_and_ends_when_told(http: httpx.Client) -> None:
    options = ("--port", "0", "--blocks", "20", "--block-time", "5ms", "--seed", "9", "--reorg-every", "3")
    with devchain(*options) as process:
        assert process.stdout is not None
        word, url, *_, head, tip = process.stdout.readline().decode().split()
        expected = DevChain(9, blocks=20).block(20)
        assert expected is not None
        assert (word, head, tip) == ("ready", "20", expected.hash)
        while int(result(http, url, "eth_blockNumber"), 16) < 40:
            assert process.poll() is None
        assert result(http, url, "eth_getBlockByHash", tip, False) is not None
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


def test_no_call_takes_more_than_a_chain_has_and_none_keeps_it_from_ending(http: httpx.Client) -> None:
    with devchain("--port", "0", "--blocks", "20", "--block-time", "0") as process:
        assert process.stdout is not None
        url = process.stdout.readline().decode().split()[1]
        for method, *params in (
            ("devchain_mine", 100_000_000_000),
            ("devchain_mine", 10_001),
            ("devchain_reorg", 10, 100_000_000_000),
            ("devchain_reorg", 10, 10_001),
            ("devchain_reorg", 10_001),
            ("devchain_rollback", 10_001),
        ):
            assert "error" in http.post(url, json=asked(method, *params)).json(), (method, params)
        assert result(http, url, "eth_blockNumber") == "0x14"
        # One that may be asked for, and takes a while.
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), PATIENCE) as busy:
            body = orjson.dumps([asked("devchain_mine", 10_000)] * 50)
            busy.sendall(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            before = process_seconds(process.pid)
            while process_seconds(process.pid) < before + 0.3:
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0


def process_seconds(pid: int) -> float:
    """How long it has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_batch_and_its_answer_are_bounded(node: RunningChain, http: httpx.Client) -> None:
    call = asked("eth_getLogs", {"fromBlock": "0x0", "toBlock": "latest"})
    one = len(http.post(node.url, json=call).content)
    said = http.post(node.url, json=[call] * 1001).json()
    assert said["error"]["message"] == "a batch has at most 1000 calls"
    node.chain.mine(MOST_ANSWER_BYTES // one // 20)
    said = http.post(node.url, json=[call] * 1000).json()
    assert said["error"]["message"] == f"the answer is larger than {MOST_ANSWER_BYTES} bytes"


def test_requests_whose_answers_nobody_reads_are_not_answered_ahead(node: RunningChain) -> None:
    calls = 0
    answered = ChainMethods(node.chain).call

    class Counted:
        def call(self, *arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return answered(*arguments)

    body = orjson.dumps(asked("eth_getLogs", {"fromBlock": "0x0", "toBlock": "latest"}))
    node.chain.mine(300)
    request = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    with (
        serving(Counted()) as url,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), PATIENCE) as connection,
        connection.makefile("rb") as reader,
    ):
        connection.sendall(request * 100)
        reader.readline()
        assert calls < 60
        got = 1
        while got < 100:
            got += reader.readline().count(b"HTTP/1.1 200 OK")
        assert calls == 100


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_chain_that_is_still_being_made_tells_how_far_it_is_and_stops_when_told(
    sign: signal.Signals,
) -> None:
    with devchain("--port", "0", "--blocks", "1000000") as process:
        assert process.stderr is not None
        assert process.stderr.readline().endswith(b" of 1,000,001 blocks\n")
        process.send_signal(sign)
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--blocks", "999999999999"), "--blocks"),
        (("--blocks", "1000000", "--transactions", "2000"), "2,000,000,000 transactions"),
        (("--transactions", "2000", "--logs", "2000"), "4,000,000 logs per block"),
        (("--block-time", "999999999m"), "--block-time"),
        (("--block-time", "0.000001ms"), "--block-time"),
        (("--reorg-depth", "999999999999"), "--reorg-depth"),
    ],
)
def test_a_chain_that_is_too_large_is_refused(options: tuple[str, ...], named: str) -> None:
    with devchain("--port", "0", *options) as process:
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode not in (0, None)
        assert named in said.decode()


def test_the_command_speaks_json_to_programs() -> None:
    with devchain(
        "--port", "0", "--blocks", "3", "--block-time", "0", "--chain-id", "77", "--json"
    ) as process:
        assert process.stdout is not None
        said = b"".join(process.stdout.readline() for _ in range(6))
        told = orjson.loads(said)
        assert (told["chain_id"], told["head"]) == (77, 3)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--block-time", "soon"), "--block-time soon"),
        (("--block-time", "0", "--reorg-every", "5"), "--reorg-every needs a --block-time"),
        (("--host", "256.1.1.1"), "can't listen on 256.1.1.1"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(options: tuple[str, ...], said: str) -> None:
    with devchain("--port", "0", *options) as process:
        output, errors = process.communicate(timeout=PATIENCE)
    assert output == b""
    assert errors.decode().startswith("error: ")
    assert said in errors.decode()
    assert errors.count(b"\n") == 1


def test_a_port_that_is_taken_is_named(node: RunningChain) -> None:
    port = node.url.rpartition(":")[2]
    with devchain("--port", port) as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert f"can't listen on 127.0.0.1:{port}" in errors.decode()
    assert process.returncode == 1
