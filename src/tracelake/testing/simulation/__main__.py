"""``python -m tracelake.testing.simulation --seeds 500``: run seeds on a throwaway Postgres, report the rest."""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import structlog

from tracelake.embedded_postgres import Cluster
from tracelake.testing.simulation.report import failure
from tracelake.testing.simulation.run import Outcome, Simulation
from tracelake.testing.state import build_state_template


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tracelake.testing.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this seed alone")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--trace", action="store_true", help="print every turn")
    parser.add_argument("--stop", action="store_true", help="stop at the first seed that fails")
    options = parser.parse_args()
    seeds = (
        [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    )
    # What the steps log in passing would bury the report.
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    folder = Path(tempfile.mkdtemp(prefix="tracelake-simulation-"))
    cluster = Cluster(folder, name="simulation", throwaway=True)
    try:
        cluster.start()
        cluster.ensure_database("state")
        build_state_template(cluster.dsn("state"))
        outcomes = asyncio.run(_run(cluster.dsn("state"), list(seeds), options))
    finally:
        cluster.stop(timeout=0.0)
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if any(outcome.findings for outcome in outcomes) else 0


async def _run(dsn: str, seeds: list[int], options: argparse.Namespace) -> list[Outcome]:
    simulation = Simulation(dsn)
    await simulation.open()
    outcomes: list[Outcome] = []
    began = time.monotonic()
    try:
        for seed in seeds:
            outcome = await simulation.run(seed)
            outcomes.append(outcome)
            if options.trace:
                _say("\n".join(outcome.lines))
            if outcome.findings:
                _say(failure(outcome))
                if options.stop:
                    break
    finally:
        await simulation.close()
    _summarize(outcomes, time.monotonic() - began)
    return outcomes


def _summarize(outcomes: list[Outcome], seconds: float) -> None:
    failed = [outcome.seed for outcome in outcomes if outcome.findings]
    acknowledged = sum(outcome.acknowledged for outcome in outcomes)
    turns = sum(len(outcome.lines) for outcome in outcomes)
    _say(
        f"{len(outcomes)} seeds, {len(outcomes) / seconds:.1f} seeds/s, {acknowledged} acknowledged calls, "
        f"{turns} turns, digest of the last: {outcomes[-1].digest[:16]}"
    )
    rolled_back = Counter(label for outcome in outcomes for label in outcome.rolled_back)
    for label, count in rolled_back.most_common():
        _say(f"rolled back and run again, {count}x: {label}")
    _say(f"failed: {failed}" if failed else "all held")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
