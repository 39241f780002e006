"""A call asks for the blocks of a contract: {"contract": "0x…", "from_block": 0, "to_block": 999}."""

import json
import re

from tracelake_function import Task

CONTRACT = re.compile(r"0x[0-9a-f]{40}")
FIELDS = ("contract", "from_block", "to_block")


def handler(event, context):
    task = Task(event)
    try:
        wanted = parse(task.source_body(), task.config["most_blocks"])
    except (ValueError, TypeError) as error:
        # The same body is wrong again: no second attempt.
        task.fail(f"the call can't be used: {error}", retryable=False)
        return
    delivery = task.source["delivery"]
    task.publish("called_contracts", [{**wanted, "delivery": delivery["id"]}])
    task.emit(start=wanted["from_block"], end=wanted["to_block"])


def parse(body, most):
    asked = json.loads(body)
    if not isinstance(asked, dict):
        raise ValueError("its body is no JSON object")
    if missing := [name for name in FIELDS if name not in asked]:
        raise ValueError(f"{' and '.join(missing)} missing")
    contract, first, last = str(asked["contract"]).lower(), int(asked["from_block"]), int(asked["to_block"])
    if not CONTRACT.fullmatch(contract):
        raise ValueError(f"{contract!r} is no address")
    if not 0 <= first <= last or last - first >= most:
        raise ValueError(f"blocks {first} to {last} are no range of at most {most}")
    return {"contract": contract, "from_block": first, "to_block": last}
