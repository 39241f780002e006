"""``python -m bench.ingest``: blocks, transactions and logs of one recorded chain, by every reader, in one run.

A replay server answers from memory, so that what is measured is the reader: a client that only downloads (the
limit), cryo, ethereum-etl, and ours at each level of verification on a warm local Spark. Wall time until the files
are there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from bench.ingest.null_client import download_seconds
from bench.ingest.ours import Ours, warm_stack
from bench.ingest.peers import cryo_seconds, ethereum_etl_seconds
from tests.support.chain_replay.recording import STANDARD, standard_recording
from tests.support.chain_replay.server import replaying

TARGETS = {"ours_bloom": 1.0, "ours_full": 0.4}
"""Cryo's time divided by ours: how many times as fast we are at least."""
_RECORDINGS = Path(__file__).parents[2] / ".tools" / "recordings"
_MIB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--chain", choices=[*STANDARD, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=3, help="of which the best counts (3)")
    parser.add_argument("--without-etl", action="store_true", help="it takes longer than all others together")
    options = parser.parse_args()
    for name in STANDARD if options.chain == "all" else [options.chain]:
        with (
            tempfile.TemporaryDirectory(prefix="tracelake-ingest-") as folder,
            replaying(standard_recording(name, _RECORDINGS)) as url,
            warm_stack(Path(folder), url) as ours,
        ):
            _compare(name, url, ours, options.rounds, etl=not options.without_etl)
            _memory(name, ours)
    return 0


def _compare(name: str, url: str, ours: Ours, rounds: int, *, etl: bool) -> None:
    blocks = STANDARD[name].blocks + 1
    readers: dict[str, Callable[[Path], float]] = {
        "download_only": lambda _: download_seconds(url, blocks)[0],
        "cryo": lambda folder: cryo_seconds(url, blocks, folder),
        "ours_off": lambda _: ours.ingest("off", blocks - 1),
        "ours_bloom": lambda _: ours.ingest("bloom", blocks - 1),
        "ours_full": lambda _: ours.ingest("full", blocks - 1),
    }
    if etl:
        readers["ethereum_etl"] = lambda folder: ethereum_etl_seconds(url, blocks, folder)
    seconds: dict[str, list[float]] = {reader: [] for reader in readers}
    for number in range(rounds):
        for reader, read in readers.items():
            if reader == "ethereum_etl" and number:
                continue
            with tempfile.TemporaryDirectory(prefix="tracelake-ingest-") as folder:
                seconds[reader].append(round(read(Path(folder)), 3))
    best = {reader: min(times) for reader, times in seconds.items()}
    for reader, times in seconds.items():
        line = {
            "chain": name,
            "reader": reader,
            "seconds": times,
            "blocks_per_second": round(blocks / best[reader]),
        }
        ratios = {
            f"times_{other}": round(best[other] / best[reader], 2) for other in ("cryo", "download_only")
        }
        _say(line | ratios)
    for reader, target in TARGETS.items():
        ratio = round(best["cryo"] / best[reader], 2)
        verdict = "reached" if ratio >= target else "missed"
        _say(
            {
                "chain": name,
                "metric": f"{reader}_times_cryo",
                "measured": ratio,
                "target": target,
                "verdict": verdict,
            }
        )


def _memory(name: str, ours: Ours) -> None:
    """Of a tenth of the chain, and of all of it."""
    whole = STANDARD[name].blocks
    peaks = [ours.peak_memory("full", blocks) for blocks in (whole // 10, whole)]
    mib = [round(peak / _MIB) for peak in peaks]
    _say(
        {
            "chain": name,
            "metric": "peak_memory_mib",
            "tenth": mib[0],
            "whole": mib[1],
            "ratio": round(mib[1] / mib[0], 2),
        }
    )


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
