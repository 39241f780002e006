"""``python -m tests.support.simulation --seeds 500``: run seeds on a throwaway Postgres, report the rest."""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

import uvloop

from tests.support.simulation.processes import (
    COMMAND,
    Result,
    be_quiet,
    clone,
    result_of,
    run_all,
    throwaway_postgres,
)
from tests.support.simulation.run import Simulation

MOST_SEEDS = 10_000_000
HIGHEST_SEED = 2**53
_PROGRESS_SECONDS = 10.0
_SHOWN = 20


def main() -> int:
    options = _options()
    be_quiet()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    began = time.monotonic()
    results: list[Result] = []
    interrupted = False
    try:
        if options.seed is not None:
            results.append(_run_one(options.seed, trace=options.trace))
        else:
            _run_many(options, results)
    except KeyboardInterrupt:
        interrupted = True
    _summarize(results, time.monotonic() - began)
    if interrupted:
        return 130
    return 1 if any(result.failure for result in results) else 0


def _options() -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    seed = _between(0, HIGHEST_SEED)
    parser.add_argument("--seed", type=seed, help="run this seed alone")
    parser.add_argument("--trace", action="store_true", help="print every turn of --seed")
    parser.add_argument(
        "--seeds", type=_between(1, MOST_SEEDS), default=100, help="number of seeds (default 100)"
    )
    parser.add_argument("--first", type=seed, help="the first of them; drawn at random otherwise")
    parser.add_argument(
        "--processes", type=_between(1, 128), default=cores, help=f"processes that run them (default {cores})"
    )
    parser.add_argument("--stop", action="store_true", help="stop at the first seed that fails")
    options = parser.parse_args()
    if options.trace and options.seed is None:
        parser.error("--trace needs --seed")
    return options


def _between(lowest: int, highest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"{value} is not between {lowest} and {highest}")
        return value

    return number


def _run_one(seed: int, *, trace: bool) -> Result:
    async def run(dsn: str) -> Result:
        simulation = Simulation(dsn)
        await simulation.open()
        try:
            outcome = await simulation.run(seed)
        finally:
            await simulation.close()
        if trace:
            _say("\n".join(outcome.lines))
        return result_of(outcome)

    with throwaway_postgres(1) as cluster:
        return _reported(uvloop.run(run(clone(cluster, 0))))


def _run_many(options: argparse.Namespace, results: list[Result]) -> None:
    first = random.SystemRandom().randrange(2**32) if options.first is None else options.first
    _say(f"seeds {first} to {first + options.seeds - 1}, {options.processes} processes")
    seeds = range(first, first + options.seeds)
    began = shown = time.monotonic()
    with throwaway_postgres(options.processes) as cluster:
        for result in run_all(cluster, seeds, options.processes):
            results.append(_reported(result))
            now = time.monotonic()
            if now - shown >= _PROGRESS_SECONDS:
                shown = now
                _say(_progress(results, len(seeds), now - began))
            if result.failure and options.stop:
                return


def _reported(result: Result) -> Result:
    if result.failure:
        _say(result.failure)
    return result


def _progress(results: Sequence[Result], of: int, seconds: float) -> str:
    failed = sum(result.failure is not None for result in results)
    left = seconds / len(results) * (of - len(results))
    return (
        f"{len(results)} of {of} seeds, {len(results) / seconds:.1f} seeds/s, {failed} failed, "
        f"about {left / 60:.0f} min left"
    )


def _summarize(results: Sequence[Result], seconds: float) -> None:
    if not results:
        _say("no seed was run to its end")
        return
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in used)
    _say(
        f"{len(results)} seeds, {len(results) / seconds:.1f} seeds/s, {cpu / len(results):.2f} CPU s per seed, "
        f"{sum(result.acknowledged for result in results)} acknowledged calls, "
        f"{sum(result.turns for result in results)} turns, digest of the last: {results[-1].digest[:16]}"
    )
    rolled_back = Counter(label for result in results for label in result.rolled_back)
    for label, count in rolled_back.most_common():
        _say(f"rolled back and run again, {count}x: {label}")
    failed = sorted(result.seed for result in results if result.failure)
    if not failed:
        _say("all held")
        return
    _say(f"{len(failed)} failed; see them again:")
    for seed in failed[:_SHOWN]:
        _say(f"  {COMMAND} --seed {seed} --trace")
    if len(failed) > _SHOWN:
        _say(f"  and {', '.join(map(str, failed[_SHOWN:]))}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
