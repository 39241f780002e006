"""Blocks of a range, fetched, proven and staged in the operator's own process, a few at a time.

At the tip this is the way: a block is there as soon as its endpoint has answered, whatever Spark is doing. Only
blocks that continue the chain are staged, so what is committed afterwards is one chain, however the endpoints have
changed their minds meanwhile.
"""

from __future__ import annotations

from typing import Protocol

from tracelake.evm.fetch import fetch_blocks
from tracelake.evm.portions import portions
from tracelake.evm.raw_block import Verify
from tracelake.evm.rpc.pool import Pool
from tracelake.operators.block_follower.decide import Link, linked
from tracelake.operators.block_follower.links import link_of_block
from tracelake.operators.block_follower.tables import ChainTables


class Loader(Protocol):
    endpoints: set[str]
    """Who has delivered blocks so far, for people who ask where rows come from."""

    def load(self, first: int, last: int, parent: bytes | None) -> list[Link]:
        """Stage the rows of these blocks as far as they continue ``parent``, each the next one's parent; answers
        with those that were staged. None: nothing is stored before them."""
        ...


class InProcess:
    def __init__(self, tables: ChainTables, pool: Pool, chain_id: int, verify: Verify) -> None:
        self._tables = tables
        self._pool = pool
        self._chain_id = chain_id
        self._verify = verify
        self.endpoints: set[str] = set()

    def load(self, first: int, last: int, parent: bytes | None) -> list[Link]:
        fetched = fetch_blocks(
            self._pool,
            range(first, last + 1),
            receipts=self._tables.needs_receipts,
            traces=self._tables.needs_traces,
            verify=self._verify,
        )
        loaded: list[Link] = []
        for raw in portions(fetched):
            links = [link_of_block(each) for each in raw]
            good = linked(parent, links)
            if good:
                self.endpoints.update(each.endpoint for each in raw[:good])
                self._tables.stage(raw[:good], self._chain_id)
                loaded += links[:good]
                parent = loaded[-1].hash
            if good < len(links):
                break
        return loaded
