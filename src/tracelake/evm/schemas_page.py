"""The docs page of the tables, made of their definitions: ``python -m tracelake.evm.schemas_page >
docs/schemas.md``."""

from __future__ import annotations

import sys

from tracelake.evm.columns import POSTGRES, UINT256_ARROW, UINT256_PARTS, Column, Kind, arrow_fields
from tracelake.evm.raw_block import Dataset
from tracelake.evm.schemas import TABLES, TableSchema

_INTRODUCTION = """\
# Tables of a chain

Made from `tracelake.evm.schemas`; `python -m tracelake.evm.schemas_page > docs/schemas.md` makes it anew.

- Every table has `chain_id`, `block_number`, `block_hash` and the block's `timestamp`, so that each row can be
  traced to a block and a day without a join.
- Hashes, addresses and data are bytes (`binary` in files, `bytea` in Postgres). Times are UTC with microseconds.
- Integers are signed 64-bit. Amounts of wei per gas are `decimal(38,0)`, so that `gas_used * gas_price` doesn't
  overflow.
- A uint256 such as `value` is exact: in files `value_binary` (32 bytes, big-endian: sorts as the number does),
  `value_string` (decimal) and `value_f64` (the nearest double, for charts); in Postgres one `value numeric(78,0)`.
- Nested columns are lists and structs in files and `jsonb` with hexadecimal text in Postgres.
- With `verify: full` everything is tied to the block's hash, but for what is marked as unproven: no hash covers
  it, so it is what the endpoint says.
- Rows are sorted by the key, which is unique.
"""


def schemas_page() -> str:
    return "\n".join([_INTRODUCTION, *(_section(TABLES[dataset]) for dataset in Dataset)])


def _section(table: TableSchema) -> str:
    lookups = ", ".join("(" + ", ".join(f"`{name}`" for name in lookup) + ")" for lookup in table.lookups)
    key = ", ".join(f"`{name}`" for name in table.sort_by)
    rows = [line for column in table.columns for line in _lines(column)]
    head = [f"## {table.dataset}", "", f"{table.about} Key: {key}. Indexed in Postgres by {lookups}.", ""]
    return "\n".join([*head, "| column | in files | in Postgres | |", "|---|---|---|---|", *rows, ""])


def _lines(column: Column) -> list[str]:
    remarks = [
        text for text, holds in (("may be null", column.nullable), ("unproven", not column.proven)) if holds
    ]
    about = column.about + (f" ({', '.join(remarks)})" if remarks else "")
    postgres = f"`{POSTGRES[column.kind]}`"
    if column.kind is Kind.UINT256:
        names = ", ".join(f"`{column.name}{part}`" for part in UINT256_PARTS)
        kinds = ", ".join(f"`{kind}`" for kind in UINT256_ARROW)
        return [f"| {names} | {kinds} | `{column.name}` {postgres} | {about} |"]
    [field] = arrow_fields(column)
    kind = str(field.type).replace("element: ", "")
    return [f"| `{column.name}` | `{kind}` | {postgres} | {about} |"]


if __name__ == "__main__":
    sys.stdout.write(schemas_page())
