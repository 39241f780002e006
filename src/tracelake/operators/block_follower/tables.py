"""The follower's outputs as tables of a chain: what is stored in them, and how blocks become their rows."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid
from tracelake.domain.table_layout import TableLayout
from tracelake.evm.decode import decode
from tracelake.evm.portions import need_receipts
from tracelake.evm.raw_block import Dataset, RawBlock
from tracelake.evm.schemas import TABLES, TableSchema
from tracelake.operators.block_follower.decide import Link
from tracelake.operators.block_follower.links import COLUMNS, links_of_rows
from tracelake.operators.context import Context
from tracelake.operators.outputs import Output

PARTITION_BLOCKS = 100_000


class ChainTables:
    """By dataset, in the order of the outputs; ``blocks`` is always among them, since a chain is followed by the
    hashes that are stored there."""

    def __init__(self, ctx: Context) -> None:
        self.outputs: dict[Dataset, Output] = {}
        for output in ctx.outputs:
            try:
                self.outputs[Dataset(output.name)] = output
            except ValueError:
                known = ", ".join(Dataset)
                raise Invalid(
                    "InvalidOutput", f"block_follower has no output {output.name!r}; it has {known}"
                ) from None
        if Dataset.BLOCKS not in self.outputs:
            raise Invalid(
                "InvalidOutput", "block_follower needs an output 'blocks': it goes by the hashes stored there"
            )

    @property
    def blocks(self) -> Output:
        return self.outputs[Dataset.BLOCKS]

    @property
    def needs_receipts(self) -> bool:
        return need_receipts(self.outputs)

    @property
    def needs_traces(self) -> bool:
        return Dataset.TRACES in self.outputs

    def span(self) -> BlockRange | None:
        return self.blocks.stored_span()

    def links(self, start: int, end: int) -> list[Link]:
        return links_of_rows(self.blocks.stored(COLUMNS, start, end))

    def chain_id(self, number: int) -> int | None:
        """The chain that a stored block is of."""
        found = self.blocks.stored(("chain_id",), number, number)
        return found.column(0)[0].as_py() if found.num_rows else None

    def stage(self, raw: Sequence[RawBlock], chain_id: int) -> None:
        for dataset, output in self.outputs.items():
            schema = TABLES[dataset]
            rows = hot_rows(schema, raw, chain_id)
            output.stage(rows, types=schema.postgres_types, layout=hot_layout(schema))

    def drop_staged(self) -> None:
        """What was staged and won't be committed."""
        for output in self.outputs.values():
            if output.has_staged:
                output.discard()

    def reset_staging(self) -> None:
        """The staging tables may be gone, or hold anything."""
        for output in self.outputs.values():
            output.discard()


def hot_rows(schema: TableSchema, raw: Sequence[RawBlock], chain_id: int) -> pa.Table:
    return schema.to_hot(pa.Table.from_batches([decode(raw, schema.dataset, chain_id)]))


def hot_layout(schema: TableSchema) -> TableLayout:
    return TableLayout(indexes=schema.lookups, partition_blocks=PARTITION_BLOCKS)
