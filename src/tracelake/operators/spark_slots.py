"""How many tasks a Spark runs at a time: what a limit that all of them share is divided by."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A range that nobody cut is cut by Spark into as many parts as it has cores; its plan says so, and is not run.
_SPLITS = re.compile(r"splits=(?:Some\()?(\d+)")


def spark_slots(spark: SparkSession) -> int:
    uncut: Any = spark.range(1 << 30)
    found = _SPLITS.search(uncut._explain_string())
    return int(found[1]) if found else 1
