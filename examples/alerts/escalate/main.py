"""Critical alerts become incidents; one that is retracted, because its block is gone, is withdrawn."""

import json

from tracelake_function import Task


def handler(event, context):
    task = Task(event)
    window = task.window()
    found = task.query(f"SELECT dedupe_key, payload, position, retracted_at FROM alert_events WHERE {window}")
    task.publish("incidents", [incident(*row) for row in found["rows"]])


def incident(alert, payload, position, retracted_at):
    state = "open" if retracted_at is None else "withdrawn"
    # Of two rows about one alert the one with the higher revision stays.
    return {"alert": alert, "state": state, "payload": json.loads(payload), "revision": position}
