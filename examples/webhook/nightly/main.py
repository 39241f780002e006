"""Each tick: how many transfers each contract has by now."""

from tracelake_function import Task

COUNTS = "SELECT address, count(*) AS transfers FROM called_transfers GROUP BY address"


def handler(event, context):
    task = Task(event)
    found = task.query(COUNTS)
    task.publish(
        "nightly_counts",
        [{"tick": task.upto, "contract": address, "transfers": count} for address, count in found["rows"]],
    )
