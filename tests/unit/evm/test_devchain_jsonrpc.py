"""What the dev chain's server answers to requests of every form, from bytes to bytes."""

from typing import Any

import orjson
import pytest

from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.jsonrpc import RpcCaller, respond
from tracelake.evm.devchain.methods import MOST_LOG_BLOCKS, ChainMethods
from tracelake.evm.devchain.transactions import TRANSFER

HERE = RpcCaller(loopback=True)
NOWHERE = "0x" + "ee" * 32


@pytest.fixture
def chain() -> DevChain:
    return DevChain(5, blocks=40, finality=10)


def answer(chain: DevChain, body: bytes, caller: RpcCaller = HERE) -> Any:
    return orjson.loads(b"".join(respond(body, ChainMethods(chain), caller)))


def call(chain: DevChain, method: str, *params: Any, caller: RpcCaller = HERE) -> Any:
    return answer(
        chain, orjson.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}), caller
    )


def result(chain: DevChain, method: str, *params: Any) -> Any:
    return call(chain, method, *params)["result"]


def code(chain: DevChain, method: str, *params: Any) -> int:
    said: int = call(chain, method, *params)["error"]["code"]
    return said


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b"", -32700),
        (b'{"jsonrpc"', -32700),
        (b"[]", -32600),
        (b"3", -32600),
        (b'{"id": 1}', -32600),
        (b'{"id": 1, "method": 5}', -32600),
        (b'{"id": 1, "method": "eth_chainId", "params": {"a": 1}}', -32602),
        (b'{"id": 1, "method": "eth_sendTransaction", "params": [{}]}', -32601),
    ],
)
def test_a_request_that_makes_no_sense_gets_the_error_of_the_standard(
    chain: DevChain, body: bytes, wanted: int
) -> None:
    assert answer(chain, body)["error"]["code"] == wanted


def test_a_batch_is_answered_item_by_item_with_the_ids_it_came_with(chain: DevChain) -> None:
    batch = [
        {"id": "a", "method": "eth_chainId"},
        {"id": 2**60, "method": "nonsense"},
        7,
        {"method": "eth_chainId"},
        {"id": None, "method": "eth_blockNumber", "params": []},
    ]
    answers = answer(chain, orjson.dumps(batch))
    assert [each["id"] for each in answers] == ["a", 2**60, None, None]
    assert [each.get("result") for each in answers] == [hex(chain.chain_id), None, None, "0x28"]


def test_a_notification_gets_no_answer(chain: DevChain) -> None:
    assert respond(b'{"method": "eth_chainId"}', ChainMethods(chain), HERE) == []
    assert respond(b'[{"method": "eth_chainId"}]', ChainMethods(chain), HERE) == []


def test_the_names_of_blocks_mean_what_they_mean_on_a_node(chain: DevChain) -> None:
    for name, number in (
        *(("latest", 40), ("pending", 40), ("safe", 35), ("finalized", 30), ("earliest", 0)),
        *(("0x0", 0), ("0x1F", 31)),
    ):
        assert result(chain, "eth_getBlockByNumber", name, False)["number"] == hex(number)
    for wrong in ("31", "0x", "0x01", "newest", 31, None, "0x" + "f" * 17):
        assert code(chain, "eth_getBlockByNumber", wrong, False) == -32602


def test_finality_that_a_chain_does_not_have_is_an_error() -> None:
    assert code(DevChain(blocks=9, finality=None), "eth_getBlockByNumber", "finalized", False) == -32000


def test_what_lies_past_the_head_is_null_and_its_logs_are_none(chain: DevChain) -> None:
    assert result(chain, "eth_getBlockByNumber", "0x29", True) is None
    assert result(chain, "eth_getBlockReceipts", "0x29") is None
    assert result(chain, "trace_block", "0x29") is None
    assert result(chain, "eth_getLogs", {"fromBlock": "0x29", "toBlock": "0x30"}) == []
    for method in ("eth_getTransactionByHash", "eth_getTransactionReceipt"):
        assert result(chain, method, NOWHERE) is None
    assert result(chain, "eth_getBlockByHash", NOWHERE, False) is None


def test_a_block_is_the_same_by_number_and_by_hash_with_and_without_transactions(chain: DevChain) -> None:
    full = result(chain, "eth_getBlockByNumber", "0x15", True)
    slim = result(chain, "eth_getBlockByNumber", "0x15", False)
    assert full | {"transactions": [each["hash"] for each in full["transactions"]]} == slim
    assert result(chain, "eth_getBlockByHash", full["hash"], True) == full
    receipts = result(chain, "eth_getBlockReceipts", "0x15")
    assert result(chain, "eth_getBlockReceipts", full["hash"]) == receipts
    assert result(chain, "eth_getBlockReceipts", {"blockHash": full["hash"]}) == receipts
    for transaction, receipt in zip(full["transactions"], receipts, strict=True):
        assert result(chain, "eth_getTransactionByHash", transaction["hash"]) == transaction
        assert result(chain, "eth_getTransactionReceipt", transaction["hash"]) == receipt


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("eth_getBlockByNumber", ["latest"]),
        ("eth_getBlockByNumber", ["latest", "yes"]),
        ("eth_getBlockByNumber", ["latest", True, 1]),
        ("eth_getBlockByHash", ["0x12", True]),
        ("eth_getTransactionReceipt", []),
        ("eth_getLogs", ["latest"]),
        ("eth_getLogs", [{"fromBlock": "0x5", "toBlock": "0x4"}]),
        ("eth_getLogs", [{"blockHash": NOWHERE, "fromBlock": "0x4"}]),
        ("eth_getLogs", [{"address": "0x12"}]),
        ("eth_getLogs", [{"topics": [NOWHERE] * 5}]),
        ("eth_getLogs", [{"topics": ["0x12"]}]),
        ("devchain_mine", [-1]),
        ("devchain_mine", ["many"]),
        ("devchain_reorg", [41]),
        ("devchain_reorg", []),
        ("devchain_finalize", ["0x29"]),
    ],
)
def test_parameters_that_make_no_sense_are_refused(chain: DevChain, method: str, params: list[Any]) -> None:
    assert code(chain, method, *params) == -32602
    assert chain.head == 40


