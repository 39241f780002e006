"""An endpoint that leaves out traces or gives another block's: neither ``evm_ingest`` nor the ``evm`` source takes
them, alone it fails by name, and beside an honest one the honest one's are used."""

from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest

from tests.support.faulty_rpc import Canned, FaultyRpc
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Unavailable
from tracelake.evm.decode import decode
from tracelake.evm.devchain.blocks import SealedBlock
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import RunningChain, running
from tracelake.evm.fetch import fetch_span
from tracelake.evm.raw_block import ChainTable, Senders, Verify
from tracelake.evm.rpc.config import pool_of
from tracelake.evm.source import BlockPartition, EvmReader, read_options

pytestmark = pytest.mark.usefixtures("no_pool_is_kept")

FIRST, LAST = 22, 26
WRONG = 24
Json = dict[str, Any]


@pytest.fixture(scope="module")
def node() -> Iterator[RunningChain]:
    with running(DevChain(3, blocks=30)) as served:
        yield served


def sealed(chain: DevChain, params: list[Any]) -> SealedBlock:
    found = chain.block(int(params[0], 16) if params[0].startswith("0x") else chain.head)
    assert found is not None
    return found


def answers(chain: DevChain, traces: Callable[[DevChain, int], list[Json]]) -> Canned:
    """What the chain answers, with other traces for one block."""

    def traced(params: list[Any]) -> list[Json]:
        number = int(params[0], 16)
        return traces(chain, number) if number == WRONG else honest(chain, number)

    return {
        "eth_chainId": hex(chain.chain_id),
        "eth_getBlockByNumber": lambda params: orjson.loads(sealed(chain, params).with_transactions),
        "eth_getBlockReceipts": lambda params: orjson.loads(sealed(chain, params).all_receipts),
        "trace_block": traced,
    }


def honest(chain: DevChain, number: int) -> list[Json]:
    traces: list[Json] = orjson.loads(sealed(chain, [hex(number)]).traces)
    return traces


def half(chain: DevChain, number: int) -> list[Json]:
    return (traces := honest(chain, number))[: len(traces) // 2]


def renamed(chain: DevChain, number: int) -> list[Json]:
    """Another block's, under this block's hash and number."""
    block = orjson.loads(sealed(chain, [hex(number)]).with_transactions)
    own = {"blockHash": block["hash"], "blockNumber": number}
    return [trace | own for trace in honest(chain, number - 1)]


def succeeded(chain: DevChain, number: int) -> list[Json]:
    return [trace | {"error": None, "result": {"gasUsed": "0x1"}} for trace in honest(chain, number)]


LIES: dict[str, Callable[[DevChain, int], list[Json]]] = {
    "none": lambda chain, number: [],
    "half": half,
    "another block's": lambda chain, number: honest(chain, number - 1),
    "another block's, renamed": renamed,
    "all succeeded": succeeded,
}


def by_source(urls: list[str], verify: Verify = Verify.FULL) -> list[Json]:
    options = {"url": ",".join(urls), "dataset": "traces", "start": str(FIRST), "end": str(LAST)}
    reader = EvmReader(read_options(options | {"verify": str(verify)}))
    batches = reader.read(BlockPartition(range(FIRST, LAST + 1)))
    return [row for batch in batches for row in batch.to_pylist()]


def by_ingest(urls: list[str], verify: Verify = Verify.FULL) -> list[Json]:
    span = BlockRange(FIRST, LAST)
    blocks = fetch_span(pool_of(*urls), span, [ChainTable.TRACES], verify, Senders.DERIVE, share=1.0)
    return decode(list(blocks), ChainTable.TRACES, DevChain(3, blocks=1).chain_id).to_pylist()


READERS = {"evm": by_source, "evm_ingest": by_ingest}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("reader", READERS)
def test_traces_that_lie_are_refused_and_those_of_another_endpoint_are_used(
    node: RunningChain, lie: str, reader: str
) -> None:
    read = READERS[reader]
    expected = by_ingest([node.url])
    with FaultyRpc(answers(node.chain, LIES[lie])) as liar:
        with pytest.raises(Unavailable, match=f"block {WRONG}"):
            read([liar.url])
        assert read([liar.url, node.url]) == expected


def test_without_verification_only_traces_of_another_block_are_refused(node: RunningChain) -> None:
    with FaultyRpc(answers(node.chain, LIES["half"])) as liar:
        assert 0 < len(by_source([liar.url], Verify.OFF)) < len(by_source([node.url], Verify.OFF))
        assert liar.calls("eth_getBlockReceipts") == 0
    with (
        FaultyRpc(answers(node.chain, LIES["another block's"])) as liar,
        pytest.raises(Unavailable, match=f"traces of another block for block {WRONG}"),
    ):
        by_source([liar.url], Verify.OFF)
