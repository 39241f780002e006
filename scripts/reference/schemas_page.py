"""``docs/schemas.md``: the tables of a chain, column by column, made of their definitions."""

from __future__ import annotations

from tracelake.evm.columns import (
    POSTGRES,
    UINT256_ARROW,
    UINT256_PARTS,
    ChainColumn,
    ColumnKind,
    arrow_fields,
)
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.schemas import TABLES, TableSchema

_INTRODUCTION = """\
# Tables of a chain

Made from `tracelake.evm.schemas`; `python -m scripts.reference` makes it anew.

- Every table has `chain_id`, `block_number`, `block_hash` and the block's `timestamp`, so that each row can be
  traced to a block and a day without a join.
- Hashes, addresses and data are bytes (`binary` in files, `bytea` in Postgres). Times are UTC with microseconds.
- Integers are signed 64-bit. Amounts of wei per gas are `decimal(38,0)`, so that `gas_used * gas_price` doesn't
  overflow. A number beyond that, such as a gas limit of 2^64 − 1, is null in its column and exact in `wide_values`:
  `{"gas_limit":"18446744073709551615"}`.
- Columns are those of Ethereum; [chain profiles](profiles.md) say what differs on other chains.
- A uint256 such as `value` is exact: in files `value_binary` (32 bytes, big-endian: sorts as the number does),
  `value_string` (decimal) and `value_f64` (the nearest double, for charts); in Postgres one `value numeric(78,0)`.
  A query sees it as one number, `value` ([how to write it](query.md#large-numbers-and-bytes)).
- Files also have its decimal digits in pieces that any engine sums natively: `value_e0` the lowest 18, `value_e18`
  the 18 above them, and `value_e36` the rest as text, null below 10^36. `value` is `value_e36` · 10^36 +
  `value_e18` · 10^18 + `value_e0`, each with the sign of a negative number; of an amount of ether, `value_e18` is
  whole ether. They are derived from `value_string`; `tracelake verify` and `integrity_check` compare them. Files
  of earlier versions lack them.
- Nested columns are lists and structs in files and `jsonb` with hexadecimal text in Postgres.
- What [`verify: full`](chains.md#what-is-proven) proves of each column: `by hash`, the block's hash covers it;
  `derived`, it follows from what is hashed, so that an endpoint that says otherwise is refused and one that leaves
  it out is supplemented; `node's word`, nothing can check it here, and it may differ by endpoint.
- Rows are sorted by the key, which is unique.
"""


def schemas_page() -> str:
    return "\n".join([_INTRODUCTION, *(_section(TABLES[dataset]) for dataset in ChainTable)])


def _section(table: TableSchema) -> str:
    lookups = ", ".join("(" + ", ".join(f"`{name}`" for name in lookup) + ")" for lookup in table.lookups)
    key = ", ".join(f"`{name}`" for name in table.sort_by)
    rows = [line for column in table.columns for line in _lines(column)]
    head = [f"## {table.dataset}", "", f"{table.about} Key: {key}. Indexed in Postgres by {lookups}.", ""]
    return "\n".join(
        [*head, "| column | in files | in Postgres | proven | |", "|---|---|---|---|---|", *rows, ""]
    )


def _lines(column: ChainColumn) -> list[str]:
    about = column.about + (" (may be null)" if column.nullable else "")
    postgres = f"`{POSTGRES[column.kind]}`"
    if column.kind is ColumnKind.UINT256:
        names = ", ".join(f"`{column.name}{part}`" for part in UINT256_PARTS)
        kinds = ", ".join(f"`{kind}`" for kind in UINT256_ARROW)
        return [f"| {names} | {kinds} | `{column.name}` {postgres} | {column.proof} | {about} |"]
    [field] = arrow_fields(column)
    kind = str(field.type).replace("element: ", "")
    return [f"| `{column.name}` | `{kind}` | {postgres} | {column.proof} | {about} |"]
