"""Whether a block is what its header says it is, and nothing is missing from it.

``bloom`` proves that the parts belong together: transactions, receipts and logs all name this block and their
places in it, and the logs are exactly those that the bloom filters stand for, as far as filters can tell.
``full`` proves it: the roots of transactions, receipts and withdrawals and all hashes are computed anew, so
that whoever knows the block's hash knows every byte. ``off`` only sees to it that the answer is for the block
that was asked for.

What no hash covers, and is taken from the endpoint: the sender (its signature isn't recovered; transaction
and receipt must agree on it), the block's size and total difficulty, the price of blob gas, and traces.
"""

from __future__ import annotations

from typing import Any

from tracelake.evm.block_errors import BlockMalformed, BlockMismatch, UnknownTransactionType
from tracelake.evm.proof import prove_block
from tracelake.evm.raw_block import RawBlock, Verify
from tracelake.evm.same_block import Contradiction, check_parts, same_number

__all__ = ["BlockMalformed", "BlockMismatch", "check_block"]


def check_block(raw: RawBlock, level: Verify, chain_id: int | None = None) -> None:
    """Raises ``BlockMismatch`` naming the block, the endpoint and what doesn't match, or ``BlockMalformed``.

    A block without receipts (they weren't asked for) is checked as far as it goes. ``chain_id`` is the chain
    that the transactions must be of.
    """
    try:
        _check(raw.block, raw, level, chain_id)
    except (Contradiction, UnknownTransactionType) as found:
        raise BlockMismatch(raw.number, raw.endpoint, str(found)) from None
    except KeyError as missing:
        raise BlockMalformed(raw.number, raw.endpoint, str(missing.args[0]), "is missing") from None
    except (TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise BlockMalformed(raw.number, raw.endpoint, "a field", f"can't be read: {error}") from None


def _check(block: dict[str, Any], raw: RawBlock, level: Verify, chain_id: int | None) -> None:
    if not same_number(block["number"], hex(raw.number)):
        raise Contradiction(f"the answer is block {int(block['number'], 16)}")
    if level is Verify.OFF:
        return
    check_parts(block, raw.receipts, chain_id)
    if level is Verify.FULL:
        prove_block(block, raw.receipts)
