"""What kind of chain a dev chain is: everything that, with a fork's id and a height, determines a block."""

from __future__ import annotations

from dataclasses import dataclass

from tracelake.domain.errors import Invalid

CHAIN_ID = 31_339
GENESIS_TIME = 1_735_689_600  # 2025-01-01 00:00:00 UTC
MOST_TRANSACTIONS = 2_000
MOST_LOGS = 2_000
MOST_LOGS_PER_BLOCK = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """``transactions`` and ``logs`` are averages, per block and per transaction. A ``steady`` chain has exactly
    so many in every block but the first; otherwise there are empty blocks, and small and large ones.

    The first ``frontier`` blocks look as they did on Ethereum's first day: no base fee, no withdrawals, legacy
    transactions without a chain id, and a state root in the receipts instead of a status.
    """

    seed: int = 0
    chain_id: int = CHAIN_ID
    transactions: int = 4
    logs: int = 2
    steady: bool = False
    frontier: int = 0
    block_seconds: int = 12
    genesis_time: int = GENESIS_TIME

    def __post_init__(self) -> None:
        for name, low, high in (
            ("seed", -(2**63), 2**63 - 1),
            ("chain_id", 1, 2**53),
            ("transactions", 0, MOST_TRANSACTIONS),
            ("logs", 0, MOST_LOGS),
            ("frontier", 0, 2**53),
            ("block_seconds", 0, 2**32),
            ("genesis_time", 0, 2**40),
        ):
            value: int = getattr(self, name)
            if not low <= value <= high:
                raise Invalid("InvalidDevChain", f"{name} must be from {low} to {high}, not {value}")
        if self.transactions * self.logs > MOST_LOGS_PER_BLOCK:
            raise Invalid(
                "InvalidDevChain",
                f"{self.transactions} transactions per block with {self.logs} logs each are "
                f"{self.transactions * self.logs:,} logs per block, the most is {MOST_LOGS_PER_BLOCK:,}",
            )
