"""``python -m tracelake.dev.demo`` (or: ``make demo``)

A chain becomes tables: its past as Parquet, in chunks, on Spark; its present in Postgres, block by block, and as
Parquet once it is final. Transfers are decoded, and a function raises alerts about large ones. On the way the Spark
worker and the Dispatcher are killed with SIGKILL, and the chain replaces its last blocks by others. The exit code
is 0 only if everything that is stored and standing in the end is what the chain has.
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

from tracelake.client import Client
from tracelake.dev.demo.report import Report
from tracelake.dev.demo.scenario import CHUNKS, RANGE, Scenario
from tracelake.dev.demo.surroundings import growing, stack
from tracelake.domain.errors import TracelakeError
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import running

BLOCK_SECONDS = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tracelake.dev.demo", description=(__doc__ or "").partition("\n\n")[2]
    )
    parser.add_argument("--blocks", type=int, default=3_000, help="how long the chain's past is")
    past = max(1, parser.parse_args().blocks // (CHUNKS * RANGE)) * CHUNKS * RANGE
    console = Console()
    console.print("[bold]Tracelake[/bold]: a chain in, complete tables out, every output committed once.\n")
    chain = DevChain(seed=1, blocks=past + 20)
    with tempfile.TemporaryDirectory(prefix="tracelake-demo-") as name, running(chain) as node:
        folder, began = Path(name), time.monotonic()
        with stack(folder, node.url) as handle, Client(handle.user_url, handle.user_token) as client:
            took = time.monotonic() - began
            parts = sorted(handle.pids.keys() - {"supervisor"})
            console.print(f"started {len(parts)} parts in {took:.1f} s: {', '.join(parts)}")
            scenario = Scenario(console, client, chain, folder, past)
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
