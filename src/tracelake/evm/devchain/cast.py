"""Who acts on a dev chain: accounts, and the contracts whose events fill its logs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tracelake.evm.devchain.dice import Dice

_ACCOUNTS = 64
_COINS = 6
_COLLECTIONS = 3
_OTHERS = 5


@dataclass(frozen=True, slots=True)
class Cast:
    """Addresses in lower-case hex. ``coins`` are ERC-20 tokens, ``collections`` are ERC-721 tokens."""

    accounts: tuple[str, ...]
    coins: tuple[str, ...]
    collections: tuple[str, ...]
    others: tuple[str, ...]

    def account(self, dice: Dice) -> str:
        return self.accounts[dice.below(len(self.accounts))]


@lru_cache(maxsize=64)
def cast_of(seed: int) -> Cast:
    """The same for every fork and every chain id."""
    return Cast(
        _addresses(seed, "account", _ACCOUNTS),
        _addresses(seed, "coin", _COINS),
        _addresses(seed, "collection", _COLLECTIONS),
        _addresses(seed, "other", _OTHERS),
    )


def _addresses(seed: int, role: str, count: int) -> tuple[str, ...]:
    return tuple(Dice(seed, role, number).hex(20) for number in range(count))
