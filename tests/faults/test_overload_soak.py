"""An overload of a whole stack for as long as ``SECONDS`` says: a chain that grows in bursts, a backfill in bulk,
two consumers that are too slow for them, and every process killed in turn. The queues stay within their bounds,
the follower catches up once the bursts are over, and every row arrives once.

``make soak-pressure`` runs it; ``make test`` leaves it out.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.anvil import Anvil, AnvilChain, running_anvil
from tests.support.dev_stack import DevStack, is_gone
from tracelake.client import Client
from tracelake.domain.errors import TracelakeError

SECONDS = float(os.environ.get("SECONDS", "30"))
HISTORY = 300
CHUNK = 5
BURST = 30
DEPTHS = {"tip_events": 15, "old_copy": 6}
EMITTED = {"tip_events": 3 * BURST, "old_copy": 4}
"""What tasks may still emit that run when a queue trips: the ranges of the blocks that a follower has committed
before it heard of the hold, and the chunks that are being ingested."""
KILL_SECONDS = 6.0
SETTLE_SECONDS = 600.0

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("soak")]

_POOL = '[pools.main]\n\n[[pools.main.endpoints]]\nname = "node"\nurl = "{url}"\n'
_DAG = """
name: overload
defaults: { max_attempts: 1000, heartbeat_timeout_seconds: 10, retry: { base: 1s, max: 2s } }
jobs:
  - name: past
    activation: source
    runtime: dispatcher
    source: { kind: manual }
    outputs: 1
  - name: chunks
    activation: reactive
    runtime: dispatcher
    operator: range_splitter
    inputs: [{ from: { job: past, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
    config: { chunk_size: CHUNK }
  - name: ingest
    activation: reactive
    runtime: ecs_spark
    operator: evm_ingest
    inputs: [{ from: { job: chunks, output: 0 } }]
    outputs: 3
    execution_strategy: PerPartition
    priority: bulk
    scaling: { max_concurrency: 2 }
    config: { chain_id: 31337, rpc_pool: main }
  - name: old_copy
    activation: reactive
    runtime: ecs_python
    operator: slow_copy
    inputs: [{ from: { job: ingest, output: 2 } }]
    outputs: [{ name: copies, storage: parquet }]
    execution_strategy: PerPartition
    scaling: { max_concurrency: 1 }
    max_queue_depth: OLD_DEPTH
    config: { seconds: 1.5 }
  - name: follower
    activation: source
    runtime: ecs_python
    operator: block_follower
    source: { kind: always_on }
    outputs: 3
    update_strategy: replace
    config: { chain_id: 31337, rpc_pool: main, start_block: HISTORY, finality: 8, poll_seconds: 0.2 }
  - name: tips
    activation: reactive
    runtime: dispatcher
    operator: range_aggregator
    inputs: [{ from: { job: follower, output: 0 } }]
    outputs: 1
    execution_strategy: PerUpdate
    update_strategy: replace
    config: { range_size: 1, finality: latest, start_block: HISTORY }
  - name: tip_events
    activation: reactive
    runtime: ecs_python
    operator: decode_events
    inputs:
      - { from: { job: tips, output: 0 } }
      - { from: { job: follower, output: 2 }, trigger: false }
    outputs: 1
    execution_strategy: PerPartition
    update_strategy: replace
    scaling: { max_concurrency: 1 }
    max_queue_depth: TIP_DEPTH
    config: { events: erc20_transfers }
publish:
  tip_blocks: { from: { job: follower, output: 0 } }
  tip_logs: { from: { job: follower, output: 2 } }
  tip_transfers: { from: { job: tip_events, output: 0 } }
  old_blocks: { from: { job: ingest, output: 0 } }
  old_logs: { from: { job: ingest, output: 2 } }
  old_copies: { from: { job: old_copy, output: 0 } }
"""


def dag() -> bytes:
    values = {
        "CHUNK": CHUNK,
        "HISTORY": HISTORY,
        "OLD_DEPTH": DEPTHS["old_copy"],
        "TIP_DEPTH": DEPTHS["tip_events"],
    }
    text = _DAG
    for name, value in values.items():
        text = text.replace(name, str(value))
    return text.encode()


@dataclass
class Seen:
    """What was looked at while the stack was overloaded."""

    deepest: dict[str, int] = field(default_factory=dict)
    held: set[tuple[str, str]] = field(default_factory=set)
    lag: float = 0
    killed: set[str] = field(default_factory=set)

    def look(self, client: Client, node: Anvil) -> None:
        report = client.pressure()
        for job in report.jobs:
            self.deepest[job.job] = max(self.deepest.get(job.job, 0), job.waiting)
        self.held |= {(hold.job, hold.cause_job) for hold in report.holds}
        self.lag = max(self.lag, behind(client, node))


def behind(client: Client, node: Anvil) -> float:
    """By the node's head: a follower that is held knows an older one."""
    [chain] = client.chains().chains
    return 0 if chain.tip is None else node.head - chain.tip


@pytest.fixture
def node() -> Iterator[Anvil]:
    with running_anvil() as found:
        yield found


@pytest.fixture
def stack(node: Anvil, tmp_path: Path) -> Iterator[DevStack]:
    pools = tmp_path / "rpc.toml"
    pools.touch(0o600)
    pools.write_text(_POOL.format(url=node.url))
    options = ("--rpc-pools", str(pools), "--operators", str(Path(__file__).with_name("slow_operators.py")))
    found = DevStack(tmp_path / "home", tmp_path, *options, workers=True)
    try:
        found.until_ready()
        yield found
    finally:
        found.close()


def connect(stack: DevStack) -> Client:
    """A new one each time: the Dispatcher is one of those that are killed."""
    return Client(stack.handle.user_url, stack.handle.user_token)


def test_a_stack_that_is_overloaded_and_killed_keeps_its_bounds_and_its_rows(
    node: Anvil, stack: DevStack
) -> None:
    chain = AnvilChain(node, seed=5)
    chain.grow(HISTORY)
    with connect(stack) as client:
        client.deploy(dag())
    begun = stack.run(
        "backfill",
        "overload/ingest",
        "--from",
        "0",
        "--to",
        str(HISTORY - 1),
        "--chunk",
        str(CHUNK),
        "--no-wait",
    )
    assert begun.returncode == 0, begun.stderr
    seen = Seen()
    overload(node, chain, stack, seen)
    assert set(parts_of(stack)) <= seen.killed, "each was killed"
    assert ("ingest", "old_copy") in seen.held
    assert ("follower", "tip_events") in seen.held
    assert seen.lag > BURST / 2, "it never fell behind"
    for job, deepest in seen.deepest.items():
        assert deepest <= 2 * DEPTHS[job] + EMITTED[job], (job, deepest)
    until_settled(node, stack)
    compare(node, stack)


def parts_of(stack: DevStack) -> list[str]:
    """Without the supervisor, who starts them again."""
    return sorted(set(stack.handle.pids) - {"supervisor"})


def overload(node: Anvil, chain: AnvilChain, stack: DevStack, seen: Seen) -> None:
    """Until the time is over, every process was killed once and both consumers were full."""
    dice = random.Random(7)
    parts = parts_of(stack)
    victims = itertools.chain(parts, iter(lambda: dice.choice(parts), None))
    ends, next_kill, next_burst = time.monotonic() + SECONDS, time.monotonic() + KILL_SECONDS, 0.0
    gives_up = ends + SETTLE_SECONDS
    while time.monotonic() < ends or not (set(parts) <= seen.killed and len(seen.held) > 1):
        assert time.monotonic() < gives_up, seen
        if time.monotonic() > next_burst:
            chain.grow(BURST)
            next_burst = time.monotonic() + 8
        with suppress(TracelakeError), connect(stack) as client:
            seen.look(client, node)
        if time.monotonic() > next_kill:
            victim = next(victims)
            handle = stack.find_handle()
            pid = handle.pids.get(victim) if handle is not None else None
            if pid is not None and not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
                seen.killed.add(victim)
            else:
                # It is being started again: its turn comes once more.
                victims = itertools.chain([victim], victims)
            next_kill = time.monotonic() + KILL_SECONDS
        time.sleep(0.2)


def until_settled(node: Anvil, stack: DevStack) -> None:
    """The bursts are over: holds end, the follower is at the tip, and nothing is left to do."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        with suppress(TracelakeError), connect(stack) as client:
            busy = [
                task
                for task in client.tasks(dag="overload", limit=1000).tasks
                if task.status in ("Queued", "Running")
            ]
            report = client.pressure()
            only_follower = [task.job for task in busy] == ["follower"]
            if only_follower and not report.holds and not report.backlogs and behind(client, node) == 0:
                return
        time.sleep(0.5)
    with connect(stack) as client:
        raise AssertionError(f"not settled: {client.pressure()} {client.chains()}")


def compare(node: Anvil, stack: DevStack) -> None:
    """Blocks, logs and what was made of them as the node has them, each once."""
    head = node.head
    for name, first, last in (("old", 0, HISTORY - 1), ("tip", HISTORY, head)):
        logs = node.call("eth_getLogs", {"fromBlock": hex(first), "toBlock": hex(last)})
        derived = (
            ("copies", logs) if name == "old" else ("transfers", [log for log in logs if is_transfer(log)])
        )
        assert counted(stack, f"{name}_blocks", "block_number") == (last - first + 1,) * 2
        for table, rows in (("logs", logs), derived):
            assert rows
            found = counted(stack, f"{name}_{table}", "(block_number, log_index)")
            assert found == (len(rows),) * 2, (name, table)


def is_transfer(log: dict[str, Any]) -> bool:
    signature = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"
    return log["topics"][:1] == [signature] and len(log["topics"]) == 3 and len(log["data"]) == 2 + 64


def counted(stack: DevStack, table: str, key: str) -> tuple[int, int]:
    """Rows, and rows that differ."""
    ran = stack.run("query", f"FROM {table} SELECT count(*) AS n, count(DISTINCT {key}) AS d", "--json")
    assert ran.returncode == 0, ran.stderr
    [row] = json.loads(ran.stdout)["rows"]
    rows, distinct = row if isinstance(row, list) else (row["n"], row["d"])
    return int(rows), int(distinct)
