"""How the tables of a chain lie in Parquet files, whichever operator writes them."""

from __future__ import annotations

from collections.abc import Mapping

from tracelake.evm.raw_block import Dataset
from tracelake.evm.schemas import TABLES
from tracelake.operators.parquet_layout import ParquetLayout

# Where an address of interest often is, though nobody keeps an index for it.
_ALSO_LOOKED_UP: Mapping[Dataset, tuple[str, ...]] = {Dataset.LOGS: ("topic1", "topic2")}

_UNIQUE: Mapping[Dataset, tuple[str, ...]] = {
    Dataset.BLOCKS: (
        "block_hash",
        "parent_hash",
        "logs_bloom",
        "state_root",
        "transactions_root",
        "receipts_root",
        "mix_hash",
        "parent_beacon_block_root",
    ),
    Dataset.TRANSACTIONS: ("transaction_hash", "input", "r", "s"),
    Dataset.LOGS: ("data",),
    Dataset.RECEIPTS: ("transaction_hash",),
    Dataset.WITHDRAWALS: ("withdrawal_index",),
    Dataset.TRACES: ("action_input", "action_init", "result_output", "result_code"),
}


def chain_layout(
    dataset: Dataset, *, chain_id: int | None = None, verified: str | None = None
) -> ParquetLayout:
    """Sorted as the table is, with filters for what people look up; the file says what was checked."""
    table = TABLES[dataset]
    looked_up = dict.fromkeys(name for lookup in table.lookups for name in lookup if name != "block_number")
    facts = {"tracelake.dataset": str(dataset)}
    if chain_id is not None:
        facts["tracelake.chain_id"] = str(chain_id)
    if verified is not None:
        facts["tracelake.verified"] = verified
    return ParquetLayout(
        sort_by=table.sort_by,
        lookups=(*looked_up, *_ALSO_LOOKED_UP.get(dataset, ())),
        unique=_UNIQUE[dataset],
        facts=facts,
    )
