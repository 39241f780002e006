"""A recorded chain answers what the chain answered, from one file, in a process of its own."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.anvil import Anvil, build_random_chain
from tests.support.chain_replay import recording as record_module
from tests.support.chain_replay.recording import (
    Recording,
    Standard,
    record,
    record_devchain,
    standard_recording,
)
from tests.support.chain_replay.server import ReplayMethods, replaying
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import running, serving
from tracelake.evm.devchain.transactions import TRANSFER

HEAD = 25
NOBODY = "0x" + "00" * 32  # who coins come from when they are made


def answers(url: str, calls: list[tuple[str, list[Any]]]) -> list[Any]:
    batch = [
        {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        for number, (method, params) in enumerate(calls)
    ]
    with httpx.Client(timeout=60, trust_env=False) as http:
        said = http.post(url, json=batch).raise_for_status().json()
    return [each["result"] for each in said]


def questions(url: str) -> list[tuple[str, list[Any]]]:
    """Everything that the readers of a chain ask, about the chain behind ``url``."""
    calls: list[tuple[str, list[Any]]] = [("eth_chainId", []), ("eth_blockNumber", []), ("net_version", [])]
    for height in range(HEAD + 1):
        (block,) = answers(url, [("eth_getBlockByNumber", [hex(height), True])])
        calls += [("eth_getBlockByNumber", [hex(height), full]) for full in (True, False)]
        calls += [("eth_getBlockByHash", [block["hash"], False]), ("eth_getBlockReceipts", [hex(height)])]
        calls += [("eth_getLogs", [{"blockHash": block["hash"]}])]
        for each in block["transactions"]:
            calls += [
                ("eth_getTransactionByHash", [each["hash"]]),
                ("eth_getTransactionReceipt", [each["hash"]]),
            ]
    whole = {"fromBlock": "0x0", "toBlock": hex(HEAD)}
    calls += [("eth_getLogs", [whole | {"topics": topics}]) for topics in ([], [TRANSFER], [None, [NOBODY]])]
    calls += [("eth_getBlockByNumber", [hex(HEAD + 1), True]), ("eth_getBlockReceipts", [hex(HEAD + 1)])]
    calls += [("eth_getTransactionReceipt", ["0x" + "ee" * 32]), ("eth_getBlockByNumber", ["latest", False])]
    return calls


def test_a_recorded_dev_chain_answers_as_the_chain_does(tmp_path: Path) -> None:
    with running(DevChain(6, blocks=HEAD)) as node:
        assert record(node.url, 0, HEAD, tmp_path / "chain") == HEAD + 1
        calls = questions(node.url)
        with replaying(tmp_path / "chain") as url:
            assert answers(url, calls) == answers(node.url, calls)


def test_a_recorded_node_answers_as_the_node_does(anvil: Anvil, tmp_path: Path) -> None:
    build_random_chain(anvil, seed=6, blocks=HEAD)
    record(anvil.url, 0, HEAD, tmp_path / "chain")
    calls = questions(anvil.url)
    with serving(ReplayMethods(Recording(tmp_path / "chain"))) as url:
        assert answers(url, calls) == answers(anvil.url, calls)


def test_a_part_of_a_chain_is_a_chain_that_begins_later(tmp_path: Path) -> None:
    record_devchain(DevChain(6, blocks=HEAD), 10, 20, tmp_path / "chain")
    with serving(ReplayMethods(Recording(tmp_path / "chain"))) as url:
        earliest, latest, before, after = answers(
            url, [("eth_getBlockByNumber", [name, False]) for name in ("earliest", "latest", "0x9", "0x15")]
        )
    assert (earliest["number"], latest["number"]) == ("0xa", "0x14")
    assert before is after is None


def test_recording_a_dev_chain_with_and_without_a_server_gives_the_same_file(tmp_path: Path) -> None:
    chain = DevChain(6, blocks=HEAD)
    record_devchain(chain, 0, HEAD, tmp_path / "direct")
    with running(chain) as node:
        record(node.url, 0, HEAD, tmp_path / "served")
    assert (tmp_path / "direct").read_bytes() == (tmp_path / "served").read_bytes()


def test_a_standard_recording_is_made_once_and_always_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(record_module.STANDARD, "plain", Standard(blocks=10, transactions=5, logs=2))
    one, other = (standard_recording("plain", tmp_path / name) for name in ("one", "other"))
    assert one.name == other.name
    assert one.read_bytes() == other.read_bytes()
    recorded = Recording(one).blocks[1:]
    assert [len(block.hashes) for block in recorded] == [5] * 10
    made = one.stat()
    assert standard_recording("plain", tmp_path / "one").stat() == made


def test_a_recording_that_fails_leaves_no_file_that_looks_complete(tmp_path: Path) -> None:
    with running(DevChain(6, blocks=5)) as node, pytest.raises(Invalid, match="block 6"):
        record(node.url, 0, 9, tmp_path / "chain")
    with pytest.raises(Invalid, match="block 6"):
        record_devchain(DevChain(6, blocks=5), 0, 9, tmp_path / "chain")
    assert not (tmp_path / "chain").exists()


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chain").write_bytes(b"something else entirely")
    with pytest.raises(Invalid, match="isn't a recorded chain"):
        Recording(tmp_path / "chain")
    with pytest.raises(Unavailable, match="didn't start"), replaying(tmp_path / "chain"):
        pass
    assert "isn't a recorded chain" in capfd.readouterr().err


def test_what_a_recording_does_not_have_is_an_error(tmp_path: Path) -> None:
    record_devchain(DevChain(6, blocks=3), 0, 3, tmp_path / "chain")
    with serving(ReplayMethods(Recording(tmp_path / "chain"))) as url, httpx.Client(trust_env=False) as http:
        for method, params, code in (
            ("trace_block", ["0x1"], -32601),
            ("eth_getBlockByNumber", ["one", True], -32602),
            ("eth_getBlockByNumber", [], -32602),
            ("eth_getLogs", [{"blockHash": "0x" + "ee" * 32}], -32000),
        ):
            asked = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            assert http.post(url, json=asked).json()["error"]["code"] == code
