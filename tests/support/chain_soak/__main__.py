"""``python -m tests.support.chain_soak [--seconds 300] [--seed 1]`` (or: ``make soak``)"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.support.chain_soak.run import run


def main() -> int:
    parser = argparse.ArgumentParser(description="Follow a node through reorgs and crashes, then compare.")
    parser.add_argument("--seconds", type=float, default=300, help="how long things go wrong (300)")
    parser.add_argument("--seed", type=int, default=1, help="what goes wrong, and when (1)")
    parser.add_argument("--keep", type=Path, help="an empty folder that is kept, with all logs")
    options = parser.parse_args()
    # A user who ends it early wants its processes gone, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="tracelake-soak-") as folder:
        place = options.keep or Path(folder)
        report = run(place, seconds=options.seconds, seed=options.seed, say=_say)
    for name, times in sorted(report.happened.items()):
        _say(f"  {times:5} {name}")
    right = f"all {report.blocks} blocks and their {report.rows} rows are stored as the node has them"
    _say("\n".join(report.wrong) or right)
    return 1 if report.wrong else 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
