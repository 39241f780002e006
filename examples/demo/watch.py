"""The demo's function: it runs in a sandbox, sees the transfers of its window, and publishes the large ones."""

from typing import Any

from tracelake_function import Task

LARGE = "SELECT transaction_hash, log_index, block_number, address, value FROM transfers WHERE {} AND {}"


def handler(event: dict[str, Any], context: object) -> None:
    task = Task(event)
    found = task.query(LARGE.format(task.window(), "CAST(value AS DOUBLE) >= ?"), [task.config["large"]])
    task.publish("alerts", [alert(*row) for row in found["rows"]])


def alert(transaction: str, index: int, block: int, token: str, amount: str) -> dict[str, Any]:
    return {
        "dedupe_key": f"{transaction}:{index}",
        "block_number": block,
        "token": token,
        "amount": amount,
    }