def test_logs_are_those_of_the_receipts_in_their_order(chain: DevChain) -> None:
    wanted = [
        log
        for height in range(5, 26)
        for receipt in result(chain, "eth_getBlockReceipts", hex(height))
        for log in receipt["logs"]
    ]
    assert len(wanted) > 50
    assert result(chain, "eth_getLogs", {"fromBlock": "0x5", "toBlock": "0x19"}) == wanted
    by_hash = {log["blockHash"] for log in wanted}
    assert sum(len(result(chain, "eth_getLogs", {"blockHash": each})) for each in by_hash) == len(wanted)


def test_logs_are_filtered_by_address_and_by_topics(chain: DevChain) -> None:
    def logs(**given: Any) -> list[Any]:
        found: list[Any] = result(chain, "eth_getLogs", {"fromBlock": "0x0", "toBlock": "0x28"} | given)
        return found

    everything = logs()
    coin = next(log["address"] for log in everything if len(log["topics"]) == 3)
    other = next(log["address"] for log in everything if log["address"] != coin)
    assert logs(address=coin.upper().replace("X", "x")) == [
        log for log in everything if log["address"] == coin
    ]
    assert logs(address=[coin, other]) == [log for log in everything if log["address"] in (coin, other)]
    assert logs(topics=[TRANSFER]) == [log for log in everything if log["topics"][:1] == [TRANSFER]]
    assert logs(topics=[]) == everything
    assert logs(topics=[None]) == [log for log in everything if log["topics"]]
    assert logs(topics=[None, None, None, None]) == [log for log in everything if len(log["topics"]) == 4]
    receiver = next(log["topics"][2] for log in everything if len(log["topics"]) >= 3)
    second = logs(topics=[[TRANSFER, NOWHERE], None, [receiver]])
    assert second
    assert all(log["topics"][0] == TRANSFER and log["topics"][2] == receiver for log in second)
    assert logs(topics=[NOWHERE]) == []


def test_a_range_that_is_too_large_for_logs_is_refused_with_its_limit() -> None:
    chain = DevChain(blocks=MOST_LOG_BLOCKS * 2)
    said = call(chain, "eth_getLogs", {"fromBlock": "0x0", "toBlock": hex(MOST_LOG_BLOCKS)})["error"]
    assert str(MOST_LOG_BLOCKS) in said["message"]


def test_logs_of_a_block_that_a_reorg_took_away_are_an_error_not_an_empty_list(chain: DevChain) -> None:
    gone = result(chain, "eth_getBlockByNumber", "latest", False)["hash"]
    chain.reorg(1)
    assert code(chain, "eth_getLogs", {"blockHash": gone}) == -32000


def test_every_transaction_has_its_outer_trace(chain: DevChain) -> None:
    for height in range(1, 30):
        block = result(chain, "eth_getBlockByNumber", hex(height), True)
        outer = [each for each in result(chain, "trace_block", hex(height)) if each["traceAddress"] == []]
        assert [each["transactionHash"] for each in outer] == [each["hash"] for each in block["transactions"]]


def test_control_methods_change_the_chain(chain: DevChain) -> None:
    assert result(chain, "devchain_mine") == "0x29"
    assert result(chain, "devchain_mine", 9) == "0x32"
    assert result(chain, "devchain_reorg", 5, "0x7") == "0x34"
    assert result(chain, "devchain_rollback", 2) == hex(chain.head) == "0x32"
    assert result(chain, "devchain_finalize", "0x30") is None
    assert chain.finalized == 48


def test_control_methods_do_not_exist_for_callers_from_elsewhere(chain: DevChain) -> None:
    for method in ("devchain_mine", "devchain_reorg", "devchain_rollback", "devchain_finalize"):
        said = call(chain, method, 1, caller=RpcCaller(loopback=False))
        assert said["error"]["code"] == -32601
    assert chain.head == 40


def test_what_tools_ask_before_they_start_is_answered(chain: DevChain) -> None:
    assert result(chain, "net_version") == str(chain.chain_id)
    assert result(chain, "eth_syncing") is False
    assert result(chain, "web3_clientVersion").startswith("tracelake-devchain/")
