"""One run of one function: an environment is found or made, given the event, and kept if it is still good."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from tracelake.contracts.bundles import NOOP_FUNCTION, Invocation, function_of
from tracelake.domain.errors import TracelakeError
from tracelake.worker.lambda_.attempt_token import AttemptToken
from tracelake.worker.lambda_.environment import Environment
from tracelake.worker.lambda_.environment_pool import EnvironmentPool
from tracelake.worker.lambda_.function_program import FunctionIdentity
from tracelake.worker.lambda_.runtime_api import Broken, Result, RuntimeCall
from tracelake.worker.sandbox.spec import MIB

MEMORY_BYTES = 256 * MIB
NOOP_ENTRYPOINT = "noop.handler"
_FRESH_TRIES = 2


@dataclass(slots=True)
class FunctionRun:
    """``log_fd`` takes what the function prints; ``emitted`` is what became known when it is over."""

    task: Invocation
    event: bytes = field(repr=False)
    deadline: float
    log_fd: int
    emitted: bool = False


def identity_of(task: Invocation) -> FunctionIdentity:
    function = function_of(task)
    return FunctionIdentity(
        bundle=function,
        entrypoint=NOOP_ENTRYPOINT if function == NOOP_FUNCTION else str(task.udf["entrypoint"]),
        dag=task.job.dag_name,
        job=task.job.name,
        timeout_seconds=task.timeout_seconds,
        memory_bytes=MEMORY_BYTES,
    )


async def run_function(pool: EnvironmentPool, run: FunctionRun) -> Result:
    """What the function answered. Cancelled, it leaves nothing running."""
    function = identity_of(run.task)
    result: Result = Broken("the function was never started")
    for _ in range(_FRESH_TRIES):
        try:
            environment = await pool.take(function, run.log_fd)
        except TracelakeError as error:
            return Broken(error.message, retryable=error.status >= 500)
        except OSError as error:
            return Broken(f"the function's environment can't be made: {error}")
        result = await _invoke(pool, environment, run)
        if not (isinstance(result, Broken) and not result.started and environment.was_warm):
            break
    return result


async def _invoke(pool: EnvironmentPool, environment: Environment, run: FunctionRun) -> Result:
    left = run.deadline - asyncio.get_running_loop().time()
    call = RuntimeCall(
        run.event,
        deadline_ms=int((time.time() + left) * 1000),
        arn=environment.function.arn,
        trace_id=f"Root={run.task.task_id};Attempt={run.task.attempt}",
        token=AttemptToken(run.task.capability_token, run.task.task_id, run.task.attempt),
    )
    kept = False
    try:
        result = await environment.invoke(call)
        run.emitted = "events" in environment.spoke
        await environment.output.detach()
        kept = environment.usable
        return result
    finally:
        if kept:
            pool.give_back(environment)
        else:
            await environment.close()
