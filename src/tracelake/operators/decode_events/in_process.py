"""Decoding where there is no Spark: a whole scope in this process' memory."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from tracelake.evm.abi.decode_logs import SKIPPED, LogDecoder


def decode_table(logs: pa.Table, decoder: LogDecoder) -> tuple[pa.Table, dict[str, int]]:
    """The decoded rows, and how many logs were skipped by reason."""
    rows = decoder.decode(logs)
    counted = pc.value_counts(rows[SKIPPED].drop_null()).to_pylist()
    skipped = {each["values"]: each["counts"] for each in counted}
    return rows.filter(pc.is_null(rows[SKIPPED])).drop_columns([SKIPPED]), skipped
