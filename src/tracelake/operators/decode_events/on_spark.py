"""``decode_frame``: decodes logs in the executors, filtered by signature and address first, batch by batch.

Logs that don't decode become rows with a reason, which Spark counts and drops before anything is shuffled or
written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import Observation, functions
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField, StructType

from tracelake.evm.abi.decode_logs import NEEDED, SKIPPED, LogDecoder
from tracelake.evm.abi.values import SKIP_REASONS
from tracelake.tables.spark_output import quoted_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def decode_frame(frame: DataFrame, decoder: LogDecoder) -> tuple[DataFrame, Callable[[], Mapping[str, int]]]:
    """The decoded rows, and after they were written how many logs were skipped by reason."""
    wanted = [*decoder.kept, *(name for name in NEEDED if name not in decoder.kept)]
    logs = frame.where(_filter(decoder)).select(*(functions.col(quoted_name(name)) for name in wanted))
    kept = [logs.schema[name] for name in decoder.kept]
    added = [StructField(field.name, from_arrow_type(field.type)) for field in decoder.fields]
    decoded = logs.mapInArrow(partial(decode_partition, decoder), StructType([*kept, *added]))
    seen = Observation()
    reason = functions.col(SKIPPED)
    counts = [functions.count_if(reason == each.value).alias(each.value) for each in SKIP_REASONS]
    # Counted while rows are written: a count of its own would decode everything twice.
    counted = decoded.observe(seen, *counts)
    return counted.where(reason.isNull()).drop(SKIPPED), lambda: _found(seen)


def decode_partition(decoder: LogDecoder, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs in the executors."""
    return decoder.decode_batches(batches)


def _filter(decoder: LogDecoder) -> Column:
    condition = functions.lit(True)
    # An anonymous event has no signature hash, so any log may be one.
    if None not in decoder.hashes:
        condition = _is_in("topic0", [each for each in decoder.hashes if each is not None])
    if decoder.addresses:
        condition = condition & _is_in("address", decoder.addresses)
    return condition


def _is_in(column: str, values: tuple[bytes, ...] | list[bytes]) -> Column:
    return functions.col(column).isin([functions.lit(value) for value in dict.fromkeys(values)])


def _found(seen: Observation) -> Mapping[str, int]:
    # ``get`` waits for the first action on the frame, so this is called after the rows were written.
    return {name: count for name, count in seen.get.items() if count}
