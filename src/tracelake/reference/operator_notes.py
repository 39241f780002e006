"""What no code says about the built-in operators: what each is for, what it reads, where it runs, what a setting
means. Names, outputs, storages, defaults and what is required come from the catalog."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_POOL = "Name of an RPC pool (`rpc.toml`)."
_CHAIN = "The chain that the pool must be of."
_VERIFY = "What is [proven](chains.md#what-is-proven): `full`, `bloom`, `off`."
_FILES = "Blocks per file; without it the range decides."


@dataclass(frozen=True, slots=True)
class OperatorNotes:
    about: str
    reads: str
    runtimes: tuple[str, ...]
    settings: Mapping[str, str]
    writes: str


NOTES: Mapping[str, OperatorNotes] = {
    "block_follower": OperatorNotes(
        "An always-on source that keeps hot tables equal to the head of a chain, reorgs included "
        "([chains](chains.md#following-the-tip)).",
        "a chain, through an RPC pool",
        ("ecs_python", "ecs_spark"),
        {
            "rpc_pool": _POOL,
            "chain_id": _CHAIN,
            "start_block": "The first block, or `latest`.",
            "verify": _VERIFY,
            "finality": "`finalized`, or a number of blocks; a reorg that goes deeper stops it for a person.",
            "poll_seconds": "Longest wait between two looks at the head, 0.02 to 60.",
            "max_blocks_per_commit": "How much becomes visible at once while catching up, 1 to 10,000.",
            "catch_up": "Who fetches then: `spark`, this `process`, or `auto`: Spark where there is one.",
            "shorter_after_seconds": "How long nobody may have our last block before the chain got shorter.",
        },
        "tables of [the chain's schema](schemas.md), each by its name",
    ),
    "evm_ingest": OperatorNotes(
        "A block range of a chain as Parquet, in one pass and proven against the headers "
        "([chains](chains.md#ranges-into-files)).",
        "the scope of its input, and a chain, through an RPC pool",
        ("ecs_spark",),
        {
            "rpc_pool": _POOL,
            "chain_id": _CHAIN,
            "verify": _VERIFY,
            "finality": "How settled the last block must be: `latest`, `safe`, `finalized`, or a number of blocks.",
            "blocks_per_file": _FILES,
        },
        "files of [the chain's schema](schemas.md), each table by its name",
    ),
    "parquet_compact": OperatorNotes(
        "Final rows of hot tables as the files that an ingest would have written "
        "([chains](chains.md#hot-rows-into-files)).",
        "what triggers says which blocks; hot tables of a chain with `trigger: false`",
        ("ecs_spark",),
        {
            "finality": "`finalized` (as the source says), `latest`, or a number of blocks below the highest.",
            "blocks_per_file": _FILES,
            "verified": "What the source has checked, for the files to say: `full`, `bloom`, `off`.",
            "delete_hot": "Refused: hot rows stay.",
            "keep_hot_blocks": "Refused: hot rows stay.",
        },
        "one table for each hot input, with its columns, as in [the chain's schema](schemas.md)",
    ),
    "decode_events": OperatorNotes(
        "Logs into typed columns by the ABI of their events ([chains](chains.md#decoded-events)).",
        "one table of logs, hot or cold",
        ("ecs_spark", "ecs_python"),
        {
            "events": "`erc20_transfers`, `erc721_transfers`, `event Name(type indexed name, …)`, an entry of a "
            "JSON ABI, or a list of these.",
            "addresses": "Only logs of these contracts; all when left out.",
            "blocks_per_file": _FILES,
        },
        "the log's columns without topics and data, then `event`, then "
        "[a column per parameter](chains.md#decoded-events)",
    ),
    "sql_transform": OperatorNotes(
        "One Spark SQL `SELECT` over its inputs, cut to the task's blocks. Only what computes values is allowed in "
        "it, and nothing that changes from run to run: text becomes a timestamp by `to_timestamp(text, format)`, "
        "and `from_json(text, 'a INT, b STRING')` takes its schema as one string.",
        "its inputs under their published names, or `input_0` and so on; `scope_blocks(block_number)` has one row "
        "for each block of the task",
        ("ecs_spark",),
        {
            "sql": "The `SELECT`, up to 64 KiB.",
            "sort_by": "Parquet: columns that rows are sorted by.",
            "blocks_per_file": "Parquet: " + _FILES[0].lower() + _FILES[1:],
            "indexes": "Postgres: columns that are looked up, or lists of those looked up together.",
            "partition_blocks": "Postgres: so many blocks make a partition of the table.",
        },
        "the columns of the `SELECT`",
    ),
    "range_aggregator": OperatorNotes(
        "A rising cursor up to whole block ranges, each announced as soon as its last block is final.",
        "the cursor of its first input",
        ("dispatcher",),
        {
            "range_size": "Blocks of a range; ranges start at its multiples.",
            "finality": "`finalized` (as the source says), `latest`, or a number of blocks behind the cursor.",
            "start_block": "No range begins before it.",
        },
        "events: one for each range",
    ),
    "range_splitter": OperatorNotes(
        "A block range down to chunks on a grid: the same block is in the same chunk, whatever was asked for.",
        "the block range of its first input",
        ("dispatcher",),
        {"chunk_size": "Blocks of a chunk; chunks are cut at its multiples."},
        "events: one for each chunk",
    ),
    "integrity_check": OperatorNotes(
        "Stored blocks against themselves and against the chain; what is wrong is taken back and made again "
        "([chains](chains.md#hot-rows-into-files)).",
        "tables of one chain, hot or cold, and the chain, through an RPC pool",
        ("ecs_spark",),
        {
            "rpc_pool": _POOL + " `verify: off` needs none.",
            "chain_id": _CHAIN,
            "verify": "How much of the chain is compared: `bloom` headers, `full` every value, `off` nothing.",
        },
        "events: the blocks that were wrong (PerPartition), or how far the check has come (PerUpdate)",
    ),
    "noop": OperatorNotes(
        "Does nothing and says that its scope is done. For tests and benchmarks; a manual source may name it.",
        "nothing",
        ("dispatcher", "ecs_python", "ecs_spark", "lambda"),
        {},
        "its scope, as an event",
    ),
    "buffer_sink": OperatorNotes(
        "Writes a [buffered dataset](buffers.md). The platform's own: a deploy brings its job, no DAG names it.",
        "the dataset's queue",
        ("sink",),
        {},
        "the declared columns and [the platform's](buffers.md#declare)",
    ),
}
