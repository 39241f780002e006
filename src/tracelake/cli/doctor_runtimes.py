"""What the runtimes of workers need beside Python packages: a Java for Spark, a Node for functions in Node."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tracelake.cli.doctor_checks import Finding, Verdict
from tracelake.cli.failures import installed
from tracelake.domain.errors import TracelakeError


def check_runtimes() -> Iterator[Finding]:
    """Only these runtimes need them, so a machine without them isn't broken."""
    if installed("pyspark"):
        yield _java()
    if installed("awslambdaric"):
        yield _node()


def _java() -> Finding:
    from tracelake.worker.spark.java import find_java

    try:
        with tempfile.TemporaryDirectory() as folder:
            java = find_java(os.environ, Path(folder))
    except TracelakeError as error:
        return Finding("java", Verdict.WARNING, error.message, "pip install 'tracelake[spark]'")
    return Finding("java", Verdict.OK, f"Java {java.version} ({java.where}) for Spark")


def _node() -> Finding:
    from tracelake.worker.lambda_.function_program import find_node

    try:
        node = find_node()
    except TracelakeError as error:
        return Finding("node", Verdict.WARNING, error.message, "only functions in Node need it")
    return Finding("node", Verdict.OK, f"{node} for functions in Node")
