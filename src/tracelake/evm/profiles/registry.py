"""The chain profiles by name, and which one a block may need.

A pool names its profile (``chain`` in rpc.toml); otherwise the chain's id does, and a chain that isn't listed has
Ethereum's rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tracelake.evm.forks import JsonMapping
from tracelake.evm.profiles.arbitrum import ARBITRUM
from tracelake.evm.profiles.ethereum_rules import BSC, HYPERLIQUID, MONAD
from tracelake.evm.profiles.foreign_hashes import COSMOS, CRONOS, FRONTIER, STABLE
from tracelake.evm.profiles.gnosis import GNOSIS
from tracelake.evm.profiles.optimism import BASE, OPTIMISM
from tracelake.evm.profiles.polygon import POLYGON
from tracelake.evm.profiles.profile import ETHEREUM, ChainProfile
from tracelake.evm.profiles.tempo import TEMPO
from tracelake.evm.raw_block import Unprovable

PROFILES: Mapping[str, ChainProfile] = {
    profile.name: profile
    for profile in (
        ETHEREUM,
        OPTIMISM,
        BASE,
        ARBITRUM,
        POLYGON,
        GNOSIS,
        BSC,
        MONAD,
        HYPERLIQUID,
        TEMPO,
        CRONOS,
        STABLE,
        COSMOS,
        FRONTIER,
    )
}
BLOOM_WORKS = "verify: bloom works"
_BY_CHAIN_ID = {chain_id: profile for profile in PROFILES.values() for chain_id in profile.chain_ids}


def profile_of(name: str | None, chain_id: int | None) -> ChainProfile:
    """``name`` is one of ``PROFILES``; without it the chain's id decides."""
    if name is not None:
        return PROFILES[name]
    return ETHEREUM if chain_id is None else _BY_CHAIN_ID.get(chain_id, ETHEREUM)


def profile_of_block(block: JsonMapping) -> ChainProfile | None:
    """The profile whose marks a block bears."""
    return next((each for each in PROFILES.values() if not each.marks.isdisjoint(block)), None)


def advice_about_type(kind: str, profile: ChainProfile) -> str:
    """What to do about a transaction type that a profile doesn't have."""
    others = [each.name for each in PROFILES.values() if kind in each.types]
    if not others:
        return f"no chain profile has it; {BLOOM_WORKS}"
    return f"chain profile {profile.name} doesn't have it; {set_chain(others)}, or {BLOOM_WORKS}"


def set_chain(names: Sequence[str]) -> str:
    values = " or ".join(f'"{name}"' for name in names)
    return f"set chain = {values} in the RPC pool"


def refuse_unprovable(profile: ChainProfile) -> None:
    """Called where ``full`` is wanted: nothing needs to be fetched to know that it isn't possible."""
    if profile.unprovable is not None:
        raise Unprovable(
            "ChainUnprovable",
            f"verify: full isn't possible with chain profile {profile.name}: {profile.unprovable}; {BLOOM_WORKS}",
        )
