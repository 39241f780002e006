"""Why a queued task doesn't run, in the order in which a claim would refuse it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tracelake.contracts.user_api import WaitingFor


def waiting_for(task: Mapping[str, Any], reads: Sequence[Mapping[str, Any]] = ()) -> WaitingFor | None:
    """``task`` is a row of the task with what its job allows, ``reads`` are its inputs as a claim would find
    them. None when it isn't waiting at all."""
    if task["status"] != "Queued":
        return None
    if not task["active"]:
        return WaitingFor("JobRetired", "its job was replaced or removed by a deploy")
    if task["paused"]:
        return WaitingFor("JobPaused", "its job is paused")
    if any(read["superseded"] for read in reads):
        return WaitingFor("LaterTask", "a later task covers its scope; its next claim cancels it")
    if gone := [
        read["published_name"] or str(read["dataset_uuid"]) for read in reads if not read["committed"]
    ]:
        return WaitingFor(
            "Inputs", f"its scope was taken back and isn't committed again in {', '.join(gone)}"
        )
    if task["ready_at"] > task["now"]:
        return WaitingFor("RetryTime", "its retry time has not come", until=task["ready_at"])
    if task["earlier_cursor_task"]:
        return WaitingFor("EarlierTask", "an earlier task of its job has not ended")
    cap = task["max_concurrency"]
    if cap is not None and task["running"] >= cap:
        return WaitingFor("CapFull", f"its job runs {task['running']} tasks of at most {cap}")
    if task["undelivered"]:
        return WaitingFor(
            "Delivery", f"it can't be handed over yet: {task['undelivered']}", since=task["woken_at"]
        )
    return WaitingFor(
        "Worker",
        f"no worker of runtime {task['runtime']} has claimed it since its wake-up",
        since=task["woken_at"],
    )
