"""EVM contracts in assembly, so that tests deploy tokens without a compiler.

In a source, each line is one instruction or ``label:``; ``;`` begins a comment. ``PUSH 0x20`` picks the
shortest push that fits, ``PUSH @label`` the place of a label. The contracts emit token events and odd logs from
their call data, and one fails. Each has only a few instructions, since a chain's reader sees nothing but their
logs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tracelake.evm.hashing import keccak256

_PUSH0 = 0x5F
_PUSH1 = 0x60
_JUMPDEST = 0x5B
_OPCODES = {
    "STOP": 0x00,
    "ADD": 0x01,
    "SUB": 0x03,
    "GT": 0x11,
    "CALLDATALOAD": 0x35,
    "CALLDATASIZE": 0x36,
    "CALLDATACOPY": 0x37,
    "CODECOPY": 0x39,
    "MSTORE": 0x52,
    "JUMP": 0x56,
    "JUMPI": 0x57,
    "DUP1": 0x80,
    "DUP2": 0x81,
    "DUP3": 0x82,
    "LOG0": 0xA0,
    "LOG1": 0xA1,
    "LOG2": 0xA2,
    "LOG3": 0xA3,
    "LOG4": 0xA4,
    "RETURN": 0xF3,
    "REVERT": 0xFD,
}
TRANSFER = keccak256(b"Transfer(address,address,uint256)")
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


def assemble(source: str) -> bytes:
    """The contract's code as it runs. Labels take one byte, so it is at most 256 bytes long."""
    code = bytearray()
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    for line in source.splitlines():
        words = line.partition(";")[0].split()
        match words:
            case []:
                continue
            case [label] if label.endswith(":"):
                labels[label[:-1]] = len(code)
                code.append(_JUMPDEST)
            case ["PUSH", operand] if operand.startswith("@"):
                jumps.append((len(code) + 1, operand[1:]))
                code += bytes((_PUSH1, 0))
            case ["PUSH", operand]:
                value = int(operand, 16)
                size = (value.bit_length() + 7) // 8
                code.append(_PUSH0 + size)
                code += value.to_bytes(size)
            case [name]:
                code.append(_OPCODES[name])
            case _:
                raise ValueError(f"not an instruction: {line!r}")
    for place, label in jumps:
        code[place] = labels[label]
    return bytes(code)


def deployment(code: bytes) -> bytes:
    """What a creating transaction carries: it copies the code behind it to memory and returns it."""
    placed = f"""
        PUSH {len(code):#x}
        DUP1
        PUSH @code
        PUSH 0x0
        CODECOPY        ; memory[0:] = code
        PUSH 0x0
        RETURN
        code:
    """
    # The label only marks the place: the code itself stands there, without a jump destination before it.
    return assemble(placed)[:-1] + code


class Movement(NamedTuple):
    """One transfer. ``amount`` is the token's id where every token is one of a kind."""

    sender: str
    receiver: str
    amount: int


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
