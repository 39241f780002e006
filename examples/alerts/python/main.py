"""Transfers of a large amount become alerts."""

from tracelake_function import Task

LARGE = """
    SELECT block_number, transaction_hash, log_index, address, from_address, to_address, value
    FROM token_transfers WHERE {window} AND CAST(value AS DOUBLE) >= ?
"""


def handler(event, context):
    task = Task(event)
    found = task.query(LARGE.format(window=task.window()), [task.config["large"]])
    transfers = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    task.publish("alert_events", [alert(each, task.config["critical"]) for each in transfers])


def alert(transfer, critical):
    return {
        "dedupe_key": f"{transfer['transaction_hash']}:{transfer['log_index']}",
        "block_number": transfer["block_number"],
        "severity": "critical" if int(transfer["value"]) >= critical else "warning",
        "token": transfer["address"],
        "payload": {name: transfer[name] for name in ("from_address", "to_address", "value")},
    }
