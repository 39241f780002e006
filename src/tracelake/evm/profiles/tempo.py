"""Tempo: its header has Ethereum's inside, and type 0x76 makes several calls with other kinds of signatures.

JSON-RPC shows the parts of such a transaction in a form that doesn't give its bytes back for every kind of
signature, so blocks with one can't be proven; their value, recipient and input are those of its calls, and null.
"""

from __future__ import annotations

from binascii import unhexlify

from tracelake.evm.consensus import QUANTITY, header_bytes, listed
from tracelake.evm.forks import JsonMapping
from tracelake.evm.profiles.profile import ZERO_ADDRESS, ChainProfile, TransactionType


def _header(block: JsonMapping) -> bytes:
    limits = f"{QUANTITY[block['mainBlockGeneralGasLimit']]}{QUANTITY[block['sharedGasLimit']]}"
    payload = f"{limits}{QUANTITY[block['timestampMillisPart']]}{header_bytes(block).hex()}"
    return unhexlify(listed(payload))


TEMPO = ChainProfile(
    name="tempo",
    about="Tempo: type 0x76 without value, recipient and input; the chain's own transactions have no signature",
    proves="the same as on Ethereum, but for blocks with type 0x76",
    chain_ids=frozenset({4217}),
    types={"0x76": TransactionType("several calls", optional=frozenset({"value", "input", "to"}))},
    header=_header,
    marks=frozenset({"mainBlockGeneralGasLimit"}),
    system_transactions=True,
    system_sender=ZERO_ADDRESS,
)
