"""Spark's Python daemon with imports done, so that the workers that it forks have them from the start.

Spark runs it as ``python -m tracelake.worker.spark.python_daemon`` (``spark.python.daemon.module``). The one
thread that these imports start is an allocator's, made to be forked; modules that start others don't belong here.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress

from pyspark.daemon import manager

EXECUTOR = "pyspark.worker"
USUAL = (
    EXECUTOR,
    "pyspark.sql.conversion",
    "pandas",
    "pyarrow.compute",
    "pyarrow.parquet",
    "tracelake.operators.evm_ingest",
    "tracelake.operators.cells",
)


def main() -> None:
    # Spark has daemons for its planner too, which fork once or twice in a query.
    for module in USUAL if sys.argv[1:] == [EXECUTOR] else ():
        # The code that uses the module reports what is wrong with it.
        with suppress(Exception):
            importlib.import_module(module)
    manager()


if __name__ == "__main__":
    main()
