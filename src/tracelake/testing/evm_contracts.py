"""Contracts that say what they are told to: emitters of token events, of odd logs, and one that fails.

Each is a few instructions of assembly, since what a chain's reader sees is their logs and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tracelake.evm.keccak import keccak256
from tracelake.testing.evm_assembly import assemble

TRANSFER = keccak256(b"Transfer(address,address,uint256)")


class Movement(NamedTuple):
    """One transfer. ``amount`` is the token's id where every token is one of a kind."""

    sender: str
    receiver: str
    amount: int


# The stack holds the place in the calldata, and whatever is above it; calldata is a row of (from, to, amount).
_LOOP = """
        PUSH 0x0        ; place
    next:
        DUP1
        CALLDATASIZE
        GT              ; is there another record?
        PUSH @emit
        JUMPI
        STOP
    emit:
        {emit}
        PUSH 0x60
        ADD             ; place of the next record
        PUSH @next
        JUMP
"""

COIN = assemble(
    _LOOP.format(
        emit=f"""
        DUP1
        PUSH 0x40
        ADD
        CALLDATALOAD    ; amount
        PUSH 0x0
        MSTORE          ; memory[0:32] = amount
        DUP1
        PUSH 0x20
        ADD
        CALLDATALOAD    ; to
        DUP2
        CALLDATALOAD    ; from
        PUSH 0x{TRANSFER.hex()}
        PUSH 0x20
        PUSH 0x0
        LOG3            ; Transfer(from indexed, to indexed, amount)
        """
    )
)

COLLECTION = assemble(
    _LOOP.format(
        emit=f"""
        DUP1
        PUSH 0x40
        ADD
        CALLDATALOAD    ; id
        DUP2
        PUSH 0x20
        ADD
        CALLDATALOAD    ; to
        DUP3
        CALLDATALOAD    ; from
        PUSH 0x{TRANSFER.hex()}
        PUSH 0x0
        PUSH 0x0
        LOG4            ; Transfer(from indexed, to indexed, id indexed)
        """
    )
)

ANONYMOUS = assemble("""
        CALLDATASIZE
        PUSH 0x0
        PUSH 0x0
        CALLDATACOPY    ; memory = calldata
        CALLDATASIZE
        PUSH 0x0
        LOG0            ; no topics, the calldata as data
        STOP
""")

UNINDEXED = assemble("""
        PUSH 0x0
        CALLDATALOAD    ; the topic is the first word
        PUSH 0x20
        CALLDATASIZE
        SUB             ; the data is the rest
        DUP1
        PUSH 0x20
        PUSH 0x0
        CALLDATACOPY
        PUSH 0x0
        LOG1
        STOP
""")

FAILING = assemble("""
        PUSH 0x0
        PUSH 0x0
        LOG0            ; a log that nobody will see
        PUSH 0x0
        PUSH 0x0
        REVERT
""")


def movements(each: Iterable[Movement]) -> str:
    """The calldata that makes COIN and COLLECTION emit these transfers."""
    return "0x" + "".join(
        f"{sender[2:]:0>64}{receiver[2:]:0>64}{amount:064x}" for sender, receiver, amount in each
    )
