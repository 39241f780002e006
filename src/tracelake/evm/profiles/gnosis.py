"""Gnosis: until the merge, blocks were sealed by AuRa's step and signature in place of mixHash and nonce."""

from __future__ import annotations

from binascii import unhexlify
from typing import Any

from tracelake.evm.consensus import QUANTITY, data, header_end, header_start, listed
from tracelake.evm.forks import JsonMapping
from tracelake.evm.profiles.profile import ChainProfile


def _header(block: JsonMapping) -> bytes | None:
    seal = _either(block, "auraSeal", "signature")
    if seal is None:
        return None
    step = _either(block, "auraStep", "step")
    text = hex(step) if isinstance(step, int) else step
    # London came before the merge, so there are sealed headers with a base fee.
    sealed = f"{header_start(block)}{QUANTITY[text]}{data(_prefixed(seal))}"
    return unhexlify(listed(sealed + header_end(block)))


def _absent(block: JsonMapping) -> tuple[str, ...]:
    """Nothing covers these of a sealed block, and endpoints fill them with zeros."""
    return () if _either(block, "auraSeal", "signature") is None else ("mixHash", "nonce")


def _either(block: JsonMapping, name: str, other: str) -> Any:
    """Nethermind has other names for the two fields."""
    value = block.get(name)
    return block.get(other) if value is None else value


def _prefixed(seal: str) -> str:
    return seal if seal.startswith("0x") else "0x" + seal


GNOSIS = ChainProfile(
    name="gnosis",
    about="Gnosis Chain: headers sealed by AuRa until the merge",
    proves="the same as on Ethereum, before and after the merge",
    chain_ids=frozenset({100, 10200}),
    header=_header,
    absent=_absent,
    marks=frozenset({"auraSeal", "auraStep"}),
)
