"""The chain as the endpoints show it, which isn't always the same one."""

from __future__ import annotations

from tracelake.evm.rpc.pool import Pool
from tracelake.operators.block_follower.decide import BlockId
from tracelake.operators.block_follower.links import block_id, hash_of


class SeenChain:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._furthest = ""

    def head(self) -> BlockId:
        """That of the endpoint that is furthest."""
        seen = self._pool.head()
        self._furthest = seen.endpoint
        return block_id(seen.number, seen.hash)

    def hash_at(self, number: int) -> bytes | None:
        """As one of the endpoints has it; None only if they agree that there is no such block."""
        return hash_of(self._pool.header(number))

    def hashes_at(self, number: int) -> dict[str, bytes | None]:
        """What each endpoint has at this height."""
        return {name: hash_of(header) for name, header in self._pool.headers_by_endpoint(number).items()}

    def side_with_furthest(self, height: int, kept: BlockId | None) -> None:
        """Endpoints that have another block at ``height`` than the furthest are asked last from now on, so that
        one which is stuck on a left fork stops nobody; unless it is the furthest that has left the block ``kept``.
        """
        if kept is not None and self.hashes_at(kept.number).get(self._furthest) != kept.hash:
            return
        found = self.hashes_at(height)
        leading = found.get(self._furthest)
        for name, other in found.items():
            if leading is not None and other is not None and other != leading:
                self._pool.distrust(
                    name, f"has another block {height} than {self._furthest}, which is further"
                )
