"""A compacted dataset as one Spark DataFrame: files as Spark reads them, hot rows as executors do.

See ``hot_and_cold`` for what makes it one table. The hot part is read when Spark runs, from the snapshot that the
attempt holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from tracelake.operators.hot_and_cold import look, not_cold
from tracelake.operators.inputs import Input
from tracelake.operators.postgres_input import scan_of_input
from tracelake.operators.spark_input import no_rows_yet, read_files
from tracelake.operators.spark_postgres_input import dataframe_of, splits

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_both_dataframe(source: Input, hot: UUID, spark: SparkSession) -> DataFrame:
    files = look(source)
    cold = read_files(source, files, spark) if files else None
    spans = not_cold(source.scope, files)
    scan = scan_of_input(source, spans, version=hot) if spans else None
    if scan is None:
        if cold is None:
            raise no_rows_yet(source)
        return cold
    rows = dataframe_of(scan, spark, splits(scan, source.data.snapshot().connection))
    return rows if cold is None else cold.select(*rows.columns).unionAll(rows)
