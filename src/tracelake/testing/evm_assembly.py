"""A small assembler for EVM contracts, so that tests deploy tokens without a compiler.

A source is one instruction or ``label:`` per line; ``;`` begins a comment. ``PUSH 0x20`` picks the shortest push
that fits, ``PUSH @label`` the place of a label.
"""

from __future__ import annotations

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
