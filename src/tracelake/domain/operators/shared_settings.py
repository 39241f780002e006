"""Types, bounds and words of settings that several operators have."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta

from tracelake.domain.operators.spec import Setting

VerifyLevel = Literal["full", "bloom", "off"]
VERIFY: tuple[str, ...] = get_args(VerifyLevel)
SendersFrom = Literal["derive", "node"]
SENDERS: tuple[str, ...] = get_args(SendersFrom)
CHAIN_TABLES = ("blocks", "transactions", "logs", "receipts", "withdrawals", "traces")
"""Outputs of an operator that reads a chain: the name of each says which table it holds."""
USUAL_TABLES = 3
"""Number of chain tables, from the first on, of a job that doesn't list its outputs."""
MAX_BLOCKS_PER_FILE = 1_000_000
MAX_RANGE = 1_000_000_000
"""Maximum number of blocks of a chunk, a range or a Postgres partition, and of blocks until one is final."""
_MAX_CHAIN_ID = 2**63 - 1

PoolName = Annotated[str, Meta(min_length=1)]
ChainId = Annotated[int, Meta(ge=1, le=_MAX_CHAIN_ID)]
Depth = Annotated[int, Meta(ge=0, le=MAX_RANGE)]
"""A number of blocks below the tip."""
RangeSize = Annotated[int, Meta(ge=1, le=MAX_RANGE)]
BlocksPerFile = Annotated[int, Meta(ge=1, le=MAX_BLOCKS_PER_FILE)]

POOL = "Name of an RPC pool (`rpc.toml`)."
MUST_BE_POOL = "the name of an RPC pool"
MUST_BE_VERIFY = f"one of {', '.join(VERIFY)}"
MUST_BE_RANGE = f"a whole number from 1 to {MAX_RANGE}"
CHAIN = Setting("The chain that the pool must be of.", must=f"a whole number from 1 to {_MAX_CHAIN_ID}")
VERIFY_SETTING = Setting(
    "What is [proven](chains.md#what-is-proven): `full`, `bloom`, `off`.",
    must=MUST_BE_VERIFY,
    decides_rows=False,
)
SENDERS_SETTING = Setting(
    "Senders under `verify: full`: `derive` them from the signatures, or use the [`node`](chains.md#senders)'s.",
    must=f"one of {', '.join(SENDERS)}",
    decides_rows=False,
)
FILES = Setting(
    "Blocks per file; without it the range decides.",
    must=f"a whole number from 1 to {MAX_BLOCKS_PER_FILE}",
    decides_rows=False,
)


def finality(about: str, *tags: str) -> Setting:
    """A setting that is one of ``tags`` or a number of blocks. It says when to run, not which rows to make."""
    must = f"{', '.join(tags)} or a number of blocks (0 to {MAX_RANGE})"
    return Setting(about, must=must, decides_rows=False)
