"""An operator process that holds every slot of the shared Spark for ever: for tests that kill it."""

from __future__ import annotations

import sys
from typing import Any

from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.worker.spark import session as spark_session


def main() -> None:
    url, task_id = sys.argv[1:]
    token = sys.stdin.readline().strip()

    def say(fields: dict[str, Any]) -> None:
        if fields["tasks"]:
            sys.stdout.write("running\n")
            sys.stdout.flush()

    connection = spark_session.open_session(SparkTarget(url=url, token=token))
    work = spark_session.begin(connection, task_id, 1, 1, say)
    work.session.range(0, 10**17, 1, 2).selectExpr("sum(id % 7)").collect()


if __name__ == "__main__":
    main()
