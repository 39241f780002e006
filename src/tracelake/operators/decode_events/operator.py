"""``decode_events``: logs and event ABIs into typed columns, incrementally by scope.

    config: { events: erc20_transfers }
    config: { events: ["event Deposit(address indexed user, uint256 amount)"], addresses: ["0x…"] }

Reads one table of logs, hot or cold, and writes one table, Parquet or Postgres: the log's own columns without
topics and data, the ``event``, and its parameters (``tracelake.evm.abi.columns``). Logs are filtered by first
topic and contract where the rows are stored; the decoder checks again, so a list that is too long for a condition
may be left out of it. A log that looks like an event but doesn't decode is skipped; the task's progress and log
have the number by reason.

On ``ecs_spark`` executors decode. On ``ecs_python`` a whole scope is decoded in the operator process, for small
inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tracelake.domain.errors import Invalid
from tracelake.domain.operators.decode_events import SPEC, DecodeConfig, read_config
from tracelake.domain.runtimes import ECS_PYTHON
from tracelake.domain.table_layout import TableLayout
from tracelake.domain.where import Predicate, all_of, in_list
from tracelake.evm.abi.decode_logs import SKIPPED, LogDecoder, topic0
from tracelake.operators.context import Context
from tracelake.operators.inputs import Input
from tracelake.operators.outputs import Output
from tracelake.operators.registry import operator

SORT_BY = ("block_number", "log_index")
LOOKUPS = ("address", "transaction_hash")
_MOST_VALUES = 200
_LOGGED_NAMES = 20


@operator(SPEC.name)
def decode_events(ctx: Context) -> None:
    config = read_config(ctx.config)
    source, output = _wiring(ctx)
    if not ctx.blocks:
        ctx.log.info("nothing to do: no new blocks")
        return
    names = sorted({event.name for event in config.events})[:_LOGGED_NAMES]
    ctx.log.info(
        "decoding",
        start=ctx.blocks.start,
        end=ctx.blocks.stop - 1,
        events=len(config.events),
        names=names,
    )
    if ctx.task.runtime == ECS_PYTHON:
        rows, skipped = _decode_here(source, output, config)
    else:
        rows, skipped = _decode_on_spark(source, output, config)
    by_reason: dict[str, Any] = {f"skipped_{reason}": count for reason, count in skipped.items()}
    ctx.progress(decoded=rows, skipped=sum(skipped.values()), **by_reason)
    ctx.log.info("decoded", rows=rows, skipped=sum(skipped.values()), **by_reason)


def _wiring(ctx: Context) -> tuple[Input, Output]:
    tables = [source for source in ctx.inputs if source.storage != "none"]
    if len(tables) != 1 or len(ctx.outputs) != 1:
        raise Invalid("InvalidConfig", "decode_events reads one table of logs and has one output")
    return tables[0], ctx.outputs[0]


def _decode_on_spark(source: Input, output: Output, config: DecodeConfig) -> tuple[int, Mapping[str, int]]:
    from tracelake.operators.decode_events.on_spark import decode_frame

    # Files are filtered by Spark itself.
    frame = (narrowed(source, config) if source.storage == "postgres" else source).dataframe()
    decoder = _decoder(config, frame.columns, output)
    decoded, skipped = decode_frame(frame, decoder)
    return _write(decoded, output, decoder, config), skipped()


def _decode_here(source: Input, output: Output, config: DecodeConfig) -> tuple[int, Mapping[str, int]]:
    logs = narrowed(source, config).arrow()
    decoder = _decoder(config, logs.column_names, output)
    decoded, skipped = decode_table(logs, decoder)
    return _write(decoded, output, decoder, config), skipped


def _decoder(config: DecodeConfig, columns: list[str], output: Output) -> LogDecoder:
    hot = output.storage == "postgres"
    return LogDecoder.of(config.events, config.addresses, columns, hot=hot)


def _write(rows: Any, output: Output, decoder: LogDecoder, config: DecodeConfig) -> int:
    lookups = [name for name in LOOKUPS if name in decoder.kept]
    if decoder.hot:
        # The block first in one index, last in the others: rows are looked up by value, then by range.
        indexes = (SORT_BY[:1], *((name, SORT_BY[0]) for name in lookups))
        return output.stage(rows, types=decoder.postgres_types, layout=TableLayout(indexes=indexes))
    order = [name for name in SORT_BY if name in decoder.kept]
    written = output.write(rows, sort_by=order, lookups=lookups, blocks_per_file=config.blocks_per_file)
    return written.row_count


def narrowed(source: Input, config: DecodeConfig) -> Input:
    hashes = [topic0(event) for event in config.events]
    terms: list[Predicate] = []
    # An anonymous event has no signature in its first topic, so any log may be one.
    if None not in hashes:
        terms += _one_of("topic0", [each for each in hashes if each is not None])
    terms += _one_of("address", config.addresses)
    return source.narrowed(all_of(terms)) if terms else source


def _one_of(column: str, values: Iterable[bytes]) -> list[Predicate]:
    texts = {"\\x" + value.hex() for value in values}
    return [in_list(column, texts)] if 0 < len(texts) <= _MOST_VALUES else []


def decode_table(logs: pa.Table, decoder: LogDecoder) -> tuple[pa.Table, dict[str, int]]:
    """The decoded rows, and how many logs were skipped by reason."""
    rows = decoder.decode(logs)
    counted = pc.value_counts(rows[SKIPPED].drop_null()).to_pylist()
    skipped = {each["values"]: each["counts"] for each in counted}
    return rows.filter(pc.is_null(rows[SKIPPED])).drop_columns([SKIPPED]), skipped
