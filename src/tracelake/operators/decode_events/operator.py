"""``decode_events``: logs and event ABIs into typed columns, incrementally by scope.

    config: { events: erc20_transfers }
    config: { events: ["event Deposit(address indexed user, uint256 amount)"], addresses: ["0x…"] }

Reads one table of logs, hot or cold, and writes one table, Parquet or Postgres: the log's own columns without its
topics and data, the ``event``, and its parameters (``tracelake.evm.abi.columns``). Logs are filtered by signature
and address before anything is decoded. One that looks like an event but doesn't decode is skipped; how many there
were and why is in the task's progress and log.

On ``ecs_python`` the same is done in the operator process, for small inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tracelake.domain.errors import Invalid
from tracelake.domain.event_abi.decode_config import DecodeConfig, read_config
from tracelake.domain.table_layout import TableLayout
from tracelake.operators.api import operator
from tracelake.operators.context import Context
from tracelake.operators.inputs import Input
from tracelake.operators.outputs import Output

if TYPE_CHECKING:
    from tracelake.evm.abi.decode_logs import LogDecoder

SORT_BY = ("block_number", "log_index")
LOOKUPS = ("address", "transaction_hash")


@operator("decode_events")
def decode_events(ctx: Context) -> None:
    config = read_config(ctx.config)
    source, output = _wiring(ctx)
    if not ctx.blocks:
        ctx.log.info("nothing to do: no new blocks")
        return
    names = sorted({event.name for event in config.events})
    ctx.log.info("decoding", start=ctx.blocks.start, end=ctx.blocks.stop - 1, events=names)
    if ctx.task.runtime == "ecs_python":
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
    from tracelake.operators.decode_events.narrow import narrowed
    from tracelake.operators.decode_events.on_spark import decode_frame

    # Files are filtered by Spark itself.
    frame = (narrowed(source, config) if source.storage == "postgres" else source).dataframe()
    decoder = _decoder(config, frame.columns, output)
    decoded, skipped = decode_frame(frame, decoder)
    return _write(decoded, output, decoder, config), skipped()


def _decode_here(source: Input, output: Output, config: DecodeConfig) -> tuple[int, Mapping[str, int]]:
    from tracelake.operators.decode_events.in_process import decode_table
    from tracelake.operators.decode_events.narrow import narrowed

    logs = narrowed(source, config).arrow()
    decoder = _decoder(config, logs.column_names, output)
    decoded, skipped = decode_table(logs, decoder)
    return _write(decoded, output, decoder, config), skipped


def _decoder(config: DecodeConfig, columns: list[str], output: Output) -> LogDecoder:
    from tracelake.evm.abi.decode_logs import LogDecoder

    hot = output.storage == "postgres"
    return LogDecoder.of(config.events, config.addresses, columns, hot=hot)


def _write(rows: Any, output: Output, decoder: LogDecoder, config: DecodeConfig) -> int:
    lookups = [name for name in LOOKUPS if name in decoder.kept]
    if decoder.hot:
        indexes = (SORT_BY[:1], *((name, SORT_BY[0]) for name in lookups))
        return output.stage(rows, types=decoder.postgres_types, layout=TableLayout(indexes=indexes))
    order = [name for name in SORT_BY if name in decoder.kept]
    written = output.write(rows, sort_by=order, lookups=lookups, blocks_per_file=config.blocks_per_file)
    return written.row_count
