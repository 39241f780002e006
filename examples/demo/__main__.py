"""``python -m examples.demo`` (or: ``make demo``)

A chain becomes tables: its past as Parquet, in chunks, on Spark; its present in Postgres, block by block, and as
Parquet once it is final. Transfers are decoded, a function raises alerts about large ones, and they are sent to a
receiver. On the way the Spark worker and the Dispatcher are killed with SIGKILL, and the chain replaces its last
blocks by others. The exit code is 0 only if everything that is stored and standing in the end is what the chain
has.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg
from rich.console import Console
from rich.table import Table

from examples.demo import check
from examples.demo.receiver import receiving
from examples.demo.scenario import CHUNKS, LARGE, RANGE, Scenario, growing, stack
from tracelake.cli.verify import prove_dataset
from tracelake.client import Client
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import TracelakeError
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import running
from tracelake.evm.prove_rows import RowProof

QUERIES = {
    "the past, from Parquet": """
        SELECT count(*) AS blocks, sum(gas_used) AS gas, max(timestamp) AS until FROM old_blocks""",
    "the present, Parquet and Postgres as one table": """
        SELECT count(*) AS logs, count(DISTINCT address) AS contracts, max(block_number) AS last FROM logs""",
    "alerts": """
        SELECT token, count(*) AS alerts, count(retracted_at) AS retracted
        FROM alerts GROUP BY token ORDER BY alerts DESC, token LIMIT 3""",
}
BLOCK_SECONDS = 0.5
PROVEN = 50


class Report:
    def __init__(self, console: Console, scenario: Scenario) -> None:
        self._console = console
        self._scenario = scenario
        self._client = scenario.client

    def show_queries(self) -> None:
        for title, sql in QUERIES.items():
            began = time.monotonic()
            found = self._client.query_rows(sql)
            took = (time.monotonic() - began) * 1000
            table = Table(*found.columns, box=None, padding=(0, 2))
            for row in found.rows:
                table.add_row(*map(_shown, row))
            self._console.print(f"\n{title}, in {took:.0f} ms")
            self._console.print(table)

    def show_checks(self) -> int:
        checks = [*self._history(), *self._present(), *self._alerts()]
        table = Table(show_header=False, box=None, padding=(0, 2))
        for what, figure, held, text in checks:
            table.add_row(
                what, figure, f"[green]✓[/green] {text}" if held else f"[red]✗ not so:[/red] {text}"
            )
        scenario = self._scenario
        rate = self._scenario.past / scenario.history_seconds if scenario.history_seconds else 0.0
        table.add_row("history", f"{rate:,.0f} blocks/s", "with two kills in it, every block proven")
        table.add_row(
            "lag of the tip", f"{scenario.lag_seconds * 1000:.0f} ms", "from mined to stored, median"
        )
        table.add_row("time", f"{time.monotonic() - scenario.began:.1f} s", "from the deploy to here")
        self._console.print()
        self._console.print(table)
        return 0 if all(held for _, _, held, _ in checks) else 1

    def _history(self) -> list[tuple[str, str, bool, str]]:
        chain, client = self._scenario.chain, self._client
        blocks, chunk = self._scenario.past, self._scenario.chunk
        tasks = client.tasks(dag="demo", job="history", limit=1000).tasks
        pieces = client.explain_range("old_blocks", start=0, end=blocks - 1, limit=1000).pieces
        spans = [(each.start, each.end) for each in pieces]
        again = sum(max(0, task.attempt - 1) for task in tasks)
        past = check.stored_hashes(client, "old_blocks")
        proof = prove_dataset(client, "old_logs", BlockRange(0, blocks - 1), sample=PROVEN).proof
        return [
            (
                "chunks of the past",
                f"{len(spans)}",
                spans == [(start, start + chunk - 1) for start in range(0, blocks, chunk)]
                and len(tasks) == CHUNKS,
                "each exactly once",
            ),
            (
                "ranges verified",
                f"{sum(each.verified == 'full' for each in pieces)}",
                all(each.verified == "full" for each in pieces),
                "every root and hash recomputed",
            ),
            (
                "blocks in Parquet",
                f"{len(past):,}",
                past == check.hashes(chain, 0, blocks - 1),
                "hash by hash",
            ),
            (
                "blocks proven again",
                f"{proof.blocks:,}",
                not proof.wrong and proof.proofs[str(RowProof.RECEIPTS)] == PROVEN,
                "a sample, by tracelake verify",
            ),
            ("attempts taken over", f"{again}", again > 0, "from the worker that was killed"),
        ]

    def _present(self) -> list[tuple[str, str, bool, str]]:
        scenario, client, chain = self._scenario, self._client, self._scenario.chain
        present = check.hot_hashes(client, scenario.data_owner_dsn, "live_blocks")
        both = check.queried_hashes(client)
        compacted = len(client.partitions("blocks", limit=1000).partitions)
        transfers = check.hot_rows(client, scenario.data_owner_dsn, "transfers")
        wanted = check.hashes(chain, self._scenario.past, chain.head)
        return [
            ("blocks in Postgres", f"{len(present):,}", present == wanted, "after the reorg"),
            (
                "compacted and hot",
                f"{len(both):,}",
                both == wanted and compacted > 0,
                f"as one table; {compacted} ranges of it are Parquet",
            ),
            (
                "transfers decoded",
                f"{transfers:,}",
                transfers == check.count_transfers(chain, self._scenario.past, chain.head),
                "none of the old fork",
            ),
        ]

    def _alerts(self) -> list[tuple[str, str, bool, str]]:
        chain, receiver = self._scenario.chain, self._scenario.receiver
        standing, retracted = check.standing_alerts(self._client), check.retracted_alerts(self._client)
        return [
            (
                "alerts standing",
                f"{len(standing)}",
                standing == check.large_transfers(chain, self._scenario.past, chain.head, LARGE),
                "the large transfers of the chain as it is",
            ),
            ("alerts retracted", f"{retracted}", retracted > 0, "their blocks are gone"),
            (
                "alerts delivered",
                f"{len(receiver.alerts())}",
                receiver.alerts() == standing and receiver.refused == 0,
                "the same at their receiver",
            ),
            (
                "retracted there",
                f"{receiver.retracted}",
                receiver.retracted > 0,
                "by messages",
            ),
        ]


def _shown(value: object) -> str:
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return text if len(text) <= 24 else f"{text[:12]}…{text[-6:]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="examples.demo", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--blocks", type=int, default=3_000, help="how long the chain's past is")
    past = max(1, parser.parse_args().blocks // (CHUNKS * RANGE)) * CHUNKS * RANGE
    console = Console()
    console.print("[bold]Tracelake[/bold]: a chain in, complete tables out, every output committed once.\n")
    chain = DevChain(seed=1, blocks=past + 20)
    with (
        tempfile.TemporaryDirectory(prefix="tracelake-demo-") as name,
        running(chain) as node,
        receiving() as receiver,
    ):
        folder, began = Path(name), time.monotonic()
        with (
            stack(folder, node.url, receiver) as handle,
            Client(handle.user_url, handle.user_token) as client,
        ):
            took = time.monotonic() - began
            parts = sorted(handle.pids.keys() - {"supervisor"})
            console.print(f"started {len(parts)} parts in {took:.1f} s: {', '.join(parts)}")
            scenario = Scenario(console, client, chain, folder, past, receiver)
            scenario.deploy(sandbox="worker-lambda" in handle.pids)
            with growing(chain, BLOCK_SECONDS):
                scenario.watch_the_past()
                scenario.measure_the_lag()
                scenario.change_the_present()
            scenario.settle()
            report = Report(console, scenario)
            report.show_queries()
            return report.show_checks()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (TracelakeError, psycopg.Error, subprocess.TimeoutExpired) as error:
        sys.exit(f"error: {error}")
