"""What the zygote imports so that operator processes needn't.

The built-in operators and the libraries that they need. What the worker was told to load, and operators of
installed packages, are imported by the processes that run them: nobody vouches for what they do at import, and the
zygote is the template of everybody's processes. For Spark, the Connect client without a channel: gRPC's threads
wouldn't survive a fork.
"""

from __future__ import annotations

import importlib
import os
import sys

from tracelake.domain.errors import Invalid
from tracelake.operators.registry import BUILT_IN, Registry

_SPARK = (
    "pandas",
    "pyarrow",
    "grpc",
    "pyspark.sql.connect.session",
    "pyspark.sql.connect.functions",
    "pyspark.sql.connect.dataframe",
    "tracelake.operators.spark_input",
    "tracelake.operators.spark_output",
    "tracelake.worker.spark.session",
)
_NEEDS_SPARK = ("sql_transform",)


def preload(*, spark: bool) -> Registry:
    # Libraries that would start a thread per core as they are imported; in the copies they wouldn't run.
    single = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    os.environ.update(single)
    try:
        if spark:
            _import_spark()
        registry = Registry.standard()
        for name in BUILT_IN:
            if spark or name not in _NEEDS_SPARK:
                registry.get(name)
    finally:
        for name in single:
            os.environ.pop(name, None)
    return registry


def _import_spark() -> None:
    try:
        for name in _SPARK:
            importlib.import_module(name)
    except ImportError as error:
        raise Invalid(
            "SparkMissing",
            f"the Spark client can't be imported ({error}); install it: pip install 'tracelake[spark]'"
            f" for {sys.executable}",
        ) from None
