"""``ChainMethods``: a node's JSON-RPC methods over a dev chain, and ``devchain_*`` methods to change it.

Blocks past the head are null, as are their receipts; there are no logs past the head. ``devchain_*`` is answered to
callers on this machine alone. Parameters are parsed strictly, and refused with a node's errors. In the filter of
``eth_getLogs`` a list matches any of its members, and null matches anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from tracelake import __version__
from tracelake.domain.errors import Invalid
from tracelake.evm.devchain.blocks import LogEntry, SealedBlock
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.jsonrpc import (
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    NULL,
    SERVER_ERROR,
    RpcCaller,
    RpcError,
)
from tracelake.evm.devchain.profile import Growth

MOST_LOGS = 100_000
MOST_LOG_BLOCKS = 2_000
_CONTROL = "devchain_"
Method = Callable[[list[Any]], bytes]
_QUANTITY = re.compile(r"0x(0|[1-9a-f][0-9a-f]{0,15})", re.IGNORECASE)
_HASH = re.compile(r"0x[0-9a-f]{64}", re.IGNORECASE)
_ADDRESS = re.compile(r"0x[0-9a-f]{40}", re.IGNORECASE)
_MOST_TOPICS = 4


class ChainMethods:
    def __init__(self, chain: DevChain, growth: Growth | None = None) -> None:
        """``growth`` is shared with the autopilot, which adds blocks as well."""
        self._chain = chain
        self._growth = growth or Growth(chain.profile.transactions)
        self._methods: dict[str, Method] = {
            "eth_chainId": lambda params: _text(hex(chain.chain_id)),
            "net_version": lambda params: _text(str(chain.chain_id)),
            "web3_clientVersion": lambda params: _text(f"tracelake-devchain/{__version__}"),
            "eth_syncing": lambda params: b"false",
            "eth_blockNumber": lambda params: _text(hex(chain.head)),
            "eth_getBlockByNumber": self._block_by_number,
            "eth_getBlockByHash": self._block_by_hash,
            "eth_getBlockReceipts": self._block_receipts,
            "eth_getTransactionByHash": self._transaction,
            "eth_getTransactionReceipt": self._receipt,
            "eth_getLogs": self._logs,
            "trace_block": self._traces,
            "devchain_mine": self._mine,
            "devchain_reorg": self._reorg,
            "devchain_rollback": self._rollback,
            "devchain_finalize": self._finalize,
        }

    def call(self, method: str, params: list[Any], caller: RpcCaller) -> bytes:
        known = self._methods.get(method)
        # The same error as for an unknown method: another
        # machine doesn't learn that the chain can be changed.
        if known is None or (method.startswith(_CONTROL) and not caller.loopback):
            raise RpcError(METHOD_NOT_FOUND, f"the method {method} does not exist/is not available")
        try:
            return known(params)
        except Invalid as error:
            raise RpcError(INVALID_PARAMS, error.message) from None

    def _block_by_number(self, params: list[Any]) -> bytes:
        number, full = at_most(params, 2, 2)
        return _block(self._chain.block(height_of(self._chain, number)), flag_of(full))

    def _block_by_hash(self, params: list[Any]) -> bytes:
        block_hash, full = at_most(params, 2, 2)
        return _block(self._chain.block_by_hash(hash_of(block_hash)), flag_of(full))

    def _block_receipts(self, params: list[Any]) -> bytes:
        block = self._named_block(*at_most(params, 1, 1))
        return NULL if block is None else block.all_receipts

    def _transaction(self, params: list[Any]) -> bytes:
        found = self._chain.transaction(hash_of(*at_most(params, 1, 1)))
        return NULL if found is None else found[0].transactions[found[1]]

    def _receipt(self, params: list[Any]) -> bytes:
        found = self._chain.transaction(hash_of(*at_most(params, 1, 1)))
        return NULL if found is None else found[0].receipts[found[1]]

    def _traces(self, params: list[Any]) -> bytes:
        block = self._named_block(*at_most(params, 1, 1))
        return NULL if block is None else block.traces

    def _named_block(self, given: Any) -> SealedBlock | None:
        """A block by number, tag or hash, or by an object with one of them (EIP-1898)."""
        if isinstance(given, dict):
            given = given.get("blockHash", given.get("blockNumber"))
        # Longer than any number of 64 bits with its prefix.
        if isinstance(given, str) and len(given) > 18:
            return self._chain.block_by_hash(hash_of(given))
        return self._chain.block(height_of(self._chain, given))

    def _logs(self, params: list[Any]) -> bytes:
        (given,) = at_most(params, 1, 1)
        if not isinstance(given, dict):
            raise RpcError(INVALID_PARAMS, "invalid argument 0: an object is wanted")
        wanted = parse_filter(given)
        found: list[bytes] = []
        for block in self._blocks_of(given):
            found += [log.encoded for log in block.logs if wanted.matches(log)]
            if len(found) > MOST_LOGS:
                raise RpcError(SERVER_ERROR, f"query returned more than {MOST_LOGS} results")
        return b"[" + b",".join(found) + b"]"

    def _blocks_of(self, given: dict[str, Any]) -> list[SealedBlock]:
        chain = self._chain
        if "blockHash" in given:
            if "fromBlock" in given or "toBlock" in given:
                raise RpcError(INVALID_PARAMS, "blockHash and a range exclude each other")
            block = chain.block_by_hash(hash_of(given["blockHash"]))
            if block is None:
                raise RpcError(SERVER_ERROR, "unknown block")
            return [block]
        start = height_of(chain, given.get("fromBlock") or "latest")
        end = height_of(chain, given.get("toBlock") or "latest")
        if start > end:
            raise RpcError(INVALID_PARAMS, "invalid block range params")
        if end - start >= MOST_LOG_BLOCKS:
            raise RpcError(SERVER_ERROR, f"block range is larger than {MOST_LOG_BLOCKS} blocks")
        return chain.blocks(start, end)

    def _mine(self, params: list[Any]) -> bytes:
        (given,) = at_most(params, 0, 1)
        count = 1 if given is None else count_of(given)
        # Reserved before the blocks are made, so that two callers can't exceed the limit together.
        self._growth.add(count)
        return self._made(self._chain.mine(count))

    def _reorg(self, params: list[Any]) -> bytes:
        given, length = at_most(params, 1, 2)
        depth = count_of(given)
        new_length = depth if length is None else count_of(length)
        self._growth.check_depth(depth)
        self._growth.add(new_length)
        return self._made(self._chain.reorg(depth, new_length))

    def _rollback(self, params: list[Any]) -> bytes:
        depth = count_of(*at_most(params, 1, 1))
        self._growth.check_depth(depth)
        return _text(hex(self._chain.rollback(depth)))

    def _made(self, head: int) -> bytes:
        """Make new blocks before answering, so that the caller waits for them and not the first reader."""
        self._chain.block(head)
        return _text(hex(head))

    def _finalize(self, params: list[Any]) -> bytes:
        self._chain.finalize(height_of(self._chain, *at_most(params, 1, 1)))
        return NULL


def _block(block: SealedBlock | None, full: bool) -> bytes:
    if block is None:
        return NULL
    return block.with_transactions if full else block.with_hashes


def _text(value: str) -> bytes:
    return orjson.dumps(value)


def height_of(chain: DevChain, given: Any) -> int:
    """The height of a hexadecimal number or a tag."""
    match given:
        case "latest" | "pending":
            return chain.head
        case "earliest":
            return 0
        case "safe" | "finalized":
            height = chain.safe if given == "safe" else chain.finalized
            if height is None:
                raise RpcError(SERVER_ERROR, f"{given} block not found")
            return height
        case str() if _QUANTITY.fullmatch(given):
            return int(given, 16)
        case _:
            raise RpcError(INVALID_PARAMS, f"invalid argument: {given!r} is no block number or tag")


def hash_of(given: Any) -> str:
    if isinstance(given, str) and _HASH.fullmatch(given):
        return given.lower()
    raise RpcError(INVALID_PARAMS, f"invalid argument: {given!r} is no hash of 32 bytes")


def address_of(given: Any) -> str:
    if isinstance(given, str) and _ADDRESS.fullmatch(given):
        return given.lower()
    raise RpcError(INVALID_PARAMS, f"invalid argument: {given!r} is no address of 20 bytes")


def count_of(given: Any) -> int:
    """A JSON number or a hexadecimal one, for the control methods."""
    # JSON's true is an ``int`` in Python.
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    if isinstance(given, str) and _QUANTITY.fullmatch(given):
        return int(given, 16)
    raise RpcError(INVALID_PARAMS, f"invalid argument: {given!r} is no number")


def flag_of(given: Any) -> bool:
    if isinstance(given, bool):
        return given
    raise RpcError(INVALID_PARAMS, f"invalid argument: {given!r} is neither true nor false")


def at_most(params: list[Any], least: int, most: int) -> list[Any]:
    """``params`` padded with None for optional ones."""
    if len(params) < least:
        raise RpcError(INVALID_PARAMS, f"missing value for required argument {len(params)}")
    if len(params) > most:
        raise RpcError(INVALID_PARAMS, f"too many arguments, want at most {most}")
    return params + [None] * (most - len(params))


@dataclass(frozen=True, slots=True)
class LogFilter:
    """An empty set of addresses matches any; so does None in place of a set of topics."""

    addresses: frozenset[str]
    topics: tuple[frozenset[str] | None, ...]

    def matches(self, log: LogEntry) -> bool:
        if self.addresses and log.address not in self.addresses:
            return False
        if len(self.topics) > len(log.topics):
            return False
        return all(
            wanted is None or topic in wanted for wanted, topic in zip(self.topics, log.topics, strict=False)
        )


def parse_filter(given: dict[str, Any]) -> LogFilter:
    addresses, topics = given.get("address"), given.get("topics")
    if topics is not None and (not isinstance(topics, list) or len(topics) > _MOST_TOPICS):
        raise RpcError(INVALID_PARAMS, "topics must be an array of at most four")
    return LogFilter(
        frozenset(map(address_of, _listed(addresses))),
        tuple(frozenset(map(hash_of, each)) if (each := _listed(topic)) else None for topic in topics or ()),
    )


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return given if isinstance(given, list) else [given]
