"""The file that slots warm up with: sealed memory, made by the service, since a sandbox may not make any.

No query can write to it, so nothing that one leaves behind is read by the next.
"""

from __future__ import annotations

import fcntl
import os

import pyarrow as pa
import pyarrow.parquet as pq

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_TABLE = pa.table(
    {
        "block_number": pa.array(range(64)),
        "address": pa.array([f"x{number}" for number in range(64)]),
        "amount": pa.array([0.5] * 64),
    }
)
SCHEMA: pa.Schema = _TABLE.schema


def sealed_file() -> int:
    """A descriptor of it, the caller's to close."""
    memory = os.memfd_create("warm-up", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(memory), "wb") as file:
        pq.write_table(_TABLE, file)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    return memory
